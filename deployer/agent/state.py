"""The truth about a job: what its supervisor wrote, checked against what still runs.

States: queued, preparing, running, succeeded, failed, stopped, lost; beside `running`, `unsupervised` is true when the
supervisor is gone and the ranks go on. A host judges only jobs of its own machine id: homes may be shared.
Stdlib only, Python 3.8, Linux.
"""

import errno
import fcntl
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional

from .ending import ENDINGS, RankRecord, decide_ending, parse_rank_record, with_outcome
from .files import read_json, write_json
from .layout import Job
from .locks import is_held
from .procs import Process, is_running, job_processes, process_of

QUEUED, PREPARING, RUNNING, LOST = "queued", "preparing", "running", "lost"
FINAL = (*ENDINGS, LOST)
DEFAULT_GRACE_S = 120.0
TOOL_FAILED = 125
"""The code of a job that never started, or whose end nobody knows."""
LAUNCH_S = 60.0
"""A job folder without a status may be this old before its launch counts as broken off."""


class Identity(NamedTuple):
    """A process, for good: no other one on any machine is equal to it."""

    machine_id: str
    boot_id: str
    pid: int
    start_time: int
    hostname: str


class StopRequest(NamedTuple):
    """`_mono` times are of this boot's monotonic clock, in seconds: the wall clock may jump while a job stops."""

    grace_s: float
    requested_at: float  # Unix time of the first request, for the eye
    requested_mono: float
    deadline_mono: float  # a later request may only bring it forward
    reason: str = ""  # why the supervisor itself asks; empty for a request from outside
    force: bool = False  # KILL at once


def this_machine() -> str:
    """A name for this host that survives reboots. The host name is part of it: cloned images share /etc/machine-id."""
    text = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path) as f:
                text = text or f.read().strip()
        except OSError:
            continue
    return "%s/%s" % (text, os.uname().nodename)


def boot_id() -> str:
    """Differs after a reboot; empty where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return ""


def own_identity() -> Identity:
    process = process_of(os.getpid())
    return Identity(this_machine(), boot_id(), process.pid, process.start_time, os.uname().nodename)


def is_alive(identity: Identity) -> bool:
    """Whether this very process runs on this host. False for one of another machine or boot."""
    return (
        identity.machine_id == this_machine()
        and identity.boot_id == boot_id()
        and is_running(Process(identity.pid, identity.start_time))
    )


def utc(time_s: float) -> str:
    """A Unix time as it stands in the records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


def read_status(job: Job) -> Optional[Dict[str, Any]]:
    """What the supervisor wrote last, taken at its word; None before its start. See `judge` for the truth."""
    return read_json(job.status)


def write_status(job: Job, status: Dict[str, Any]) -> None:
    write_json(job.status, status)


def read_plan(job: Job) -> Dict[str, Any]:
    """The plan from job.json, empty when there is none."""
    plan = (read_json(job.record) or {}).get("plan")
    return plan if isinstance(plan, dict) else {}


def gpus_of(plan: Dict[str, Any], status: Dict[str, Any]) -> List[str]:
    """The job's GPUs as this host chose them, else as they were asked for."""
    slots = status.get("slots")
    chosen = slots.get("gpus") if isinstance(slots, dict) else None
    asked = plan.get("gpus")
    return str(chosen).split(",") if chosen else list(asked) if isinstance(asked, list) else []


def read_ranks(job: Job, attempt: int) -> List[RankRecord]:
    """The ranks that have started, by rank; a broken record counts as none."""
    folder = job.ranks(attempt)
    try:
        names = [n for n in os.listdir(folder) if n.startswith("rank_") and n.endswith(".json")]
    except OSError:
        return []
    ranks = []
    for name in names:
        try:
            ranks.append(parse_rank_record(read_json(os.path.join(folder, name)) or {}))
        except (KeyError, TypeError, ValueError):
            continue
    return sorted(ranks)


def new_stop(grace_s: float, *, reason: str = "", force: bool = False) -> StopRequest:
    """A request that begins now."""
    now = time.monotonic()
    return StopRequest(grace_s, time.time(), now, now + grace_s, reason, force)


def request_stop(job: Job, grace_s: float = DEFAULT_GRACE_S, *, reason: str = "", force: bool = False) -> StopRequest:
    """Asks for an orderly end within `grace_s` seconds, or with `force` for one at once. Harmless to repeat: only a
    shorter time, or force, replaces the first."""
    wanted = new_stop(0.0 if force else grace_s, reason=reason, force=force)
    before = read_stop(job)
    if before is not None:
        if before.force or (wanted.deadline_mono >= before.deadline_mono and not force):
            return before
        first = {key: getattr(before, key) for key in ("requested_at", "requested_mono", "reason")}
        wanted = wanted._replace(**first)
    os.makedirs(job.control, mode=0o700, exist_ok=True)
    try:
        write_json(job.stop, wanted._asdict())
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        os.truncate(job.reserve, os.path.getsize(job.reserve) // 2)  # the rest stays for the final status
        write_json(job.stop, wanted._asdict())
    return wanted


def read_stop(job: Job) -> Optional[StopRequest]:
    """The request, None without one. A flag file that somebody made by hand asks for the default grace."""
    try:
        touched_at = os.stat(job.stop).st_mtime
    except OSError:
        return None
    try:
        data = read_json(job.stop) or {}
        times = [float(data[key]) for key in ("grace_s", "requested_at", "requested_mono", "deadline_mono")]
        reason, force = str(data.get("reason", "")), data.get("force") is True
        return StopRequest(times[0], times[1], times[2], times[3], reason, force)
    except (KeyError, TypeError, ValueError):
        mono = time.monotonic() - max(0.0, time.time() - touched_at)
        return StopRequest(DEFAULT_GRACE_S, touched_at, mono, mono + DEFAULT_GRACE_S)


def judge(job: Job) -> Dict[str, Any]:
    """The job's status as it really is: the written one, with `state`, `code` and `reason` put right.

    `on_host` names the machine when it is another one's job, which is then shown as written. A job whose supervisor is
    gone gets its final status written here, once. One whose status says what cannot be is lost.
    """
    try:
        return _judge(job)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = "its status is damaged: %s" % str(error)[:200]
        return {"state": LOST, "code": TOOL_FAILED, "reason": reason, "damaged": True}


def _judge(job: Job) -> Dict[str, Any]:
    status = read_status(job)
    if status is None:
        return _without_status(job)
    if status.get("state") in FINAL:
        return status
    identity = supervisor_of(status)
    if identity is None:
        return {**status, "state": LOST, "code": TOOL_FAILED, "reason": "status.json names no supervisor"}
    if identity.machine_id != this_machine():
        return {**status, "on_host": identity.hostname}
    if is_alive(identity):
        return status
    latest = read_status(job) or status  # it may have written its last word just before it ended
    return (
        latest
        if latest.get("state") in FINAL or latest.get("supervisor") != status["supervisor"]
        else _orphaned(job, latest)
    )


def supervisor_of(status: Dict[str, Any]) -> Optional[Identity]:
    try:
        return Identity(**status["supervisor"])
    except (KeyError, TypeError):
        return None


def former_attempt(status: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """What the status keeps of the attempt before this one; None when this is the first since launch or resume."""
    number = int(status.get("attempt") or 1)
    if number <= int(status.get("first_attempt") or 1):
        return None
    return next((a for a in status.get("attempts") or [] if a.get("attempt") == number - 1), None)


def main_process(status: Dict[str, Any]) -> Optional[Process]:
    """torchrun, or the only rank's wrapper; None before its start."""
    main = status.get("main")
    return Process(int(main["pid"]), int(main["start_time"])) if isinstance(main, dict) else None


def _without_status(job: Job) -> Dict[str, Any]:
    try:
        age_s = time.time() - os.stat(job.path).st_mtime
    except OSError:
        return {"state": LOST, "code": TOOL_FAILED, "reason": "the job has no folder"}
    if abs(age_s) < LAUNCH_S or is_held(job.lock, fcntl.LOCK_SH):
        return {"state": PREPARING}
    return {"state": LOST, "code": TOOL_FAILED, "reason": "the launch did not complete"}


def _orphaned(job: Job, status: Dict[str, Any]) -> Dict[str, Any]:
    """The supervisor was killed: do its processes go on, and if not, how did they end?"""
    attempt = int(status.get("attempt", 1))
    rebooted = status["supervisor"]["boot_id"] != boot_id()
    ranks = read_ranks(job, attempt)
    if not rebooted and _any_running(job, status, ranks):
        return {**status, "state": RUNNING, "unsupervised": True}
    final = {**status, **_end_of_orphan(job, status, ranks, rebooted=rebooted), "phase": None, "queue": None}
    try:
        write_status(job, final)
    except OSError:
        pass  # a full or read-only disk: the next one judges the same
    return final


def _any_running(job: Job, status: Dict[str, Any], ranks: List[RankRecord]) -> bool:
    main = main_process(status)
    processes = [Process(r.pid, r.start_time) for r in ranks if r.code is None]
    processes += [Process(r.wrapper_pid, r.wrapper_start_time) for r in ranks]
    if any(is_running(p) for p in processes + ([main] if main else [])):
        return True
    # a supervisor that was killed early may not have noted what it had started
    return main is None and bool(job_processes(job))


def _end_of_orphan(job: Job, status: Dict[str, Any], ranks: List[RankRecord], *, rebooted: bool) -> Dict[str, Any]:
    stop = read_stop(job)
    ending = decide_ending(
        ranks,
        nproc=int(status.get("nproc", 1)),
        launcher_code=None,
        stop_requested_mono=stop.requested_mono if stop else None,
        stop_reason=stop.reason if stop else "",
    )
    ending = with_outcome(ending, read_json(job.outcome))
    if ending is not None:
        ended_at = max((r.ended_at_ns for r in ranks), default=0) / 1e9
        return {**ending._asdict(), "ended_at": utc(ended_at or time.time())}
    former = former_attempt(status)
    if status.get("state") == PREPARING and former is not None:  # between two attempts of one supervisor
        how = "the host was rebooted" if rebooted else "its supervisor was killed"
        reason = "%s; %s before attempt %d" % (former.get("reason"), how, status["attempt"])
        kept = {key: former.get(key) for key in ("state", "code", "first_failing_rank", "signal", "ended_at")}
        return {**kept, "reason": reason}
    if rebooted:
        reason = "the host was rebooted"
    elif status.get("state") == QUEUED:
        reason = "it waited for its GPUs, and its supervisor is gone"
    elif main_process(status) is None:
        reason = "the launch did not complete: its supervisor is gone"
    else:
        reason = "the supervisor and the job's processes are gone and left no exit record"
    return {"state": LOST, "code": TOOL_FAILED, "reason": reason, "ended_at": utc(time.time())}
