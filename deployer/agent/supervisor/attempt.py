"""Runs one attempt: prepares it, starts it, watches it to its end, and finds its verdict.

Stdlib only, Python 3.8, Linux.
"""

import os
import subprocess
import time
from typing import TYPE_CHECKING, Dict, Optional

from ..host.errors import AgentError, SetupFailed
from ..host.layout import ALONE, GroupName, Root
from ..job import progress
from ..job.ending import Ending, Evidence, decide_ending, read_outcome
from ..job.plan import is_trainer, main_role
from ..job.status import FAILED, LOST, RUNNING, STOPPED, TOOL_FAILED, AttemptReport, slot_of, utc
from .mains import find_mains, start_groups
from .prepare import prepare
from .running import Running, leftovers
from .start import LaunchInput
from .status_file import say
from .stop_stages import Stopping
from .turn import Stopped, Turn
from .watch import Watch

if TYPE_CHECKING:
    from ..gpus.claim import JobGpus
    from ..unattended.idle import IdleGpus


class Attempt:
    """One start of the job's command, from `run` or `adopt` to its end. The caller ends the processes that it
    leaves."""

    def __init__(
        self,
        turn: Turn,
        given: LaunchInput,
        number: int,
        *,
        restarted: bool,
        gpus: "Optional[JobGpus]",
    ) -> None:
        self._turn = turn
        self._given = given
        self._number = number
        self._restarted = restarted
        self._gpus = gpus
        self._watch: Optional[Watch] = None
        self._metrics_before = progress.metrics_fingerprint(turn.job)

    def run(self) -> Ending:
        """Runs one attempt, from the preparation to the verdict."""
        ending = self._prepared()
        if ending is not None:
            return self._explained(ending)
        groups = self._turn.status.now.groups
        return self._see_through(Running(self._turn.job, self._number, groups, self._turn.children))

    def _prepared(self) -> Optional[Ending]:
        """Starts the attempt. Returns its ending if it could not be started."""
        try:
            self._start()
        except Stopped:
            stop = self._turn.stop_state.read()
            reason = (stop.reason if stop else "") or "stopped on request"
            return Ending(STOPPED, None, reason + ", before it had started")
        except AgentError as e:
            code = e.code if isinstance(e, SetupFailed) else 0
            return Ending(FAILED, code or TOOL_FAILED, e.message, hint=e.hint)
        except OSError as e:
            what = "attempt %d cannot be prepared: %s: %s" % (self._number, e.filename, e.strerror)
            return Ending(FAILED, TOOL_FAILED, what)
        return None

    def adopt(self) -> Ending:
        """The same for an attempt whose supervisor was killed: watches it from its current state."""
        groups = find_mains(self._turn.status.now, leftovers(self._turn.job))
        return self._see_through(Running(self._turn.job, self._number, groups, None))

    @property
    def stop(self) -> Optional[Stopping]:
        """The stop request that ended the attempt; None if there was none."""
        return self._watch.stop if self._watch is not None else None

    def report(self, ending: Ending) -> AttemptReport:
        """The summary of this attempt for the status."""
        job, now = self._turn.job, self._turn.status.now
        has_stepped = is_trainer(self._given.plan) and progress.metrics_fingerprint(job) != self._metrics_before
        return AttemptReport(
            self._number,
            ending.state,
            ending.code,
            ending.reason,
            ending.first_failing_rank,
            ending.signal,
            started_at=now.started_at,
            ended_at=utc(time.time()),
            resumed_from=now.resumed_from,
            step=progress.last_step(job) if has_stepped else None,
            error=self._error(ending),
            first_failing_group=ending.first_failing_group,
            causes=ending.causes,
        )

    def _start(self) -> None:
        """Prepares all groups before it starts the first one."""
        turn, gpus, restarted = self._turn, self._gpus, self._restarted
        visible = gpus.visible if gpus is not None else ""
        prepared = prepare(turn, self._given, self._number, restarted=restarted, visible=visible)
        start_groups(turn, prepared, self._number, gpus.stdin if gpus is not None else subprocess.DEVNULL)
        if turn.status.now.began_mono_s is None:
            turn.status.note(began_mono_s=time.monotonic())
        resumed_from = progress.resumes_from(turn.job, self._given.plan, restarted=restarted)
        turn.status.save(state=RUNNING, started_at=utc(time.time()), resumed_from=resumed_from)

    def _see_through(self, running: Running) -> Ending:
        self._watch = Watch(self._turn, self._given.plan, self._number, running, self._places, self._idle())
        evidence = self._watch.to_the_end()
        ending = decide_ending(evidence)
        if ending is not None:
            return self._explained(ending, evidence)
        if not running.mains:
            return Ending(LOST, TOOL_FAILED, "the launch did not complete: its supervisor was killed")
        gone = Ending(LOST, TOOL_FAILED, "the job's processes are gone and left no exit record")
        return self._explained(gone, evidence)

    def _idle(self) -> "Optional[IdleGpus]":
        """The watcher of the GPUs' utilization, if --idle-timeout is set."""
        timeout_s = self._given.plan.policy.idle_timeout_s
        if timeout_s is None:
            return None
        from ..unattended.idle import IdleGpus

        status = self._turn.status

        def tell(line: str) -> None:
            say(line)
            if line not in status.now.warnings:
                status.save(warnings=(*status.now.warnings, line))

        env = self._given.base_env or dict(os.environ)
        return IdleGpus(status.now.devices, env, timeout_s, tell=tell)

    def _places(self) -> Dict[str, str]:
        """The file systems that the job uses."""
        from ..job.host_resources import places

        root = Root(os.path.dirname(os.path.dirname(self._turn.job.path)))
        return places(self._turn.job.path, root.cache, self._env())

    def _env(self) -> Dict[str, str]:
        role = main_role(self._given.plan)
        own = {name: text for name, text in role.env.items() if isinstance(text, str)}
        return {**(self._given.base_env or os.environ), **own, **self._given.env}

    def _explained(self, ending: Ending, evidence: Optional[Evidence] = None) -> Ending:
        """Adds this host's facts about the cause to the verdict on a failure. If that fails, the verdict stays as it
        is."""
        if ending.state not in (FAILED, LOST):
            return ending
        try:
            from ..job.failure import FailureAnalysis
            from ..job.host_resources import ResourceMonitor

            now = self._turn.status.now
            python = (self._given.plan.python, slot_of(now, "python"))
            analysis = FailureAnalysis(self._turn.job, self._number, now.devices, self._env(), python)
            watch = self._watch.host_at_start() if self._watch is not None else ResourceMonitor(self._places())
            pids = [rank.pid for rank in evidence.ranks] if evidence is not None else []
            pids += [process.pid for process in leftovers(self._turn.job)]
            oom_kill = evidence.oom_kill if evidence is not None else None
            return analysis.explain(ending, watch, oom_kill=oom_kill, pids=pids, started=self._watch is not None)
        except Exception:
            import traceback

            say(traceback.format_exc())
            return ending

    def _error(self, ending: Ending) -> str:
        """The text by which a repeated failure is recognised."""
        if self._watch is None or ending.state != FAILED:
            return ending.reason
        if self._watch.stall.ending is not None:
            return "\n".join(rank.last_line for rank in self._watch.stall.ranks)
        outcome = read_outcome(self._turn.job)
        if is_trainer(self._given.plan) and outcome is not None and outcome.error:
            return outcome.error_line[: progress.MAX_LINE]
        group = GroupName.parse(ending.first_failing_group) or ALONE
        return progress.last_line(self._turn.job, ending.first_failing_rank, self._number, group)
