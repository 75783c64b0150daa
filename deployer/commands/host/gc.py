"""`gc`: shows what a host no longer needs, then removes it."""

from __future__ import annotations

from deployer import terminal
from deployer.agent.gc.view import GcReport
from deployer.agent.host.typed import to_json
from deployer.agent.requests.files.view import UnpulledFiles
from deployer.connection.host import Host
from deployer.errors import UsageError
from deployer.printable import cells, shown

_KINDS = {
    "tree": "file lists of trees",
    "blob": "files in the store",
    "pack": "packs of files in the store",
    "data": "data sets and wheels",
    "env": "Python environments",
    "agent": "agents of other versions",
    "cache": "caches of compiled code",
    "spare": "spare copy of a tree",
    "tmp": "leftovers",
}


def gc(host: Host, *, limits: dict[str, float | int | None], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Shows what no job needs any more (and the ended jobs beyond the limits), asks, and removes it."""
    if not (dry_run or yes) and not terminal.has_person(as_json=as_json):
        raise UsageError("gc asks before it removes, and nobody can answer here", hint="--dry-run shows; --yes removes")
    with host.connect(request={"op": "gc", "dry_run": not yes or dry_run, "unfetched": True, **limits}) as link:
        found = link.first.result("gc", GcReport)
        if not (dry_run or yes) and (found.jobs or found.rest):
            _show_gc(host, found, done=False)
            question = shown(f"Remove {terminal.size(found.total_bytes)}?")
            terminal.confirm(question, declined=shown("nothing was removed"))
            only = [job.id for job in found.jobs]
            found, yes = link.call("gc", only=only, unfetched=True, **limits).result("gc", GcReport), True
    if as_json:
        terminal.say_json({**to_json(found), "removed": yes and not dry_run})
    else:
        _show_gc(host, found, done=yes and not dry_run)


def _show_gc(host: Host, found: GcReport, *, done: bool) -> None:
    rows = [(f"job {job.id}", "", terminal.size(job.size_bytes), _age(job.ended_s)) for job in found.jobs]
    for of in found.rest:
        what = _KINDS.get(of.kind, of.kind)
        rows.append((what, str(of.count), terminal.size(of.size_bytes), _age(of.oldest_s)))
    if rows:
        columns = cells("REMOVED" if done else "TO REMOVE", "COUNT", "SIZE", "OLDEST")
        terminal.table(columns, [cells(*row) for row in rows])
    for job in found.jobs:
        if job.unfetched is not None and job.unfetched.files:
            terminal.notice(shown(_unfetched_line(job.id, job.unfetched, done=done)))
    for kept in found.kept_jobs:
        jobs = "job" if kept.count == 1 else "jobs"
        terminal.notice(shown(f"kept: {kept.count} {jobs}, {kept.what}, {terminal.size(kept.size_bytes)}"))
    for path in found.remaining:
        terminal.notice(shown(f"could not be removed: {path}"))
    size = terminal.size(found.total_bytes)
    free = f"{terminal.size(found.free_bytes)} are free on {host.name} below {found.root}"
    terminal.notice(shown(f"{'removed' if done else 'to remove'}: {size if rows else 'nothing'}; {free}"))


def _unfetched_line(job_id: str, left: UnpulledFiles, *, done: bool) -> str:
    """A line about files that are lost with a job, because they were never pulled as far as the host knows."""
    least = "at least " if left.at_least else ""
    named = ", ".join(name.removeprefix("code/") for name in left.largest)
    what = f"{least}{terminal.counted(left.files, 'file')}, {terminal.size(left.size_bytes)}: {named}"
    bring = "" if done else f"; {terminal.invoked_as()} pull {job_id} {' '.join(map(terminal.typed, left.names))}"
    return f"never pulled of {job_id}: {what}{bring}"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else terminal.age(seconds)
