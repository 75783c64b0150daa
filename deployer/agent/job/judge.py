"""Finds a job's true state: checks the supervisor's status against the running processes.

A host judges only the jobs with its machine ID: homes may be shared. Stdlib only, Python 3.8, Linux.
"""

import fcntl
import os
import time
from typing import List, Optional

from ..host.layout import Job
from ..host.locks import is_held
from ..host.machine import boot_id, is_alive, this_machine
from ..host.marks import Found, ProcessSnapshot, is_here, supervises
from ..host.processes import Process, is_running
from .ending import Evidence, decide_ending, group_ends, read_outcome, read_ranks
from .status import (
    FINAL,
    LOST,
    PREPARING,
    QUEUED,
    RUNNING,
    TOOL_FAILED,
    Status,
    StoredStatus,
    former_attempt,
    main_processes,
    read_stored_status,
    utc,
    write_status,
)
from .stop import read_stop

TURNS = 10
"""How often a status that keeps changing, as that of another host may, is read again."""
LAUNCH_S = 60.0
"""Seconds after which the launch of a job folder without a status counts as failed."""


def judge(job: Job, snapshot: Optional[ProcessSnapshot] = None, *, is_locked: bool = False) -> Status:
    """The job's true status: the written one with corrected `state`, `code` and `reason`.

    `on_host` names the machine if the job belongs to another one; its status is then returned as written. For a job
    whose supervisor is gone, this writes the final status once. `damaged`: why the written status is not used; then the
    processes show whether the job runs. `snapshot`: an earlier snapshot, for many jobs at once. `is_locked`: the caller
    holds the job's lock, so it is not being launched.
    """
    stored = read_stored_status(job)
    for _ in range(TURNS):
        if stored.status is not None and _is_beyond_doubt(job, stored.status):
            return stored.status
        found = (snapshot or ProcessSnapshot()).of(job)
        latest = read_stored_status(job)
        if latest.status is None and stored.status is not None:
            latest = stored
        # if a supervisor has begun or ended in between, the status has changed, and the older snapshot does not show it
        is_old = latest != stored or (snapshot is not None and not found.all and _may_be_orphan(stored))
        stored, snapshot = latest, None
        if not is_old:
            break
    return _judge(job, stored, found, is_locked)


def _may_be_orphan(stored: StoredStatus) -> bool:
    """Whether the job would be judged as ended although a newer snapshot may show processes of it: it belongs to this
    machine and this boot. After a reboot nothing of it can have started."""
    status = stored.status
    if status is None or status.state in FINAL or status.supervisor is None:
        return False
    return status.supervisor.machine_id == this_machine() and status.supervisor.boot_id == boot_id()


def _is_beyond_doubt(job: Job, status: Status) -> bool:
    """Whether the status is certain without reading all processes: the job has ended, was swept and its supervisor and
    main processes are gone, or its supervisor runs."""
    identity = status.supervisor
    if identity is None:
        return False
    supervised = is_alive(identity) and supervises(identity.pid, job)
    if status.state not in FINAL:
        return supervised
    return status.swept is not None and not supervised and not _mains_of(status)


def _mains_of(status: Status) -> List[Process]:
    """The running processes that the supervisor started on this host: whatever the status says, they have not ended."""
    running = [main for main in main_processes(status) if is_running(main)]
    left = {Process(survivor.pid, survivor.start_time) for survivor in status.remaining}
    return [main for main in running if main not in left]


def _judge(job: Job, stored: StoredStatus, found: Found, is_locked: bool) -> Status:
    status = stored.status
    if status is None:
        return _without_status(job, stored.damage, found, is_locked)
    identity = status.supervisor
    if identity is None:
        return status
    if status.state in FINAL:
        return _said_to_have_ended(job, status, found)
    if identity.machine_id != this_machine():
        is_ours = found.supervisors or (found.others and found.attempt == status.attempt)
        if not is_ours or not any(map(is_here, found.all)):  # else another attempt has left something here
            return status._replace(on_host=identity.hostname)
        if not found.supervisors:
            return _damaged("its status.json names another host, %s" % identity.hostname[:80], found)
    if found.supervisors:
        return status  # one that has only begun is about to write its own
    return _orphaned(job, status, found, rebooted=identity.boot_id != boot_id())


def _without_status(job: Job, damage: str, found: Found, is_locked: bool) -> Status:
    """Judges a job whose status.json is missing or damaged."""
    begun = not os.path.isdir(job.path) or os.path.lexists(job.status) or os.path.isdir(os.path.join(job.path, "logs"))
    if found.all and (begun or found.others):
        return _damaged(damage, found)
    if begun:
        from ..logs.read import latest_attempt  # seldom needed

        reason = damage + ", and nothing of it runs"
        attempt = latest_attempt(job) or 0  # the next one must not write into its files
        return Status(LOST, attempt=attempt, code=TOOL_FAILED, reason=reason, damaged=damage)
    age_s = time.time() - os.stat(job.path).st_mtime
    is_launched = not is_locked and (abs(age_s) < LAUNCH_S or is_held(job.lock, fcntl.LOCK_SH))
    if found.supervisors or is_launched:
        return Status(PREPARING)
    return Status(LOST, code=TOOL_FAILED, reason="the launch did not complete")


def _said_to_have_ended(job: Job, status: Status, found: Found) -> Status:
    """Checks a final status against the processes. A supervisor writes it only after it has ended every process that it
    could. So the job has not ended if one of its ranks or main processes runs, or a supervisor with any process of it.
    If it was not swept, any process of it or its supervisor is enough."""
    left = {Process(survivor.pid, survivor.start_time) for survivor in status.remaining}
    ours = set(found.others) - left
    known = {record.program for record in read_ranks(job, status.attempt)} | set(main_processes(status))
    unswept = status.swept is None and (ours or found.supervisors)
    if known & ours or unswept or (found.supervisors and ours):
        return _damaged("its status.json says that it has ended, %s" % status.state, found)
    return status


def _damaged(damage: str, found: Found) -> Status:
    """The status of a job that runs, whatever its status file says."""
    count = len(found.all)
    warning = "%s; %d process%s of it run%s" % (damage, count, *(("", "s") if count == 1 else ("es", "")))
    return Status(
        RUNNING,
        attempt=found.attempt,
        warnings=(warning,),
        unsupervised=not found.supervisors,
        damaged=damage,
    )


def _orphaned(job: Job, status: Status, found: Found, *, rebooted: bool) -> Status:
    """The status of a job whose supervisor was killed. While any process of the job runs, even a leftover, it has not
    ended: the next supervisor watches the ranks, ends leftovers and writes how the job ended."""
    if found.others:
        return status._replace(state=RUNNING, unsupervised=True)
    if status.state == QUEUED and status.after and not rebooted:
        return status._replace(unsupervised=True)  # its next supervisor waits on
    final = _end_of_orphan(job, status, rebooted=rebooted)._replace(phase=None, queue=None)
    try:
        write_status(job, final)
    except OSError:
        pass  # a full or read-only disk: the next one judges the same
    return final


def _end_of_orphan(job: Job, status: Status, *, rebooted: bool) -> Status:
    ranks = read_ranks(job, status.attempt)
    ending = decide_ending(Evidence(ranks, group_ends(status), read_stop(job), read_outcome(job)))
    if ending is not None:
        ended_at = max((rank.ended_at_ns for rank in ranks), default=0) / 1e9
        return status._replace(**ending._asdict(), ended_at=utc(ended_at or time.time()))
    former = former_attempt(status)
    if status.state == PREPARING and former is not None:  # between two attempts of one supervisor
        how = "the host was rebooted" if rebooted else "its supervisor was killed"
        return status._replace(
            state=former.state,
            code=former.code,
            reason="%s; %s before attempt %d was seen to run" % (former.reason, how, status.attempt),
            first_failing_rank=former.first_failing_rank,
            first_failing_group=former.first_failing_group,
            signal=former.signal,
            ended_at=former.ended_at,
        )
    if rebooted:
        waited = " while it waited for %s" % ", ".join(status.after) if status.after else ""
        reason = "the host was rebooted" + waited
    elif status.state == QUEUED:
        reason = "it waited for its GPUs, and its supervisor is gone"
    elif not main_processes(status):
        reason = "the launch did not complete: its supervisor is gone"
    else:
        reason = "the supervisor and the job's processes are gone and left no exit record"
    return status._replace(state=LOST, code=TOOL_FAILED, reason=reason, ended_at=utc(time.time()))
