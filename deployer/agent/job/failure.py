"""Analyses a failed attempt from its last log lines and the host's state.

Stdlib only, Python 3.8, Linux.
"""

from typing import Dict, List, Optional, Sequence, Tuple

from ..host.layout import LAUNCHER_LOG, PREPARE_LOG, Job, LogName
from ..logs.read import log_names, log_path, tail_of
from ..python.absent import explain_module
from ..python.spec import PythonSpec
from .causes import Cause, FailureContext, find_causes, first_hint, named_files
from .ending import Ending, OomKill, read_outcome
from .host_resources import Gpus, ResourceMonitor, read_gpus
from .missing import explain_here, find_missing

WORDS_LINES, WORDS_BYTES = 200, 64 << 10
"""How much of the end of each log is searched."""
MOST_LOGS = 9


class FailureAnalysis:
    """Analyses one failed attempt on its host. `devices`: the GPUs that it holds; `env`: the environment for
    nvidia-smi; `python`: the job's requirements for its interpreter, and the interpreter."""

    def __init__(
        self, job: Job, number: int, devices: Sequence[str], env: Dict[str, str], python: Tuple[PythonSpec, str]
    ) -> None:
        self._job = job
        self._number = number
        self._devices = devices
        self._env = env
        self._python = python

    def explain(
        self, ending: Ending, watch: ResourceMonitor, *, oom_kill: Optional[OomKill], pids: Sequence[int], started: bool
    ) -> Ending:
        """The verdict on a failure with its causes, the files or modules that it did not find, and the log with most
        information."""
        logs = nonempty_logs(self._job, self._number, ending)
        parts = [tail_of(log_path(self._job, name), WORDS_LINES)[-WORDS_BYTES:] for name in logs[:MOST_LOGS]]
        outcome = read_outcome(self._job)
        words = b"\n".join(parts).decode("utf-8", "replace") + "\n" + (outcome.error if outcome else "")
        words += "\n" + ("" if started else ending.reason)
        now = watch.at_failure(named_files(words), lambda: self._gpus(watch, pids))
        says_so = oom_kill is not None and oom_kill.reason in ending.reason
        failure = FailureContext(
            words,
            now if self._devices else now._replace(gpus=Gpus()),
            watch.start if started else None,
            ending.signal,
            oom_kill is not None and not says_so,
            oom_kill.hint if oom_kill is not None else "",
        )
        missing = find_missing(words, self._job.code)
        causes: List[Cause] = [*find_causes(failure), *explain_here(missing, self._job.code)]
        module = next((one.name for one in missing if one.kind == "module"), None)
        absent = explain_module(module, self._job.code, *self._python) if module else None
        causes += [Cause(absent.line, absent.hint)] if absent else []
        return ending._replace(
            causes=tuple(cause.line for cause in causes),
            hint=ending.hint or first_hint(causes),
            missing=missing,
            log=logs[0].text if logs else "",
        )

    def _gpus(self, watch: ResourceMonitor, pids: Sequence[int]) -> Gpus:
        if not self._devices:
            return Gpus()
        return read_gpus(self._devices, self._env, pids, watch.began_s)


def nonempty_logs(job: Job, number: int, ending: Ending) -> List[LogName]:
    """The logs of an attempt that are not empty, in order of their value: that of the rank that failed first, the
    launcher's, the other ranks', prepare.log. If a group of processes failed first, only its own."""

    def is_ours(name: LogName) -> bool:
        return name.group.folder == ending.first_failing_group or name.file == PREPARE_LOG

    def order(name: LogName) -> int:
        if name.rank is not None:
            is_first = name.rank == ending.first_failing_rank and name.group.folder == ending.first_failing_group
            return 0 if is_first else 2
        return 1 if name.file == LAUNCHER_LOG else 3

    mine = [n for n in log_names(job, number) if not ending.first_failing_group or is_ours(n)]
    nonempty = [name for name in mine if tail_of(log_path(job, name), 1)]
    return sorted(nonempty, key=order)
