"""One attempt at the job: its command prepared, started, watched to its end, and judged.

Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Set, Tuple

from ..guard import secure_root
from ..host.errors import AgentError
from ..host.files import remove
from ..host.killing import SETTLE_S, SWEEP_S, Subreaper
from ..host.layout import AGENT_DIR, Job, Root
from ..host.marks import job_processes
from ..host.processes import Process, is_running, process_of, read_stat
from ..job import progress
from ..job.ending import (
    Ending,
    RankRecord,
    decide_ending,
    first_failure,
    read_outcome,
    read_ranks,
    with_oom,
    with_outcome,
)
from ..job.plan import is_trainer, main_role
from ..job.status import FAILED, LOST, RUNNING, STOPPED, TOOL_FAILED, AttemptReport, main_processes, slot_of, utc
from ..job.stop import Asked, StopRequest, new_stop
from ..logs.keep import LogKeeper
from . import stall
from .children import Children
from .command import Command, Resolving, fill, job_command, job_env, marks
from .start import LaunchInput
from .status_file import StatusFile, say
from .stop_stages import Stopping, kill_ranks

if TYPE_CHECKING:
    from ..gpus.claim import JobGpus
    from ..host.cgroups import OomWatch

GROUP = ""
"""The folder of a job's only group of processes."""
SIBLINGS_S = 5.0
"""After a trainer's first failing rank the others get so long before they are killed."""


class Stopped(Exception):
    """The job was asked to stop before it had started."""


Hook = Callable[[], None]
"""What is looked after while an attempt runs: called every POLL_S or sooner, quick, and does no more than is due."""


class Turn:
    """A supervisor's turns of waiting, whatever it does: children are reaped, a TERM to it asks its job to stop, and
    the status stays as it was written."""

    def __init__(self, job: Job, status: StatusFile) -> None:
        self.children = Children()
        self.asked = Asked(job)
        self._job = job
        self._status = status

    def wait(self) -> None:
        if self.children.wait():
            self.ask_to_stop()
        self._status.keep()

    def ask_to_stop(self, reason: str = "") -> None:
        """A stop that the supervisor asks for itself."""
        error = self.asked.ask(reason)
        if error is not None:
            say("cannot write %s: %s" % (self._job.stop, error.strerror))


class Attempt:
    """One start of the job's command. `run` is its whole life; what it leaves running is swept by the caller."""

    def __init__(
        self,
        job: Job,
        given: LaunchInput,
        number: int,
        *,
        restarted: bool,
        status: StatusFile,
        turn: Turn,
        gpus: "Optional[JobGpus]",
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.job = job
        self.number = number
        self.given = given
        self.plan = given.plan
        self.status = status
        self.children = turn.children
        self.subreaper = Subreaper(job, turn.children.reap)
        self.gpus = gpus
        self.nproc = main_role(given.plan).nproc
        self.main: Optional[Process] = None
        self._turn = turn
        self._adopted = False
        self._restarted = restarted
        self._is_trainer = is_trainer(given.plan)
        self._stop: Optional[Stopping] = None
        self._stall_request: Optional[StopRequest] = None
        self._failed_at: Optional[float] = None
        self._logs: Optional[LogKeeper] = None
        self._more_hooks = list(hooks)
        self._metrics_before = progress.metrics_mark(job)
        self._stall = stall.Stall(job, number, self.plan, self._ranks)
        self._oom: "Optional[OomWatch]" = None
        self._ranks_read: Tuple[int, List[RankRecord]] = (0, [])

    def run(self) -> Ending:
        """From the preparation to the verdict."""
        try:
            self._start(self._prepare())
        except Stopped:
            stop = self._turn.asked.read()
            reason = (stop.reason if stop else "") or "stopped on request"
            return Ending(STOPPED, None, reason + ", before it had started")
        except AgentError as e:
            return Ending(FAILED, TOOL_FAILED, e.message + ("; " + e.hint if e.hint else ""))
        except OSError as e:
            what = "attempt %d cannot be prepared: %s: %s" % (self.number, e.filename, e.strerror)
            return Ending(FAILED, TOOL_FAILED, what)
        self._watch()
        return self._ending()

    def adopt(self) -> Ending:
        """The same for an attempt whose supervisor was killed: watched from where it stands."""
        self._adopted = True
        self.main = self._find_main()
        self._watch()
        return self._ending()

    def _find_main(self) -> Optional[Process]:
        """The launcher: as the status has it, if that is one of the job's processes or has ended; else the one that
        leads a session and that none of the others started, the oldest."""
        noted, ours = next(iter(main_processes(self.status.now)), None), self.leftovers()
        if not ours or (noted is not None and (noted in ours or not is_running(noted))):
            return noted
        if noted is None and self.status.now.state != RUNNING:
            return None  # it was being prepared
        pids = {process.pid for process in ours}

        def likeness(process: Process) -> Tuple[bool, bool, int]:
            stat = read_stat(process.pid)
            return stat is None or stat.session != process.pid, stat is None or stat.parent in pids, process.start_time

        return min(ours, key=likeness)

    def report(self, ending: Ending) -> AttemptReport:
        """What the status keeps of this attempt once it has ended."""
        has_stepped = self._is_trainer and progress.metrics_mark(self.job) != self._metrics_before
        return AttemptReport(
            self.number,
            ending.state,
            ending.code,
            ending.reason,
            ending.first_failing_rank,
            ending.signal,
            started_at=self.status.now.started_at,
            ended_at=utc(time.time()),
            resumed_from=self.status.now.resumed_from,
            step=progress.last_step(self.job) if has_stepped else None,
            error=self._error(ending),
        )

    def term_s(self) -> float:
        """How long what it left running may take after its TERM, in seconds."""
        return self._stop.left_s() if self._stop is not None else SWEEP_S

    def settle_s(self) -> float:
        """How long what it left running may take to go by itself, in seconds."""
        stop = self._turn.asked.read()
        return 0.0 if stop is not None and stop.force else SETTLE_S

    def seen(self) -> Set[Process]:
        """The processes that it had when it was stopped."""
        return self._stop.seen if self._stop is not None else set()

    def leftovers(self) -> List[Process]:
        return job_processes(self.job, supervisor=os.getpid())

    # --- start ---

    def _prepare(self) -> Command:
        """The command with its slots filled. Stopped when a stop was asked for meanwhile."""
        root = os.path.dirname(os.path.dirname(self.job.path))
        try:
            secure_root(root)  # since the last attempt a housekeeper of /tmp may have removed it, for others to make it
        except OSError as error:
            raise AgentError("host", "%s cannot be used any more: %s" % (error.filename or root, error.strerror))
        for folder in (self.job.logs(self.number), self.job.ranks(self.number)):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        remove(self.job.outcome)  # of an earlier attempt
        python = self._resolve_python()
        slots = {"python": python, "root": root, "job": self.job.path, "agent": AGENT_DIR}
        if self.gpus is not None:
            slots["gpus"] = self.gpus.visible
        role = main_role(self.plan)
        env = job_env(self.job, role, self.given, slots, attempt=self.number, restarted=self._restarted)
        command = job_command(role, env, slots)
        argv = tuple(fill(text, slots) for text in role.argv)
        self.status.note_group(GROUP, slots=slots, argv=argv, cwd=command.cwd)
        return command

    def _resolve_python(self) -> str:
        if self._turn.asked.read() is not None:
            raise Stopped
        known = slot_of(self.status.now, "python")
        if self._restarted and os.path.exists(known):
            return known  # the one that the former attempt ran with
        env = {**self.given.base_env, **self.given.env, **self.given.secrets}
        root = Root(os.path.dirname(os.path.dirname(self.job.path)))
        log = os.path.join(self.job.logs(self.number), "prepare.log")
        spec = self.plan.python._replace(wheels=self.given.wheels)
        resolving = Resolving(spec, self.job, root, {**env, **marks(self.job, self.number)}, log)
        self.children.expect(resolving.pid)
        while self.children.code(resolving.pid) is None:
            if self._turn.asked.read() is not None:
                raise Stopped  # the sweep ends the child and what it started
            self._turn.wait()
        if self._turn.asked.read() is not None:
            raise Stopped
        return resolving.result()

    def _start(self, command: Command) -> None:
        def in_child() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        with open(os.path.join(self.job.logs(self.number), "launcher.log"), "ab") as output:
            try:
                # only to start it: `wait` and `poll` belong to Children
                started = subprocess.Popen(
                    command.argv,
                    cwd=command.cwd,
                    env=command.env,
                    stdin=self.gpus.stdin if self.gpus is not None else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=in_child,
                )
            except OSError as e:
                raise AgentError("host", "cannot start %s in %s: %s" % (command.argv[0], command.cwd, e.strerror))
        self._popen = started  # kept: its destructor would wait
        self.children.expect(started.pid)
        self.main = process_of(started.pid)
        if self.status.now.began_mono_s is None:
            self.status.note(began_mono_s=time.monotonic())
        self.status.note_group(GROUP, main=self.main)
        self.status.save(
            state=RUNNING,
            started_at=utc(time.time()),
            resumed_from=progress.resumes_from(self.job, self.plan, restarted=self._restarted),
        )

    # --- watch ---

    def _hooks(self) -> List[Hook]:
        own = (self._find_stall, self._drive_stop, self._kill_siblings, self._note_memory)
        return [*self._more_hooks, *own, self._keep_logs]

    def _watch(self) -> None:
        hooks = self._hooks()
        while not self._ended():
            for hook in hooks:
                hook()
            if self._stop is not None and self._stop.phase == "given up":
                return
            self._turn.wait()
        self._keep_logs(now=True)

    def _keep_logs(self, *, now: bool = False) -> None:
        if self._logs is None:
            self._logs = LogKeeper(self.job.logs(self.number), self.plan.policy.log_max_bytes)
        warning = self._logs.look(now=now)
        if warning is not None:
            self.status.save(warnings=(*self.status.now.warnings, warning))

    def _drive_stop(self) -> None:
        request = self._turn.asked.read() or self._stall_request
        if request is None:
            return
        if self._stop is None:
            flagged = self._is_trainer and self._stall_request is None and self._turn.asked.is_flagged()
            started = max(len(self._ranks()), len(set(self.leftovers()) - {self.main}))  # without records, by processes
            self._stop = Stopping(
                self.main,
                self._ranks,
                self.leftovers,
                nproc=self.nproc,
                subreaper=self.subreaper,
                flagged=flagged,
                early=started < self.nproc,
            )
        phase = self._stop.advance(request)
        if phase != self.status.now.phase:
            self.status.save(phase=phase, grace_s=request.grace_s)

    def _kill_siblings(self) -> None:
        if not self._is_trainer:
            return
        if self._failed_at is None and self._stop is None and first_failure(self._ranks()) is not None:
            self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() >= self._failed_at + SIBLINGS_S:
            kill_ranks(self._ranks(), self.leftovers)

    def _find_stall(self) -> None:
        """Begins to end an attempt that has stalled. No flag is set for it: the job is not to stop, it may restart."""
        if self._stop is None and self._stall.find():
            self.status.save(stalled=self._stall.ranks)
            self._stall_request = new_stop(stall.STALL_GRACE_S)

    def _note_memory(self) -> None:
        if self._oom is None:
            self._oom = self._load_the_rest()
        if first_failure(self._ranks()) is None:
            self._oom.sample()

    def _load_the_rest(self) -> "OomWatch":
        """What only an end needs: the job has been started by now, and our own files may be gone by then."""
        from ..host.cgroups import OomWatch
        from . import restarts  # noqa: F401

        if self.gpus is not None:
            from ..gpus import freed  # noqa: F401
        return OomWatch()

    def _ended(self) -> bool:
        ended = self._main_ended()
        if self._adopted and ended:  # torchrun may have gone with the supervisor while its ranks go on
            known = {process for rank in self._ranks() for process in (rank.program, rank.wrapper)}
            return not any(map(is_running, known)) or not known & set(self.leftovers())
        return ended

    def _main_ended(self) -> bool:
        if self.main is None:
            return True
        return not is_running(self.main) if self._adopted else self.children.code(self.main.pid) is not None

    def _ranks(self) -> List[RankRecord]:
        """The records, read again only when their folder has changed (or just has: its time is coarse)."""
        try:
            changed_ns = os.stat(self.job.ranks(self.number)).st_mtime_ns
        except OSError:
            return []
        if self._ranks_read[0] != changed_ns or time.time_ns() - changed_ns < 2_000_000_000:
            self._ranks_read = (changed_ns, read_ranks(self.job, self.number))
        return self._ranks_read[1]

    # --- end ---

    def _ending(self) -> Ending:
        if self._stall.ending is not None:
            return self._stall.ending
        stop = self._turn.asked.read()
        ending = decide_ending(
            self._ranks(),
            nproc=self.nproc,
            launcher_code=self.children.code(self.main.pid) if self.main and not self._adopted else None,
            launcher_log=self._launcher_log(),
            stop_requested_mono=stop.requested_mono if stop else None,
            stop_reason=stop.reason if stop else "",
        )
        if ending is not None and self._oom is not None and self._oom.has_killed():
            ending = with_oom(ending, reason=self._oom.REASON, hint=self._oom.HINT)
        ending = with_outcome(ending, read_outcome(self.job))
        if self.main is None:
            lost = "the launch did not complete: its supervisor was killed"
        else:
            lost = "the job's processes are gone and left no exit record"
        return ending or Ending(LOST, TOOL_FAILED, lost)

    def _error(self, ending: Ending) -> str:
        """The words by which a failure is known again."""
        if self.main is None or ending.state != FAILED:
            return ending.reason
        if self._stall.ending is not None:
            return "\n".join(rank.last_line for rank in self._stall.ranks)
        outcome = read_outcome(self.job)
        if self._is_trainer and outcome is not None and outcome.error:
            return outcome.error_line[: progress.MAX_LINE]
        return progress.last_line(self.job, ending.first_failing_rank, self.number)

    def _launcher_log(self) -> str:
        try:
            with open(os.path.join(self.job.logs(self.number), "launcher.log"), "rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - (1 << 16)))
                return f.read().decode("utf-8", "replace")
        except OSError:
            return ""
