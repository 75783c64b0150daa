"""One job from its start to its final status: its attempts, the sweep of its remaining processes, and its status.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Set, Tuple

from ..gpus.view import QueueView
from ..host.errors import AgentError
from ..host.killing import SETTLE_S, SWEEP_S, Subreaper, end_all
from ..host.layout import Job, Root
from ..host.machine import own_identity
from ..host.processes import Process, describe
from ..job import progress
from ..job.ending import Ending
from ..job.plan import groups_of, is_trainer, max_restarts, wanted_gpus
from ..job.record import known_record
from ..job.status import (
    FAILED,
    FINAL,
    LOST,
    PREPARING,
    QUEUED,
    RUNNING,
    STOPPED,
    TOOL_FAILED,
    Status,
    gpus_of,
    read_stored_status,
    utc,
    visible_gpus,
)
from ..job.stop import StopRequest
from . import stall
from .attempt import Attempt
from .running import leftovers
from .start import LaunchInput
from .status_file import StatusFile, say
from .turn import Tell, Turn

if TYPE_CHECKING:
    from ..gpus.claim import JobGpus
    from ..gpus.view import GpuHolder

CLAIM_S, CLAIM_AGAIN_S = 300.0, 10.0
"""How long, and how often, a job that has waited for others tries to claim GPUs whose state cannot be read."""
KEPT_ATTEMPTS = 30
"""How many of the last attempts are in the status: it must fit into the reserved space."""


class JobRun:
    """One job, from preparing to its final status."""

    def __init__(self, job: Job, given: LaunchInput) -> None:
        self.job = job
        self.given = given
        self.plan = given.plan
        self._max_restarts = max_restarts(given.plan)
        self._restarted = False
        self.status = StatusFile(job, self._first_status())
        self._turn = Turn(self.status)
        self.gpus = self._gpus()
        self._turn.hooks = [self._limit_runtime, *([self.gpus.keep] if self.gpus is not None else [])]
        if given.notify or self.plan.policy.notify:
            self._turn.tell = self._teller()
        self.attempt: Optional[Attempt] = None
        self._swept = 0
        self._seen: Set[Process] = set()
        self._remaining: List[Process] = []
        self._limited = False

    def run(self) -> None:
        """Returns when the job has ended, or at once if the first status cannot be written (`spawn` then reports
        it)."""
        if not self._begin():
            return
        try:
            ending = self._live()
        except BaseException as e:
            import traceback

            say(traceback.format_exc())
            ending = Ending(FAILED, TOOL_FAILED, "the supervisor failed: %r" % e)
        self._finish(ending)

    def _first_status(self) -> Status:
        """The status to start with: the whole one of an adopted job; of a resumed job, the attempts that have ended."""
        number = self.given.attempt
        before, damage = read_stored_status(self.job)
        if self.given.adopt:
            kept = Status(RUNNING, attempt=number, first_attempt=number, max_attempts=number, warnings=(damage,))
            if before is not None and before.state in FINAL:  # which its processes have proved wrong
                return before._replace(**Ending(RUNNING, None, "")._asdict(), ended_at=None, swept=None, remaining=())
            return before or kept
        most = number + self._max_restarts
        first = Status(PREPARING, attempt=number, first_attempt=number, max_attempts=most)
        if number == 1:
            return first
        from_step = progress.resumes_from(self.job, self.plan, restarted=False)
        return first._replace(attempts=before.attempts if before else (), resumed_from=from_step)

    def _begin(self) -> bool:
        if self.gpus is not None:
            self.gpus.keep()
        if self.gpus is not None and self.gpus.waiting:
            self.status.note(state=QUEUED)
        if self.given.after:
            self.status.note(state=QUEUED, after=self.given.after)
        for group in groups_of(self.plan):
            self.status.note_group(group.folder, nproc=group.role.nproc)
        if not self.status.now.groups:  # neither a plan nor a status tells
            self.status.note_group("")
        self.status.save(supervisor=own_identity())
        if self.status.unsaved:
            return False
        self.status.reserve()
        return True

    def _live(self) -> Ending:
        """Runs the attempts. Returns the last one's ending."""
        never = self._await_others() if self.given.after else None
        if never is not None:
            return never
        if not self.given.adopt and not self._queue():
            return Ending(STOPPED, None, _STOPPED_QUEUED)
        if self.gpus is not None and self.gpus.devices:
            self.status.note(devices=self.gpus.devices)
        ending = self._try(adopted=self.given.adopt)
        while ending.state == FAILED and self._max_restarts:
            reason = self._why_no_restart()
            if reason is not None:
                return ending._replace(reason="%s; not restarted: %s" % (ending.reason, reason))
            self._sweep()
            if self._remaining:
                return ending._replace(reason="%s; not restarted: processes of it remain" % ending.reason)
            stop = self._back_off()
            if stop is not None:
                reason = stop.reason or "stopped on request"
                return Ending(STOPPED, ending.code, "%s, before the next attempt; %s" % (reason, ending.reason))
            if self._turn.tell is not None:
                self._turn.tell("restart", ending)
            ending = self._try()
        return ending

    def _gpus(self) -> "Optional[JobGpus]":
        devices = self.status.now.devices if self.given.adopt else ()
        wanted = wanted_gpus(self.plan)
        if wanted is None or not (self.given.held or devices):  # without a plan: the ranks hold them
            return None
        from ..gpus.claim import JobGpus  # a job without GPUs starts sooner

        gpus = JobGpus(wanted, self._env(), self.given.held)
        if devices:
            gpus.hold_again(devices, visible_gpus(self.status.now))
        return gpus

    def _await_others(self) -> Optional[Ending]:
        """Waits for the jobs that must succeed first, then claims the GPUs. Returns the ending if the job never
        starts."""
        from ..unattended.after import AwaitedJobs

        names = ", ".join(self.given.after)
        if self.given.adopt and self.plan.secret_names:
            reason = "it waited for %s, and the supervisor that knew its secrets was killed; resume it" % names
            return Ending(LOST, TOOL_FAILED, reason)
        awaited = AwaitedJobs(Root(os.path.dirname(os.path.dirname(self.job.path))), self.given.after)
        while self._turn.stop_state.read() is None:
            seen = awaited.poll()
            if seen is not None and seen.refusal:
                self.status.note(after=(seen.failed_job,))
                return Ending(FAILED, TOOL_FAILED, seen.refusal, log="")
            if seen is not None and not seen.awaited:
                self.given = self.given._replace(adopt=False)
                return self._claim()
            if seen is not None and seen.awaited != self.status.now.after:
                self.status.save(after=seen.awaited)
            self._turn.wait()
        self.status.note(after=())
        return Ending(STOPPED, None, "stopped on request, while it waited for %s" % names)

    def _claim(self) -> Optional[Ending]:
        """Claims the GPUs of a job without a claim, or queues for them. Returns the ending if it gets neither."""
        wanted = wanted_gpus(self.plan)
        if wanted is not None:
            from ..gpus.claim import JobGpus

            gpus, until = JobGpus(wanted, self._env(), None), time.monotonic() + CLAIM_S
            trouble = _trouble(gpus)
            while trouble is not None:
                if time.monotonic() > until:
                    return Ending(FAILED, TOOL_FAILED, trouble)
                self.status.save(after=(), queue=QueueView(trouble=trouble))
                if self._is_stopped_within(CLAIM_AGAIN_S):
                    return Ending(STOPPED, None, _STOPPED_QUEUED)
                trouble = _trouble(gpus)
            self.gpus = gpus
            self._turn.hooks.append(gpus.keep)
        state = QUEUED if self.gpus is not None and self.gpus.waiting else PREPARING
        self.status.save(state=state, after=(), queue=None)
        return None

    def _is_stopped_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._turn.stop_state.read() is None and time.monotonic() < until:
            self._turn.wait()
        return self._turn.stop_state.read() is not None

    def _queue(self) -> bool:
        """Waits for the job's GPUs. Returns False if a stop was requested."""
        while self.gpus is not None and self.gpus.waiting:
            self.gpus.look()
            waits = self.gpus.waiting
            if not waits:
                self.status.save(state=PREPARING, queue=None)
            elif self.gpus.view != self.status.now.queue:
                self.status.save(state=QUEUED, queue=self.gpus.view)
            if waits:
                self._turn.wait()
            if self._turn.stop_state.read() is not None:
                return False
        return True

    def _try(self, *, adopted: bool = False) -> Ending:
        """Runs one attempt to its ending, and stores the ending in the status."""
        self.attempt = attempt = Attempt(
            self._turn,
            self.given,
            self.status.now.attempt,
            restarted=self._restarted,
            gpus=self.gpus,
        )
        ending = attempt.adopt() if adopted else attempt.run()
        report = attempt.report(ending)  # perhaps again: a supervisor that was killed while it swept had told already
        former = [one for one in self.status.now.attempts if one.attempt != report.attempt]
        self.status.save(attempts=(*former[-KEPT_ATTEMPTS + 1 :], report))
        return ending

    # --- between the attempts ---

    def _why_no_restart(self) -> Optional[str]:
        if self.given.adopt and self.plan.secret_names:
            return "the supervisor that knew its secrets was killed; resume it"
        if self.gpus is not None and self.gpus.given_to:
            return "its supervisor was killed, and %s has its GPUs by now; resume it" % self.gpus.given_to
        from . import restarts  # a job that does not fail starts sooner

        now = self.status.now
        return restarts.why_no_restart(
            [restarts.past_of(report) for report in now.attempts if report.attempt >= now.first_attempt],
            restarts=now.attempt - now.first_attempt,
            max_restarts=self._max_restarts,
            is_trainer=is_trainer(self.plan),
        )

    def _back_off(self) -> Optional[StopRequest]:
        """Waits before the next attempt. Returns the request if a stop is requested."""
        from . import restarts

        now = self.status.now
        wait_s = restarts.backoff_s(now.attempt - now.first_attempt)
        for group in now.groups:
            self.status.note_group(group.folder, main=None)
        self.status.save(
            state=PREPARING,
            attempt=now.attempt + 1,
            started_at=None,
            phase=None,
            stalled=(),
            resumed_from=progress.resumes_from(self.job, self.plan, restarted=True),
        )
        if self.given.adopt:
            self._take_over_input()
        self._restarted = True
        until = time.monotonic() + wait_s
        while self._turn.stop_state.read() is None and time.monotonic() < until:
            self._turn.wait()
        return self._turn.stop_state.read()

    def _take_over_input(self) -> None:
        """Restores the input of the killed supervisor, as far as it is stored."""
        from ..host import environment

        record = known_record(self.job)
        base_env = environment.job_environment(dict(os.environ), environment.container_env())
        self.given = self.given._replace(env=record.env if record else {}, base_env=base_env)

    def _limit_runtime(self) -> None:
        """Requests a stop when all attempts together have run for --max-runtime."""
        limit_s = self.plan.policy.max_runtime_s
        began_s = self.status.now.began_mono_s
        if limit_s is None or began_s is None or self._limited or time.monotonic() < began_s + limit_s:
            return
        self._limited = True
        self._turn.ask_to_stop("stopped after --max-runtime %s" % stall.duration(limit_s))

    def _teller(self) -> Optional[Tell]:
        """The sender of --notify events; None if this supervisor does not know the URLs."""
        if not self.given.notify:
            hosts = ", ".join(self.plan.policy.notify)
            say("notify: the URL of %s was known to the supervisor that was killed: nobody is told any more" % hosts)
            return None
        from ..unattended.notify import Notifier

        notifier = Notifier(self.given.notify, self.job, self.plan.name, self._env(), say)
        self._turn.apart = notifier.processes
        return lambda name, ending=None: notifier.send(name, self.status.now, ending)

    # --- end ---

    def _env(self) -> Dict[str, str]:
        return self.given.base_env or dict(os.environ)

    def _sweep(self) -> None:
        """Ends the processes that the attempt left."""
        if self.attempt is None:
            return
        stop, request = self.attempt.stop, self._turn.stop_state.read()
        self._seen |= stop.seen if stop is not None else set()
        signalled, self._remaining = end_all(
            self._find_leftovers,
            term_s=stop.left_s() if stop is not None else SWEEP_S,
            settle_s=0.0 if request is not None and request.force else SETTLE_S,
            subreaper=Subreaper(self.job, self._turn.children.reap, self._turn.apart),
            seen=self._seen,
        )
        self._swept += len(signalled)
        self._seen |= signalled

    def _find_leftovers(self) -> List[Process]:
        if self.gpus is not None:
            self.gpus.keep()  # what is left may compute on them
        return [process for process in leftovers(self.job) if process not in self._turn.apart]

    def _finish(self, ending: Ending) -> None:
        """Ends the remaining processes, then writes the final status."""
        self._sweep()
        self.status.note(
            **ending._asdict(),
            ended_at=utc(time.time()),
            swept=self._swept,
            remaining=tuple(map(describe, self._remaining)),
            phase=None,
            queue=None,
        )
        if ending.state == STOPPED:
            free, holders = self._look_at_gpus()
            self.status.note(ended=len(self._seen - set(self._remaining)), gpus_free=free, gpu_holders=tuple(holders))
        if self.gpus is not None:  # before anybody can see the end: the next job may follow at once
            self.gpus.release(ended=not self._remaining)
        self.status.save_last()
        if self._turn.tell is not None:
            from ..unattended.event import last_event

            self._turn.tell(last_event(ending.state), ending)

    def _look_at_gpus(self) -> "Tuple[Optional[bool], Sequence[GpuHolder]]":
        """(whether the job's GPUs are free, what holds them); None if it has none or it cannot be determined."""
        if wanted_gpus(self.plan) is None or self.attempt is None:
            return None, ()
        from ..gpus.freed import wait_until_free

        pids = {process.pid for process in self._seen}
        names = gpus_of(self.plan, self.status.now)
        return wait_until_free(names, self._env(), pids, allow_busy=self.plan.allow_busy)


_STOPPED_QUEUED = "stopped on request, while it was queued"


def _trouble(gpus: "JobGpus") -> Optional[str]:
    """Claims the GPUs. Returns the error message if that fails."""
    try:
        gpus.claim()
    except AgentError as error:
        return error.message
    return None
