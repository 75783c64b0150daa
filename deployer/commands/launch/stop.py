"""`stop`: jobs ended, and what of them remains on their hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from deployer import terminal
from deployer.agent.job.status import FINAL, LOST
from deployer.agent.job.stop import DEFAULT_GRACE_S
from deployer.commands.in_words import state_line
from deployer.connection.host import Host
from deployer.errors import FerryError, UnknownJob, UsageError
from deployer.jobs.registry import forget
from deployer.jobs.requests import stop_jobs
from deployer.jobs.roster import ask_all
from deployer.printable import shown

_LEFT = "remaining", "gpu_holders"
End = dict[str, Any] | FerryError
Place = tuple[Host, str]
"""A job: its host, its id."""


def stop(places: Sequence[Place], *, grace_s: float | None, force: bool, as_json: bool) -> int:
    """Stops jobs; 0 when nothing of them remains, 1 when something does, an error's code when one was not stopped."""
    if force and grace_s is not None:
        raise UsageError("--force gives no time to save, so --grace has no meaning with it", hint="give one of the two")
    within_s = 0.0 if force else DEFAULT_GRACE_S if grace_s is None else grace_s
    told: set[str] = set()

    def tell(job_id: str, status: dict[str, Any]) -> None:
        if job_id not in told:  # a job that has ended tells nothing
            told.add(job_id)
            how = "at once (--force)" if force else f"up to {within_s:g} s to save (--grace)"
            terminal.notice(shown(f"stopping {job_id}: {how}"))
        if status.get("phase"):
            terminal.notice(shown(f"  {job_id + ' ' if len(places) > 1 else ''}{status['phase']}"))

    try:
        ends = stop_jobs(places, grace_s=within_s, force=force, on_state=tell)
    except KeyboardInterrupt:
        terminal.notice(shown("the host goes on stopping " + ", ".join(job_id for _, job_id in places)))
        raise
    ends = [_forget(end, *place) for end, place in zip(ends, places, strict=True)]
    if as_json:
        terminal.say_json([_as_json(job_id, end) for (_, job_id), end in zip(places, ends, strict=True)])
    errors = [end for end in ends if isinstance(end, FerryError)]
    if len(places) == len(errors) == 1:
        raise errors[0]
    return max((_report(end) for end in ends), default=0)


def _forget(end: End, host: Host, job_id: str) -> End:
    """Drops this client's notes of a job that has no folder and no process there any more; how the stop went."""
    if isinstance(end, UnknownJob) and forget(job_id, host.ssh, host.root):
        return {"job_id": job_id, "state": LOST, "was": LOST, "reason": "its folder is gone", "gone": True}
    if isinstance(end, dict) and end.get("gone") is True:
        forget(end["job_id"], host.ssh, host.root)
    return end


def _as_json(job_id: str, end: End) -> dict[str, Any]:
    if isinstance(end, FerryError):
        return {"id": job_id, "error": end.message, "hint": end.hint}
    keys = ("state", "was", "code", "reason", "ended", "remaining", "gpus_free", "gpu_holders")
    return {"id": end["job_id"], **{key: end.get(key) for key in keys}}


def _report(end: End) -> int:
    """Says what was ended and what remains; the exit code for it."""
    if isinstance(end, FerryError):
        terminal.show_error(end)
        return end.exit_code
    remaining, held = ([row for row in end.get(key) or [] if isinstance(row, dict)] for key in _LEFT)
    for process in remaining:
        terminal.notice(shown(f"  still there: pid {process.get('pid')} {process.get('cmdline')}{_why(process)}"))
    for holder in held:
        who = f"pid {holder['pid']} " if holder.get("pid") else ""
        terminal.notice(
            shown(f"  GPU {holder.get('gpu')} is not free: {who}{holder.get('command')}, {holder['memory_mib']} MiB")
        )
    terminal.notice(shown(_summary(end)))
    return 1 if remaining or end.get("gpus_free") is False else 0


def _why(process: dict[str, Any]) -> str:
    """Why it would not end."""
    if process.get("uid") is not None:
        return f" (it became another user's, uid {process['uid']}: that one or root can end it)"
    return " (the kernel holds it in a call; it ends when that returns)" if process.get("state") == "D" else ""


def _summary(end: dict[str, Any]) -> str:
    ended, left = end.get("ended"), len(end.get("remaining") or [])
    counted = f"{_processes(ended)} ended" if ended else ""
    remains = f"{_processes(left)} of it could not be ended" if left else ""
    forgotten = "its folder is gone, and it is forgotten here" if end.get("gone") is True else ""
    if end.get("was") in FINAL:
        counted = f"{counted} that it had left" if ended else ""
        how = f"{'has' if left else 'had'} ended already: {state_line(end) if end['state'] == LOST else end['state']}"
        return f"{end['job_id']} {how}" + "".join(f"; {text}" for text in (counted, remains, forgotten) if text)
    free = end.get("gpus_free")
    gpus = "" if free is None else f"its GPUs are {'free' if free else 'not free'}"
    told = (counted, remains, gpus, forgotten)
    return f"{end['job_id']} {end['state']}" + "".join(f"; {text}" for text in told if text)


def _processes(count: object) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def stop_all(hosts: Sequence[Host], *, yes: bool, grace_s: float | None, force: bool, as_json: bool) -> int:
    """Stops every job of these hosts that has not ended; asks before. As `stop` returns, 125 for a host that could not
    be asked."""
    places: list[Place] = []
    unasked = 0
    for host, answer in zip(hosts, ask_all(hosts), strict=True):
        if isinstance(answer, FerryError):
            terminal.notice(shown(f"{host.name}: {answer.message}; none of its jobs is stopped"))
            unasked = answer.exit_code
            continue
        live = [row for row in answer if row["state"] not in FINAL]
        for row in (row for row in live if row.get("on_host")):
            terminal.notice(shown(f"{row['id']} runs on host {row['on_host']}: connect to that one to stop it"))
        places += [(host, row["id"]) for row in live if not row.get("on_host")]
    if not places:
        terminal.notice(shown("no job to stop"))
        if as_json:
            terminal.say_json([])
        return unasked
    if not yes:
        _ask(places)
    return max(stop(places, grace_s=grace_s, force=force, as_json=as_json), unasked)


def _ask(places: Sequence[Place]) -> None:
    for host, job_id in places:
        terminal.notice(shown(f"  {job_id} on {host.name}"))
    number = "this job" if len(places) == 1 else f"these {len(places)} jobs"
    if not sys.stdin.isatty():
        raise UsageError(f"{number} would be stopped; there is no terminal to ask on", hint="add --yes")
    terminal.confirm(shown(f"stop {number}?"), declined=shown("nothing was stopped"))
