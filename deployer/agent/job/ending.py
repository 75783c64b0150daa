"""How a job ended: the ranks' records, and pure functions that make one verdict of them and torchrun's last words.

torchrun exits with 1 whatever a rank returned, so the ranks' own records come first.
Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import signal
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..host.layout import ALONE, GroupName, Job, group_files, rank_of
from ..host.processes import Process
from ..host.typed import Damage, read_typed
from .status import ENDINGS, FAILED, STOPPED, SUCCEEDED, State

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?\n\s*rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+)", re.DOTALL
)

_MAYBE_OOM = " (often the host ran out of memory)"
_LIKELY = {
    int(signal.SIGKILL): _MAYBE_OOM,
    int(signal.SIGBUS): " (often a mapped file became shorter, its disk failed, or /dev/shm is full)",
}


class RankRecord(NamedTuple):
    """What rank.py wrote about one rank. `code` is None while it runs, and for good when its wrapper was killed."""

    rank: int
    pid: int
    start_time: int
    wrapper: Process
    code: Optional[int] = None  # 128 + N for signal N
    signal: Optional[int] = None
    ended_at_ns: int = 0  # wall clock
    ended_mono_ns: int = 0  # the clock of this boot: comparable between ranks of a host, never set back
    job: str = ""  # older ones name none
    group: GroupName = ALONE  # by the folder that the record lies in

    @property
    def program(self) -> Process:
        return Process(self.pid, self.start_time)


class Outcome(NamedTuple):
    """The trainer's outcome.json: what it says itself of how it ended."""

    state: State
    error: str = ""
    rank: Optional[int] = None

    @property
    def error_line(self) -> str:
        return (self.error.strip().splitlines() or [""])[0]


class Ending(NamedTuple):
    state: State
    code: Optional[int]
    reason: str
    first_failing_rank: Optional[int] = None
    signal: Optional[int] = None
    hint: str = ""


def read_ranks(job: Job, attempt: int) -> List[RankRecord]:
    """The ranks that have started, by role, node and rank; a record that is broken or another job's counts as none."""
    ranks = []
    for group, file in group_files(job.ranks(attempt)):
        if rank_of(file, ".json") is None:
            continue
        try:
            rank = read_typed(os.path.join(job.ranks(attempt, group.folder), file), RankRecord)
        except (OSError, Damage):
            continue
        if rank.job in ("", job.id):
            ranks.append(rank._replace(group=group))
    return sorted(ranks, key=lambda record: (record.group.order, record.rank))


def read_outcome(job: Job) -> Optional[Outcome]:
    """None when the trainer has left none, or a broken one."""
    try:
        return read_typed(job.outcome, Outcome)
    except (OSError, Damage):
        return None


def exit_code(wait_status: int) -> int:
    """The shell's code for what waitpid returned: 128 + N for signal N."""
    return 128 + (wait_status & 0x7F) if wait_status & 0x7F else (wait_status >> 8) & 0xFF


def first_failure(ranks: Sequence[RankRecord]) -> Optional[RankRecord]:
    """The rank that ended first with a code other than 0; the others usually follow because of it."""
    failing = [r for r in ranks if r.code]
    return min(failing, key=lambda r: (r.ended_mono_ns, r.rank)) if failing else None


def failure_summary(launcher_log: str) -> Optional[Tuple[int, int]]:
    """(rank, code) of torchrun's "Root Cause" block, the last one in the text; 128 + N for signal N."""
    found = _ROOT_CAUSE.findall(launcher_log)
    if not found:
        return None
    rank, code = int(found[-1][0]), int(found[-1][1])
    return rank, code if code >= 0 else 128 - code


def decide_ending(
    ranks: Sequence[RankRecord],
    *,
    nproc: int,
    launcher_code: Optional[int],
    launcher_log: str = "",
    stop_requested_mono: Optional[float] = None,
    stop_reason: str = "",
) -> Optional[Ending]:
    """The verdict on a job whose processes are gone.

    launcher_code: of the process that the supervisor started, None when nobody saw its end. stop_requested_mono: on
    the monotonic clock in seconds, None without a request; stop_reason: why, unless somebody asked for it. None when
    the ranks' records do not tell and there is no launcher's code.
    """
    natural = (
        _by_lost_rank(ranks, launcher_code, launcher_log)
        or _by_ranks(ranks, nproc, launcher_code)
        or _by_launcher(launcher_code, launcher_log)
    )
    if stop_requested_mono is None or _ended_before(ranks, nproc, stop_requested_mono):
        return natural
    code, rank, signum = (natural.code, natural.first_failing_rank, natural.signal) if natural else (None, None, None)
    return Ending(STOPPED, code, stop_reason or "stopped on request", rank, signum)


def with_outcome(ending: Optional[Ending], outcome: Optional[Outcome]) -> Optional[Ending]:
    """The verdict with what the trainer's outcome.json adds: the end where nothing else tells it, a stop before the
    last step of a run that exited 0, and the words for a failure."""
    if outcome is None or outcome.state not in ENDINGS:
        return ending
    if ending is None and outcome.state != FAILED:
        return Ending(outcome.state, 0, "the trainer's outcome.json says so; nobody saw its ranks end")
    if ending is not None and ending.state == SUCCEEDED and outcome.state == STOPPED:
        return ending._replace(state=STOPPED, reason="the trainer stopped before its last step")
    if ending is not None and ending.state == FAILED and outcome.error:
        return ending._replace(reason="%s; rank %s: %s" % (ending.reason, outcome.rank, outcome.error_line))
    return ending


def with_oom(ending: Ending, *, reason: str, hint: str) -> Ending:
    """The verdict on a rank that the kernel killed for lack of memory; any other one is as it was."""
    if ending.state != FAILED or ending.signal != signal.SIGKILL:
        return ending
    return ending._replace(reason=ending.reason.replace(_MAYBE_OOM, "; " + reason), hint=hint)


def _by_ranks(ranks: Sequence[RankRecord], nproc: int, launcher_code: Optional[int]) -> Optional[Ending]:
    failure = first_failure(ranks)
    if failure is not None and failure.code:
        return _failed_rank(failure.rank, failure.code, failure.signal)
    all_ended_well = len(ranks) >= nproc and all(r.code == 0 for r in ranks)
    if all_ended_well and not launcher_code:
        return Ending(SUCCEEDED, 0, "every rank exited with code 0" if nproc > 1 else "exited with code 0")
    return None


def _by_lost_rank(ranks: Sequence[RankRecord], launcher_code: Optional[int], log: str) -> Optional[Ending]:
    """A rank that was killed together with its wrapper left no record: torchrun names it, and the records of the
    others, which torchrun has ended then, are not the cause."""
    rank, code = failure_summary(log) or (0, 0)
    if launcher_code == 0 or code == 0 or any(r.rank == rank and r.code is not None for r in ranks):
        return None
    return _failed_rank(rank, code, code - 128 if code > 128 else None)


def _by_launcher(code: Optional[int], log: str) -> Optional[Ending]:
    if code is None:
        return None
    if code == 0:
        return Ending(SUCCEEDED, 0, "exited with code 0")
    signum = code - 128 if code > 128 else None
    how = "was killed by %s" % signal_name(signum) if signum else "ended with code %d" % code
    return Ending(FAILED, code, "the launcher %s, no rank's failure is known; see launcher.log" % how, None, signum)


def _failed_rank(rank: int, code: int, signum: Optional[int]) -> Ending:
    if signum is None:
        reason = "rank %d exited with code %d" % (rank, code)
    else:
        reason = "rank %d was killed by %s%s" % (rank, signal_name(signum), _LIKELY.get(signum, ""))
    return Ending(FAILED, code, reason, rank, signum)


def _ended_before(ranks: Sequence[RankRecord], nproc: int, mono_s: float) -> bool:
    """Whether the job's fate was sealed at that time: a rank had failed, or all had ended."""
    ended: List[RankRecord] = [r for r in ranks if r.code is not None and r.ended_mono_ns < mono_s * 1e9]
    return any(r.code for r in ended) or len(ended) >= nproc


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "signal %d" % signum
