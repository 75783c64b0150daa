"""`stop`: stops jobs and reports what remains of them on their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployer import terminal
from deployer.agent.host.processes import Survivor
from deployer.agent.host.typed import to_json
from deployer.agent.job.status import FINAL, LOST, Status
from deployer.agent.job.stop import DEFAULT_GRACE_S
from deployer.agent.job.views import StopReport
from deployer.commands.in_words import state_line
from deployer.connection.host import Host
from deployer.error_json import error_as_json
from deployer.errors import FerryError, UnknownJob, UsageError
from deployer.jobs.registry import forget
from deployer.jobs.requests import End, stop_jobs
from deployer.jobs.roster import ask_all
from deployer.printable import shown

HostJob = tuple[Host, str]
"""A job: its host and its ID."""


def stop(places: Sequence[HostJob], *, grace_s: float | None, force: bool, as_json: bool) -> int:
    """Stops jobs. Returns 0 if nothing of them remains, 1 if something does, an error's code if a stop failed."""
    if force and grace_s is not None:
        raise UsageError("--force gives no time to save, so --grace has no meaning with it", hint="give one of the two")
    within_s = 0.0 if force else DEFAULT_GRACE_S if grace_s is None else grace_s
    told: set[str] = set()

    def tell(job_id: str, status: Status) -> None:
        if job_id not in told:  # tell is not called for a job that has ended
            told.add(job_id)
            how = "at once (--force)" if force else f"up to {within_s:g} s to save (--grace)"
            terminal.notice(shown(f"stopping {job_id}: {how}"))
        if status.phase:
            terminal.notice(shown(f"  {job_id + ' ' if len(places) > 1 else ''}{status.phase}"))

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
        errors[0].is_in_json = as_json
        raise errors[0]
    return max((_report(end) for end in ends), default=0)


def _forget(end: End, host: Host, job_id: str) -> End:
    """Drops this client's notes of a job that has no folder and no process on the host any more. Returns the result of
    the stop."""
    if isinstance(end, UnknownJob) and forget(job_id, host.ssh, host.root):
        return StopReport(job_id, Status(LOST, reason="its folder is gone"), LOST, gone=True)
    if isinstance(end, StopReport) and end.gone:
        forget(end.job_id, host.ssh, host.root)
    return end


def _as_json(job_id: str, end: End) -> dict[str, Any]:
    if isinstance(end, FerryError):
        return {"id": job_id, "error": error_as_json(end)}
    status = end.status
    return {
        "id": end.job_id,
        "state": status.state,
        "was": end.was,
        "code": status.code,
        "reason": status.reason or None,
        "ended": status.ended,
        "remaining": to_json(status.remaining),
        "gpus_free": status.gpus_free,
        "gpu_holders": to_json(status.gpu_holders),
    }


def _report(end: End) -> int:
    """Shows what was ended and what remains. Returns the exit code."""
    if isinstance(end, FerryError):
        terminal.show_error(end)
        return end.exit_code
    status = end.status
    for process in status.remaining:
        terminal.notice(shown(f"  still there: pid {process.pid} {process.cmdline}{_why(process)}"))
    for holder in status.gpu_holders:
        who = f"pid {holder.pid} " if holder.pid else ""
        terminal.notice(shown(f"  GPU {holder.gpu} is not free: {who}{holder.command}, {holder.memory_mib} MiB"))
    terminal.notice(shown(_summary(end)))
    return 1 if status.remaining or status.gpus_free is False else 0


def _why(process: Survivor) -> str:
    """The reason why a process did not end; empty if unknown."""
    if process.uid is not None:
        return f" (it became another user's, uid {process.uid}: that one or root can end it)"
    return " (the kernel holds it in a call; it ends when that returns)" if process.state == "D" else ""


def _summary(end: StopReport) -> str:
    status, ended, left = end.status, end.status.ended, len(end.status.remaining)
    counted = f"{_processes(ended)} ended" if ended else ""
    remains = f"{_processes(left)} of it could not be ended" if left else ""
    forgotten = "its folder is gone, and it is forgotten here" if end.gone else ""
    if end.was in FINAL:
        counted = f"{counted} that it had left" if ended else ""
        how = state_line(status) if status.state == LOST else status.state
        how = f"{'has' if left else 'had'} ended already: {how}"
        return f"{end.job_id} {how}" + "".join(f"; {text}" for text in (counted, remains, forgotten) if text)
    free = status.gpus_free
    gpus = "" if free is None else f"its GPUs are {'free' if free else 'not free'}"
    told = (counted, remains, gpus, forgotten)
    return f"{end.job_id} {status.state}" + "".join(f"; {text}" for text in told if text)


def _processes(count: int | None) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def stop_all(hosts: Sequence[Host], *, yes: bool, grace_s: float | None, force: bool, as_json: bool) -> int:
    """Stops every job on these hosts that has not ended, after a question. Returns the exit code of `stop`, or the code
    of a host that could not be asked (usually 125) if it is larger."""
    places: list[HostJob] = []
    unasked = 0
    for host, answer in zip(hosts, ask_all(hosts), strict=True):
        if isinstance(answer, FerryError):
            terminal.notice(shown(f"{host.name}: {answer.message}; none of its jobs is stopped"))
            unasked = answer.exit_code
            continue
        live = [row.job for row in answer if row.trouble or row.job.state not in FINAL]
        for job in (job for job in live if job.on_host):
            terminal.notice(shown(f"{job.id} runs on host {job.on_host}: connect to that one to stop it"))
        places += [(host, job.id) for job in live if not job.on_host]
    if not places:
        terminal.notice(shown("no job to stop"))
        if as_json:
            terminal.say_json([])
        return unasked
    if not yes:
        _ask(places, as_json=as_json)
    return max(stop(places, grace_s=grace_s, force=force, as_json=as_json), unasked)


def _ask(places: Sequence[HostJob], *, as_json: bool) -> None:
    for host, job_id in places:
        terminal.notice(shown(f"  {job_id} on {host.name}"))
    number = "this job" if len(places) == 1 else f"these {len(places)} jobs"
    if not terminal.has_person(as_json=as_json):
        raise UsageError(f"{number} would be stopped; there is no terminal to ask on", hint="add --yes")
    terminal.confirm(shown(f"stop {number}?"), declined=shown("nothing was stopped"))
