"""`stop`: ends a job and all its processes, whatever its files contain.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import signal
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple, Optional, Set

from ..host.errors import AgentError
from ..host.files import remove_folder
from ..host.killing import end_all
from ..host.layout import Job, Root
from ..host.locks import locked
from ..host.marks import ProcessSnapshot
from ..host.processes import Process, send
from ..host.typed import to_json
from ..job.judge import judge
from ..job.status import FINAL, PREPARING, RUNNING, STOPPED, Status, read_status, utc, write_status
from ..job.stop import DEFAULT_GRACE_S, request_stop
from ..job.views import StopReport
from ..wire.conversation import Call
from .jobs import GONE_S, adopt, find_job, sweep_ended, with_remaining

HEARD_S = 5.0
"""Seconds after which a supervisor that does not react to a stop gets a TERM: it may look for the request in the job
folder's former place."""
OWN_S = 60.0
"""Seconds beyond the grace period after which a job is ended without its supervisor."""


class _StopAsked(NamedTuple):
    job: str
    grace_s: float = DEFAULT_GRACE_S
    force: bool = False


def stop(root: Root, call: Call) -> None:
    """Ends the job and reports the progress until no process of it is left, whatever its files contain. Idempotent.

    It asks the job's supervisor; if that does not answer, it ends the processes itself. It also ends processes that an
    ended job has left.
    """
    asked = call.read(_StopAsked)
    job = find_job(root, asked.job)
    before = judge(job)
    _check_here(job, before)
    was, has_folder, found = before.state, os.path.isdir(job.path), ProcessSnapshot().of(job)
    final: Optional[Status] = before
    runs = was not in FINAL or bool(found.supervisors)
    if not runs and not before.on_host:
        final = sweep_ended(job)
        if final.state not in FINAL:  # somebody has started it again meanwhile
            runs, was = True, final.state
    if runs:
        was = RUNNING if was in FINAL and found.others else was
        final = _Ending(job, call, 0.0 if asked.force else max(0.0, asked.grace_s), force=asked.force).wait()
    if final is None:  # the client has gone; the supervisor goes on
        return
    gone = not has_folder and not final.remaining and _remove_what_was_made_again(job)
    call.send_event("status", to_json(StopReport(job.id, final, was, gone), sparse=True))


def _remove_what_was_made_again(job: Job) -> bool:
    """Removes the folder of a job that had none: it was created for the request and the supervisor's status. Returns
    False if the job has been launched in between."""
    with suppress(OSError, AgentError), locked(job):  # a full disk: then nothing was made again
        if os.path.lexists(job.record):
            return False
        remove_folder(job.path)
    return True


def _check_here(job: Job, status: Status) -> None:
    if status.on_host and status.state not in FINAL:
        raise AgentError(
            "host",
            "job %s runs on host %s, and this is host %s" % (job.id, status.on_host, os.uname().nodename),
            "connect to that host: deploy.py stop %s --ssh %s" % (job.id, status.on_host),
        )


class _Ending:
    """One stop, from the side of the request."""

    def __init__(self, job: Job, call: Call, grace_s: float, *, force: bool) -> None:
        self._job = job
        self._call = call
        self._force = force
        self._began = time.monotonic()
        self._grace_s = grace_s
        self._shown = ""
        self._seen: Set[Process] = set()
        self._others: Set[Process] = set()
        self._told: Set[Process] = set()

    def wait(self) -> Optional[Status]:
        """The final status with the current `remaining`; None if the client is gone before."""
        asked = self._ask()
        ended_at: Optional[float] = None
        while True:
            now = judge(self._job)
            if now.state in FINAL:
                ended_at = ended_at or time.monotonic()
                # the supervisor ends after the final status, unless that is not its own; then it replaces it
                if time.monotonic() > ended_at + GONE_S or not ProcessSnapshot().of(self._job).supervisors:
                    final = self._sweep()
                    if final is not None:
                        return final
            elif ended_at is not None:  # somebody has started it again
                asked, ended_at, self._began = self._ask(), None, time.monotonic()
            elif now.state == PREPARING and not ProcessSnapshot().of(self._job).all:
                # a launch under way, or one that broke off
                final = self._sweep()
                if final is not None:
                    return final
            took_s = time.monotonic() - self._began
            if took_s > self._grace_s + OWN_S or (now.unsupervised and not self._adopt(now)):
                final = self._end_alone(now)
                if final is not None:
                    return final
                ended_at = time.monotonic()
                continue
            if not asked or (took_s > HEARD_S and not now.phase and now.state not in FINAL):
                self._signal_supervisors()
            phase = now.phase or now.state
            if phase != self._shown:
                self._shown = phase
                self._call.send_event("state", to_json(now, sparse=True))
            if self._call.cancelled.wait(0.1):
                return None

    def _ask(self) -> bool:
        """Writes the stop request. Returns whether the supervisor and the ranks can find it."""
        found = ProcessSnapshot().of(self._job)
        self._seen, self._others = set(found.all), set(found.others)
        for supervisor in found.supervisors:
            send(supervisor, signal.SIGCONT)  # a halted one would stop nothing
        try:
            request_stop(self._job, self._grace_s, force=self._force)
        except OSError:
            return False
        return True

    def _signal_supervisors(self) -> None:
        for supervisor in ProcessSnapshot().of(self._job).supervisors:
            if supervisor not in self._told:
                self._told.add(supervisor)
                send(supervisor, signal.SIGTERM)

    def _adopt(self, now: Status) -> bool:
        try:
            adopt(self._job, now)
        except (AgentError, OSError):
            return False
        return True

    def _end_alone(self, now: Status) -> Optional[Status]:
        """Ends the job without its supervisor, which is killed first, because it could start the job again. None as in
        `_sweep`."""
        found = ProcessSnapshot().of(self._job)
        for supervisor in found.supervisors:
            send(supervisor, signal.SIGKILL)
        left_s = max(0.0, self._began + self._grace_s - time.monotonic())
        end_all(lambda: ProcessSnapshot().of(self._job).all, term_s=left_s, settle_s=0.0, seen=found.all)
        return self._sweep(stopped=now)

    def _sweep(self, *, stopped: Optional[Status] = None) -> Optional[Status]:
        """The final status of an ended job, once no process of it is left; None if it was started again in between.
        `stopped`: its status before it was ended without its supervisor."""
        with ExitStack() as held:
            is_locked = self._hold(held)
            now = judge(self._job, is_locked=is_locked)
            if stopped is not None and now.attempt <= stopped.attempt:
                now = self._write_stopped(stopped)
            elif now.state not in FINAL:
                return None
            return self._leave_nothing(now)

    def _hold(self, held: ExitStack) -> bool:
        """Whether the job cannot be started now: its lock is held, or there is no folder for one."""
        try:
            held.enter_context(locked(self._job))
        except OSError:  # a full disk, say
            return False
        except AgentError:
            pass
        return True

    def _write_stopped(self, before: Status) -> Status:
        final = before._replace(
            state=STOPPED,
            code=None,
            reason="stopped on request, without its supervisor",
            phase=None,
            queue=None,
            ended_at=utc(time.time()),
            unsupervised=False,
        )
        if read_status(self._job) is not None:
            with suppress(OSError):  # a full disk: `judge` tells from the processes that it has ended
                write_status(self._job, final)
        return final

    def _leave_nothing(self, final: Status) -> Status:
        """The final status after the job's last processes; one that cannot be ended is in `remaining`."""
        told, left = end_all(lambda: ProcessSnapshot().of(self._job).all, term_s=0.0, settle_s=0.0, seen=self._seen)
        if final.damaged and self._others:  # it ran, and no supervisor could write how it ended
            final = final._replace(state=STOPPED, code=None, reason="stopped on request; %s" % final.damaged)
        counted = final.ended  # by its supervisor
        ended = len((self._others | told) - set(left)) if counted is None else counted + len(told - set(left))
        return with_remaining(final, left)._replace(ended=ended)
