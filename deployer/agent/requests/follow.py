"""Streams a job's log to a client until the job has ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

import signal
import time
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

from ..host.errors import AgentError
from ..host.layout import ALONE, LAUNCHER_LOG, Job, LogName, Root
from ..host.typed import to_json
from ..job.judge import judge
from ..job.status import FINAL
from ..logs import read
from ..logs.identity import Change
from ..wire.conversation import Call

if TYPE_CHECKING:
    from ..gpus.view import QueueView
    from ..logs.grep import LineFilter, Match

POLL_MIN_S, POLL_MAX_S = 0.002, 0.1
SEARCH_S = 3.0
"""CPU seconds for the search in one chunk. After them SIGVTALRM ends the agent, and the client reports it: nothing else
can interrupt a pattern that takes exponential time."""


class _Since(NamedTuple):
    """A time by this host's clock."""

    ago_s: float = 0.0
    unix_s: Optional[float] = None


class _FollowRequest(NamedTuple):
    job: str
    attempt: Optional[int] = None
    from_attempt: Optional[int] = None
    offsets: Dict[str, int] = {}
    marks: Dict[str, str] = {}
    tail: Optional[int] = None
    since: Optional[_Since] = None
    grep: Optional[str] = None
    role: Optional[str] = None
    node: Optional[int] = None
    ranks: Optional[List[int]] = None
    live: bool = True


class _LastLines(NamedTuple):
    job: str
    lines: int = 20
    role: Optional[str] = None
    node: Optional[int] = None
    ranks: Optional[List[int]] = None


def follow(root: Root, call: Call) -> None:
    """Streams the job's logs until it has ended, or up to their current end; first sends the start offsets.

    It begins at `offsets`, else at the last lines (`tail`) or a time (`since`) of an attempt, by default the latest.
    `role`, `node`, `ranks` and `grep` select lines. A requested `attempt` is shown alone. `from_attempt`: where a
    client begins that started this attempt and has seen nothing yet.
    """
    from .jobs import find_folder  # a launch, which follows the job that it has started, does without these

    request = call.read(_FollowRequest)
    job = find_folder(root, request.job, kind="unknown_job")  # which is not tried again
    attempt, chosen = request.attempt, _chosen(request)
    lines = _line_filter(request.grep) if request.grep is not None else None
    latest = read.latest_attempt(job)
    if attempt is not None and not 1 <= attempt <= (latest or 1):
        raise AgentError("usage", "job %s has no attempt %d: the last one is %d" % (job.id, attempt, latest or 1))
    offsets = request.offsets or _beginning(job, request, chosen)
    call.send_event("from", offsets)
    reader = read.LogReader(job, attempt, offsets, chosen, marks=request.marks, stay=attempt is not None)
    once = not request.live or (attempt is not None and attempt < (latest or 1))
    if once:
        reader.stop_here()
    follow_job(job, call, reader, once=once, lines=lines)


def _chosen(request: "Union[_FollowRequest, _LastLines]") -> read.Chosen:
    return read.Chosen(request.role, request.node, None if request.ranks is None else set(request.ranks))


def _line_filter(pattern: str) -> "LineFilter":
    from ..logs.grep import LineFilter

    return LineFilter(pattern)


def _beginning(job: Job, request: "_FollowRequest", chosen: read.Chosen) -> Dict[str, int]:
    """The start offsets. They name the first attempt, so that a resumed reader begins there too."""
    attempt = request.attempt or request.from_attempt or read.latest_attempt(job)
    offsets: Dict[str, int] = {}
    if request.since is not None:
        from ..logs import times

        ago_s, unix_s = request.since
        unix_s = time.time() - ago_s if unix_s is None else unix_s
        if request.attempt is None:
            attempt = times.attempt_at(job, unix_s)
        if attempt is not None:
            offsets = times.offsets_at(job, attempt, unix_s)
    if request.tail is not None:
        for name, offset in read.tail_offsets(job, request.tail, chosen, attempt).items():
            offsets[name] = max(offset, offsets.get(name, 0))
    if attempt is not None:
        offsets.setdefault(LogName(attempt, ALONE, LAUNCHER_LOG).text, 0)
    return offsets


def follow_job(
    job: Job, call: Call, reader: read.LogReader, *, once: bool = False, lines: "Optional[LineFilter]" = None
) -> None:
    wait_s = POLL_MIN_S
    shown: "Optional[Tuple[str, int, Optional[QueueView], Tuple[str, ...]]]" = None
    while not call.cancelled.is_set():
        # the state is read before the logs: an ended job has written everything that the next poll can find
        now = judge(job)
        chunks = reader.poll()
        for change in _taken(reader.changes):
            call.send_event("changed", to_json(change))
        for chunk in chunks:
            if chunk.dropped:
                _say_left_out(call, chunk.file, chunk.dropped, reader.limit(chunk.file))
            if lines is None:
                call.send_data(chunk.data, file=chunk.file, offset=chunk.offset, mark=chunk.mark)
            else:
                _send_matches(call, reader, _in_time(lines.feed, chunk))
        news = now.state, now.attempt, now.queue, now.after
        if news != shown and not once:
            shown = news
            call.send_event("state", to_json(now, sparse=True))
        if not chunks and (once or now.state in FINAL):
            _send_matches(call, reader, _in_time(lines.end) if lines else [])
            reader.close()
            from ..job.views import JobView  # a launch does not wait for what is needed at the job's end

            call.send_event("status", to_json(JobView(job.id, now), sparse=True))
            return
        wait_s = POLL_MIN_S if chunks else min(wait_s * 1.5, POLL_MAX_S)
        call.cancelled.wait(wait_s)


def _in_time(search: "Callable[..., List[Match]]", *chunk: read.Chunk) -> "List[Match]":
    signal.setitimer(signal.ITIMER_VIRTUAL, SEARCH_S)
    try:
        return search(*chunk)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _taken(changes: List[Change]) -> List[Change]:
    found, changes[:] = list(changes), []
    return found


def _send_matches(call: Call, reader: read.LogReader, matches: "List[Match]") -> None:
    for match in matches:
        data = bytes(match.data)
        call.send_data(data, file=match.file, offset=match.offset, mark=reader.mark(match.file, data))
        if match.cut:
            _say_left_out(call, match.file, len(match.data), None)


def _say_left_out(call: Call, file: str, size: int, limit: Optional[int]) -> None:
    call.send_event("left_out", {"file": file, "size": size, "limit": limit})


def last_lines(root: Root, call: Call) -> None:
    """Sends the last lines of the first of the chosen ranks (of the launcher if `ranks` is null)."""
    from .jobs import find_folder

    request = call.read(_LastLines)
    data = read.last_lines(find_folder(root, request.job), _chosen(request), request.lines)
    call.send_data(data[-65536:])
