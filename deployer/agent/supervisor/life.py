"""One job's life: begun, attempted once or more often, swept, and its final status written.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set, Tuple

from ..host.killing import end_all
from ..host.layout import Job
from ..host.machine import own_identity
from ..host.processes import Process, describe
from ..job import progress
from ..job.ending import Ending
from ..job.plan import is_trainer, main_role, wanted_gpus
from ..job.record import known_record
from ..job.status import (
    FAILED,
    PREPARING,
    QUEUED,
    RUNNING,
    STOPPED,
    TOOL_FAILED,
    gpus_of,
    read_word,
    utc,
)
from ..job.stop import StopRequest
from . import stall
from .attempt import Attempt, Hook, Turn
from .start import LaunchInput
from .status_file import StatusFile, say

if TYPE_CHECKING:
    from ..gpus.claim import JobGpus

KEPT_ATTEMPTS = 30
"""How many of the last attempts the status tells of: it must fit into the room that is held for it."""


class JobRun:
    """One job's life, from preparing to its final status."""

    def __init__(self, job: Job, given: LaunchInput) -> None:
        self.job = job
        self.given = given
        self.plan = given.plan
        self._max_restarts = main_role(given.plan).max_restarts
        self._restarted = False
        self.status = StatusFile(job, self._first_status())
        self._turn = Turn(job, self.status)
        self.gpus = self._gpus()
        self.attempt: Optional[Attempt] = None
        self._swept = 0
        self._seen: Set[Process] = set()
        self._remaining: List[Process] = []
        self._limited = False

    def run(self) -> None:
        """Returns when the job has ended; at once when the status cannot even be begun (`spawn` then says so)."""
        if not self._begin():
            return
        try:
            ending = self._live()
        except BaseException as e:
            import traceback

            say(traceback.format_exc())
            ending = Ending(FAILED, TOOL_FAILED, "the supervisor failed: %r" % e)
        self._finish(ending)

    def _first_status(self) -> Dict[str, Any]:
        """What stands already: all of it for an adopted job, of a resumed one the attempts that have ended."""
        number = self.given.attempt
        before, damage = read_word(self.job)
        if self.given.adopt:
            kept = {"attempt": number, "first_attempt": number, "max_attempts": number, "warnings": [damage]}
            return before or {"state": RUNNING, **kept}
        most = number + self._max_restarts
        first = {"state": PREPARING, "attempt": number, "first_attempt": number, "max_attempts": most}
        if number == 1:
            return first
        from_step = progress.resumes_from(self.job, self.plan, restarted=False)
        return {**first, "attempts": (before or {}).get("attempts") or [], "resumed_from": from_step}

    def _begin(self) -> bool:
        if self.gpus is not None and self.gpus.waiting:
            self.status.values["state"] = QUEUED
        self.status.save(supervisor=own_identity()._asdict(), nproc=main_role(self.plan).nproc)
        if self.status.unsaved:
            return False
        self.status.reserve()
        return True

    def _live(self) -> Ending:
        """The attempts, up to the last one's ending."""
        if not self.given.adopt and not self._queue():
            return Ending(STOPPED, None, "stopped on request, while it was queued")
        if self.gpus is not None:
            self.status.values["devices"] = self.gpus.devices
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
            ending = self._try()
        return ending

    def _gpus(self) -> "Optional[JobGpus]":
        devices = self.status.values.get("devices") if self.given.adopt else None
        wanted = wanted_gpus(self.plan)
        if wanted is None or not (self.given.held or devices):  # without a plan: the ranks hold them
            return None
        from ..gpus.claim import JobGpus  # a job without GPUs starts sooner

        gpus = JobGpus(wanted, self._env(), self.given.held)
        if devices:
            gpus.hold_again(devices, (self.status.values.get("slots") or {}).get("gpus", ""))
        return gpus

    def _queue(self) -> bool:
        """Waits for the job's GPUs; False when a stop was asked for meanwhile."""
        while self.gpus is not None and self.gpus.waiting:
            self.gpus.look()
            waits = self.gpus.waiting
            if not waits or self.gpus.view != self.status.values.get("queue"):
                kept = {"state": QUEUED, "queue": self.gpus.view}
                self.status.save(**(kept if waits else {"state": PREPARING, "queue": None}))
            if waits:
                self._turn.wait()
            if self._turn.asked.read() is not None:
                return False
        return True

    def _try(self, *, adopted: bool = False) -> Ending:
        """One attempt, up to its ending, which the status then keeps."""
        number = int(self.status.values["attempt"])
        self.attempt = attempt = Attempt(
            self.job,
            self.given,
            number,
            restarted=self._restarted,
            status=self.status,
            turn=self._turn,
            gpus=self.gpus,
            hooks=self._hooks(),
        )
        ending = attempt.adopt() if adopted else attempt.run()
        former = (self.status.values.get("attempts") or [])[-KEPT_ATTEMPTS + 1 :]
        self.status.save(attempts=[*former, attempt.report(ending)])
        return ending

    def _hooks(self) -> List[Hook]:
        return [self._limit_runtime, *([self.gpus.keep] if self.gpus is not None else [])]

    # --- between the attempts ---

    def _why_no_restart(self) -> Optional[str]:
        if self.given.adopt and self.plan.secret_names:
            return "the supervisor that knew its secrets was killed; resume it"
        from . import restarts  # a job that does not fail starts sooner

        first = int(self.status.values.get("first_attempt") or 1)
        history = [restarts.past_of(a) for a in self.status.values["attempts"] if a["attempt"] >= first]
        return restarts.why_no_restart(
            history,
            restarts=int(self.status.values["attempt"]) - first,
            max_restarts=self._max_restarts,
            is_trainer=is_trainer(self.plan),
        )

    def _back_off(self) -> Optional[StopRequest]:
        """Waits before the next attempt; the request when a stop is asked for meanwhile."""
        from . import restarts

        number = int(self.status.values["attempt"])
        wait_s = restarts.backoff_s(number - int(self.status.values.get("first_attempt") or 1))
        self.status.save(
            state=PREPARING,
            attempt=number + 1,
            main=None,
            started_at=None,
            phase=None,
            stalled=None,
            resumed_from=progress.resumes_from(self.job, self.plan, restarted=True),
        )
        if self.given.adopt:
            self._take_over_input()
        self._restarted = True
        until = time.monotonic() + wait_s
        while self._turn.asked.read() is None and time.monotonic() < until:
            for hook in self._hooks():
                hook()
            self._turn.wait()
        return self._turn.asked.read()

    def _take_over_input(self) -> None:
        """What the killed supervisor had been given, as far as it is kept."""
        from ..host import environment

        record = known_record(self.job)
        base_env = environment.job_environment(dict(os.environ), environment.container_env())
        self.given = self.given._replace(env=record.env if record else {}, base_env=base_env)

    def _limit_runtime(self) -> None:
        """Asks for an orderly stop once all attempts together have run for so long."""
        limit_s = self.plan.policy.max_runtime_s
        began_s = self.status.values.get("began_mono_s")
        if limit_s is None or began_s is None or self._limited or time.monotonic() < began_s + limit_s:
            return
        self._limited = True
        self._turn.ask_to_stop("stopped after --max-runtime %s" % stall.duration(limit_s))

    # --- end ---

    def _env(self) -> Dict[str, str]:
        return self.given.base_env or dict(os.environ)

    def _sweep(self) -> None:
        """Ends what the attempt left running."""
        if self.attempt is None:
            return
        told, self._remaining = end_all(
            self.attempt.leftovers,
            term_s=self.attempt.term_s(),
            settle_s=self.attempt.settle_s(),
            subreaper=self.attempt.subreaper,
            seen=self._seen | self.attempt.seen(),
        )
        self._swept += len(told)
        self._seen |= told | self.attempt.seen()

    def _finish(self, ending: Ending) -> None:
        """Sweeps, then writes the last word."""
        self._sweep()
        final = {
            **ending._asdict(),
            "ended_at": utc(time.time()),
            "swept": self._swept,
            "remaining": [describe(p) for p in self._remaining],
            "phase": None,
            "queue": None,
        }
        if ending.state == STOPPED:
            final["ended"] = len(self._seen - set(self._remaining))
            final["gpus_free"], final["gpu_holders"] = self._look_at_gpus()
        if self.gpus is not None:  # before anybody can see the end: the next job may follow at once
            self.gpus.release(ended=not self._remaining)
        self.status.save_last(**final)

    def _look_at_gpus(self) -> Tuple[Optional[bool], List[Dict[str, Any]]]:
        """(whether the job's GPUs are free, what holds them); None when it has none or nobody can tell."""
        if wanted_gpus(self.plan) is None or self.attempt is None:
            return None, []
        from ..gpus.freed import wait_until_free

        pids = {process.pid for process in self._seen}
        names = gpus_of(self.plan, self.status.values)
        return wait_until_free(names, self._env(), pids, allow_busy=self.plan.allow_busy)
