"""How a job ended: pure functions that make one verdict from the ranks' records and torchrun's last lines.

torchrun exits with 1 whatever a rank returned, so the ranks' own records come first.
Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import signal
from typing import Collection, List, NamedTuple, Optional, Sequence, Tuple

from ..host.layout import ALONE, GroupName, Job, group_files, rank_of
from ..host.processes import Process
from ..host.typed import InvalidData, read_typed
from .plan import of_main_role
from .status import ENDINGS, FAILED, STOPPED, SUCCEEDED, Missing, State, Status
from .stop import StopRequest

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?\n\s*rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+)", re.DOTALL
)

_MAYBE_OOM = " (often the host ran out of memory)"
_LIKELY = {
    int(signal.SIGKILL): _MAYBE_OOM,
    int(signal.SIGBUS): " (often a mapped file became shorter, its disk failed, or /dev/shm is full)",
}


class RankRecord(NamedTuple):
    """rank.py's record of one rank. `code`: None while it runs, and also later if its wrapper was killed."""

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
    """The trainer's outcome.json: how the run ended according to the trainer."""

    state: State
    error: str = ""
    rank: Optional[int] = None

    @property
    def error_line(self) -> str:
        return (self.error.strip().splitlines() or [""])[0]


class GroupEnd(NamedTuple):
    """A group of processes that has ended: facts that are not in its ranks' records."""

    nproc: int
    group: GroupName = ALONE
    launcher_code: Optional[int] = None
    """Exit code of the process that the supervisor started; None if no process saw its end."""
    launcher_log: str = ""
    ended_mono_ns: int = 0
    """When the supervisor noticed the end of this process."""
    nonempty_log: str = ""
    """One of its logs that is not empty: the launcher's, else a rank's."""


class OomKill(NamedTuple):
    """The kernel has killed a process for lack of memory: the reason and a hint, as text."""

    reason: str
    hint: str


class Ending(NamedTuple):
    state: State
    code: Optional[int]
    reason: str
    first_failing_rank: Optional[int] = None
    signal: Optional[int] = None
    hint: str = ""
    first_failing_group: str = ""
    """Its folder; empty for a job's only one."""
    # what the analysis of the failure adds: see failure.py
    causes: Tuple[str, ...] = ()
    missing: Tuple[Missing, ...] = ()
    log: Optional[str] = None


class Evidence(NamedTuple):
    """The facts about an attempt whose processes have ended."""

    ranks: Sequence[RankRecord]
    groups: Sequence[GroupEnd]
    """In the plan's order."""
    stop: Optional[StopRequest] = None
    outcome: Optional[Outcome] = None
    stalled: Optional[Ending] = None
    oom_kill: Optional[OomKill] = None


def group_ends(status: Status) -> Tuple[GroupEnd, ...]:
    """The groups of a job, from its status alone."""
    return tuple(GroupEnd(max(1, group.nproc), group.name) for group in status.groups) or (GroupEnd(1),)


def read_ranks(job: Job, attempt: int) -> List[RankRecord]:
    """The records of started ranks, by role, node and rank; ignores broken ones and those of another job."""
    ranks = []
    for group, file in group_files(job.ranks(attempt)):
        if rank_of(file, ".json") is None:
            continue
        try:
            rank = read_typed(os.path.join(job.ranks(attempt, group.folder), file), RankRecord)
        except (OSError, InvalidData):
            continue
        if rank.job in ("", job.id):
            ranks.append(rank._replace(group=group))
    return sorted(ranks, key=lambda record: (record.group.order, record.rank))


def read_outcome(job: Job) -> Optional[Outcome]:
    """The trainer's outcome; None if there is none, or a broken one."""
    try:
        return read_typed(job.outcome, Outcome)
    except (OSError, InvalidData):
        return None


def exit_code(wait_status: int) -> int:
    """The shell's exit code for a status of waitpid: 128 + N for signal N."""
    return 128 + (wait_status & 0x7F) if wait_status & 0x7F else (wait_status >> 8) & 0xFF


def ranks_of(ranks: Sequence[RankRecord], groups: Collection[GroupName]) -> List[RankRecord]:
    """The records of these groups. A job's only group has all records, whatever their folder."""
    return [rank for rank in ranks if ALONE in groups or rank.group in groups]


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


def decide_ending(known: Evidence) -> Optional[Ending]:
    """The verdict on a job whose processes have ended. None if no rank record, no launcher code and no outcome shows
    how it ended.

    A job ends when its main role has ended on all nodes. Until then, the first failure in any group of processes is the
    job's. Failures of other roles after that do not count, because the supervisor ends those roles.
    """
    if known.stalled is not None:
        return known.stalled
    ranks = _up_to_the_end(known.ranks, known.groups)
    ending = _by_groups(ranks, known.groups)
    if known.stop is not None and not _ended_before(ranks, known.groups, known.stop.requested_mono):
        reason = known.stop.reason or "stopped on request"
        ending = (ending or Ending(STOPPED, None, ""))._replace(state=STOPPED, reason=reason)
    if ending is not None and known.oom_kill is not None:
        ending = with_oom(ending, known.oom_kill)
    return with_outcome(ending, known.outcome)


def with_outcome(ending: Optional[Ending], outcome: Optional[Outcome]) -> Optional[Ending]:
    """Adds what outcome.json records: the ending if nothing else determines it, `stopped` if a run that exited with 0
    stopped early, and the error message of a failure."""
    if outcome is None or outcome.state not in ENDINGS:
        return ending
    if ending is None and outcome.state != FAILED:
        return Ending(outcome.state, 0, "the trainer's outcome.json says so; nobody saw its ranks end")
    if ending is not None and ending.state == SUCCEEDED and outcome.state == STOPPED:
        return ending._replace(state=STOPPED, reason="the trainer stopped before its last step")
    if ending is not None and ending.state == FAILED and outcome.error:
        return ending._replace(reason="%s; rank %s: %s" % (ending.reason, outcome.rank, outcome.error_line))
    return ending


def with_oom(ending: Ending, oom_kill: OomKill) -> Ending:
    """Adds the reason if the kernel killed the rank for lack of memory; any other verdict stays."""
    if ending.state != FAILED or ending.signal != signal.SIGKILL:
        return ending
    return ending._replace(reason=ending.reason.replace(_MAYBE_OOM, "; " + oom_kill.reason), hint=oom_kill.hint)


# --- several groups ---------------------------------------------------------------------------------------------------


def _main(groups: Sequence[GroupEnd]) -> List[GroupEnd]:
    names = of_main_role([end.group for end in groups])
    return [end for end in groups if end.group in names]


def _ended(ranks: Sequence[RankRecord], main: Sequence[GroupEnd]) -> Optional[List[RankRecord]]:
    """The main role's ranks if all have ended; otherwise None."""
    ended = [rank for rank in ranks_of(ranks, [end.group for end in main]) if rank.code is not None]
    return ended if len(ended) >= sum(end.nproc for end in main) else None


def _up_to_the_end(ranks: Sequence[RankRecord], groups: Sequence[GroupEnd]) -> Sequence[RankRecord]:
    """The records up to the main role's end."""
    main = _main(groups)
    ended = _ended(ranks, main)
    if ended is None or len(main) == len(groups):
        return ranks
    last_ns = max((rank.ended_mono_ns for rank in ended), default=0)
    return [rank for rank in ranks if rank in ended or rank.code is None or rank.ended_mono_ns <= last_ns]


def _by_groups(ranks: Sequence[RankRecord], groups: Sequence[GroupEnd]) -> Optional[Ending]:
    """How the job ended by itself: like the group that failed first, else like its main role."""
    found = [(end, _by_group(ranks_of(ranks, [end.group]), end)) for end in groups]
    failed = [
        (_failed_ns(ranks, end), ending) for end, ending in found if ending is not None and ending.state == FAILED
    ]
    if failed:
        return min(failed, key=lambda entry: entry[0])[1]
    endings = [ending for end, ending in found if end in _main(groups)]
    if len(endings) == 1:
        return endings[0]
    return None if None in endings else Ending(SUCCEEDED, 0, _EVERY_RANK)


def _failed_ns(ranks: Sequence[RankRecord], end: GroupEnd) -> int:
    return min((rank.ended_mono_ns for rank in ranks_of(ranks, [end.group]) if rank.code), default=end.ended_mono_ns)


# --- one group --------------------------------------------------------------------------------------------------------

_EVERY_RANK = "every rank exited with code 0"


def _by_group(ranks: Sequence[RankRecord], end: GroupEnd) -> Optional[Ending]:
    return _by_lost_rank(ranks, end) or _by_ranks(ranks, end) or _by_launcher(end)


def _by_ranks(ranks: Sequence[RankRecord], end: GroupEnd) -> Optional[Ending]:
    failure = first_failure(ranks)
    if failure is not None and failure.code:
        return _failed_rank(failure.group, failure.rank, failure.code, failure.signal)
    all_ended_well = len(ranks) >= end.nproc and all(r.code == 0 for r in ranks)
    if all_ended_well and not end.launcher_code:
        return Ending(SUCCEEDED, 0, _EVERY_RANK if end.nproc > 1 else "exited with code 0")
    return None


def _by_lost_rank(ranks: Sequence[RankRecord], end: GroupEnd) -> Optional[Ending]:
    """A rank that was killed together with its wrapper left no record. torchrun's log names it. torchrun then ended the
    other ranks, so their records are not the cause."""
    rank, code = failure_summary(end.launcher_log) or (0, 0)
    if end.launcher_code == 0 or code == 0 or any(r.rank == rank and r.code is not None for r in ranks):
        return None
    return _failed_rank(end.group, rank, code, code - 128 if code > 128 else None)


def _by_launcher(end: GroupEnd) -> Optional[Ending]:
    code = end.launcher_code
    if code is None:
        return None
    if code == 0:
        return Ending(SUCCEEDED, 0, "exited with code 0")
    signum = code - 128 if code > 128 else None
    how = "was killed by %s" % signal_name(signum) if signum else "ended with code %d" % code
    who = " ".join([*end.group.words, "launcher"])
    where = "; see %s" % end.nonempty_log if end.nonempty_log else ", and nothing was written"
    reason = "the %s %s, no rank's failure is known%s" % (who, how, where)
    return Ending(FAILED, code, reason, None, signum, first_failing_group=end.group.folder)


def _failed_rank(group: GroupName, rank: int, code: int, signum: Optional[int]) -> Ending:
    how = (
        "exited with code %d" % code
        if signum is None
        else "was killed by %s%s" % (signal_name(signum), _LIKELY.get(signum, ""))
    )
    reason = "%s %s" % (group.rank(rank), how)
    return Ending(FAILED, code, reason, rank, signum, first_failing_group=group.folder)


def _ended_before(ranks: Sequence[RankRecord], groups: Sequence[GroupEnd], mono_s: float) -> bool:
    """Whether the result was decided at that time: a rank had failed, or all had ended."""
    before = [r for r in ranks if r.code is not None and r.ended_mono_ns < mono_s * 1e9]
    return any(r.code for r in before) or _ended(before, _main(groups)) is not None


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "signal %d" % signum
