"""One attempt at the job: prepared, started, watched to its end, and judged.

Stdlib only, Python 3.8, Linux.
"""

import subprocess
import time
from typing import TYPE_CHECKING, Optional, Sequence

from ..host.errors import AgentError
from ..host.layout import ALONE, GroupName
from ..job import progress
from ..job.ending import Ending, decide_ending, read_outcome
from ..job.plan import is_trainer
from ..job.status import FAILED, LOST, RUNNING, STOPPED, TOOL_FAILED, AttemptReport, slot_of, utc
from .mains import find_mains, start_groups
from .prepare import prepare
from .running import Running, leftovers
from .start import LaunchInput
from .stop_stages import Stopping
from .turn import Hook, Stopped, Turn
from .watch import Watch

if TYPE_CHECKING:
    from ..gpus.claim import JobGpus


class Attempt:
    """One start of the job's command. `run` is its whole life; what it leaves running is swept by the caller."""

    def __init__(
        self,
        turn: Turn,
        given: LaunchInput,
        number: int,
        *,
        restarted: bool,
        gpus: "Optional[JobGpus]",
        hooks: Sequence[Hook],
    ) -> None:
        """`hooks`: what else is looked after while it runs."""
        self._turn = turn
        self._given = given
        self._number = number
        self._restarted = restarted
        self._gpus = gpus
        self._hooks = hooks
        self._watch: Optional[Watch] = None
        self._metrics_before = progress.metrics_mark(turn.job)

    def run(self) -> Ending:
        """From the preparation to the verdict."""
        try:
            self._start()
        except Stopped:
            stop = self._turn.asked.read()
            reason = (stop.reason if stop else "") or "stopped on request"
            return Ending(STOPPED, None, reason + ", before it had started")
        except AgentError as e:
            return Ending(FAILED, TOOL_FAILED, e.message + ("; " + e.hint if e.hint else ""))
        except OSError as e:
            what = "attempt %d cannot be prepared: %s: %s" % (self._number, e.filename, e.strerror)
            return Ending(FAILED, TOOL_FAILED, what)
        groups = self._turn.status.now.groups
        return self._see_through(Running(self._turn.job, self._number, groups, self._turn.children))

    def adopt(self) -> Ending:
        """The same for an attempt whose supervisor was killed: watched from where it stands."""
        groups = find_mains(self._turn.status.now, leftovers(self._turn.job))
        return self._see_through(Running(self._turn.job, self._number, groups, None))

    @property
    def stop(self) -> Optional[Stopping]:
        """The stop that it needed to end."""
        return self._watch.stop if self._watch is not None else None

    def report(self, ending: Ending) -> AttemptReport:
        """What the status keeps of this attempt once it has ended."""
        job, now = self._turn.job, self._turn.status.now
        has_stepped = is_trainer(self._given.plan) and progress.metrics_mark(job) != self._metrics_before
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
        )

    def _start(self) -> None:
        """What is to be started is decided before anything is."""
        turn, gpus, restarted = self._turn, self._gpus, self._restarted
        visible = gpus.visible if gpus is not None else ""
        prepared = prepare(turn, self._given, self._number, restarted=restarted, visible=visible)
        start_groups(turn, prepared, self._number, gpus.stdin if gpus is not None else subprocess.DEVNULL)
        if turn.status.now.began_mono_s is None:
            turn.status.note(began_mono_s=time.monotonic())
        resumed_from = progress.resumes_from(turn.job, self._given.plan, restarted=restarted)
        turn.status.save(state=RUNNING, started_at=utc(time.time()), resumed_from=resumed_from)

    def _see_through(self, running: Running) -> Ending:
        self._watch = Watch(self._turn, self._given.plan, self._number, running, self._hooks)
        ending = decide_ending(self._watch.to_the_end())
        if ending is not None:
            return self._with_module(ending)
        if not running.mains:
            return Ending(LOST, TOOL_FAILED, "the launch did not complete: its supervisor was killed")
        return Ending(LOST, TOOL_FAILED, "the job's processes are gone and left no exit record")

    def _with_module(self, ending: Ending) -> Ending:
        """A failure whose last words are that a module is missing, with what the project's files say of it."""
        if ending.state != FAILED or ending.hint or self._watch is None:
            return ending
        try:
            from ..python.absent import explain_module

            python, spec = slot_of(self._turn.status.now, "python"), self._given.plan.python
            absent = explain_module(self._error(ending), self._turn.job.code, spec, python)
        except Exception:  # the verdict stands, whatever lies in the project
            return ending
        if absent is None:
            return ending
        return ending._replace(reason="%s: %s" % (ending.reason, absent.line), hint=absent.hint)

    def _error(self, ending: Ending) -> str:
        """The words by which a failure is known again."""
        if self._watch is None or ending.state != FAILED:
            return ending.reason
        if self._watch.stall.ending is not None:
            return "\n".join(rank.last_line for rank in self._watch.stall.ranks)
        outcome = read_outcome(self._turn.job)
        if is_trainer(self._given.plan) and outcome is not None and outcome.error:
            return outcome.error_line[: progress.MAX_LINE]
        group = GroupName.parse(ending.first_failing_group) or ALONE
        return progress.last_line(self._turn.job, ending.first_failing_rank, self._number, group)
