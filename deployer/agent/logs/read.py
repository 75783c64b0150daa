"""A job's logs as bytes: every file of its attempts by offset, so that a reader can go on after any cut.

Offsets are per file name (LogName): prepare.log, launcher.log, rank_N.log of the first attempt, attempt_2/rank_N.log
and so on of later ones; ROLE/nodeK/rank_N.log of a job with several groups of processes. Polling only: inotify is blind
on network file systems.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
from contextlib import suppress
from typing import Collection, Dict, List, NamedTuple, Optional, Tuple

from ..host.layout import LAUNCHER_LOG, PREPARE_LOG, Job, LogName, group_files, is_log
from ..host.typed import Damage, read_typed

CHUNK_BYTES = 48 * 1024  # of one frame's body
POLL_BYTES = 1 << 20
"""At most so much comes from one poll, taken in turns from all files."""
TAIL_BYTES = 1 << 20
"""How far back a file is searched for its last lines: a progress bar may be one endless line."""

DROPPED_FILE = "dropped.json"
"""File name -> offset of its first byte that is kept; `log_max_bytes` -> the limit."""
LIMIT_KEY = "log_max_bytes"

_ATTEMPT = re.compile(r"attempt_(\d+)\Z")


class Chunk(NamedTuple):
    file: str
    offset: int  # of the first byte of data
    data: bytes
    dropped: int = 0  # bytes that stood before it and are gone by the log's size limit


class Chosen(NamedTuple):
    """Some of an attempt's processes: what is None chooses nothing, so all of it is taken."""

    role: Optional[str] = None
    node: Optional[int] = None
    ranks: Optional[Collection[int]] = None

    def takes(self, name: LogName) -> bool:
        """Whether it is a log of theirs. What a name does not say there is one of: of roles the only one, of nodes
        node 0. The preparation was for all."""
        if self.ranks is None and name.file == PREPARE_LOG:
            return True
        role, node = name.group
        of_rank = self.ranks is None or name.rank in self.ranks
        return of_rank and self.role in (None, role or self.role) and self.node in (None, node or 0)


ALL = Chosen()


class LogReader:
    """Reads on in the files of an attempt, also in those that appear later, and then in those of the next attempts.

    It begins with `attempt`, else with the last one that `offsets` name, else with the latest. `offsets` say where to
    begin in each file (0 unless named); `chosen` restricts it to the logs of some processes; with `stay` it reads one
    attempt alone.
    """

    def __init__(
        self,
        job: Job,
        attempt: Optional[int] = None,
        offsets: Optional[Dict[str, int]] = None,
        chosen: Chosen = ALL,
        *,
        stay: bool = False,
    ) -> None:
        self.offsets: Dict[str, int] = dict(offsets or {})
        self._job = job
        self._attempt = attempt or max(map(attempt_of, self.offsets), default=None)
        self._chosen = chosen
        self._stay = stay
        self._dropped: Dict[str, Dropped] = {}
        self._ends: Dict[str, int] = {}

    def stop_here(self) -> None:
        """What is written from now on is not read: a job that writes without a pause would have no present end."""
        attempt = latest_attempt(self._job)
        if attempt is not None:
            for name in log_names(self._job, attempt):
                self._ends[name.text] = os.stat(log_path(self._job, name)).st_size

    def limit(self, name: str) -> Optional[int]:
        """The size limit of a file, in bytes, once a part of it was dropped."""
        dropped = self._dropped.get(os.path.dirname(name))
        return dropped.read().get(LIMIT_KEY) if dropped else None

    def poll(self) -> List[Chunk]:
        """What has come since the last poll, at most POLL_BYTES, in pieces of at most CHUNK_BYTES; offsets move on."""
        if self._attempt is None:
            self._attempt = latest_attempt(self._job)
        if self._attempt is None:
            return []
        # asked first: once it is there, this one's logs are whole
        following = None if self._stay else next_attempt(self._job, self._attempt)
        chunks = self._poll(self._attempt)
        while not chunks and following is not None:
            self._attempt, following = following, next_attempt(self._job, following)
            chunks = self._poll(self._attempt)
        return chunks

    def _poll(self, attempt: int) -> List[Chunk]:
        chunks: List[Chunk] = []
        files = log_names(self._job, attempt, self._chosen)
        budget = POLL_BYTES
        while files and budget > 0:
            more = []
            for name in files:
                chunk = self._read(name)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= len(chunk.data)
                    if len(chunk.data) == CHUNK_BYTES:
                        more.append(name)
            files = more
        return chunks

    def _read(self, log: LogName) -> Optional[Chunk]:
        name, path = log.text, log_path(self._job, log)
        begun = offset = self.offsets.setdefault(name, 0)
        dropped = self._dropped.setdefault(os.path.dirname(name), Dropped(os.path.dirname(path)))
        while True:
            try:
                data = _read_at(path, offset)
            except OSError:  # not readable now; the next poll tries again
                return None
            # asked after the reading: what is to be freed is told first, and freed bytes read as zeros
            first = dropped.first_kept(log.file)
            if offset >= first or not data:
                break
            offset = first
        data = data[: max(0, self._ends.get(name, offset + len(data)) - offset)]
        self.offsets[name] = offset + len(data)
        return Chunk(name, offset, data, offset - begun) if data else None


class Dropped:
    """What dropped.json of one attempt's log folder says, read again when it has changed."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, DROPPED_FILE)
        self._version: Tuple[int, int] = (0, 0)
        self._values: Dict[str, int] = {}

    def first_kept(self, file: str) -> int:
        return self.read().get(file, 0)

    def read(self) -> Dict[str, int]:
        """File name -> first kept offset, and LIMIT_KEY; empty when nothing was dropped."""
        try:
            info = os.stat(self._path)
        except OSError:
            return self._values
        version = (info.st_ino, info.st_mtime_ns)  # it is replaced, never written in place
        if version != self._version:
            self._version = version
            with suppress(OSError, Damage):
                self._values = read_typed(self._path, Dict[str, int])
        return self._values


def _read_at(path: str, offset: int) -> bytes:
    if os.stat(path).st_size <= offset:
        return b""
    with open(path, "rb", buffering=0) as f:
        f.seek(offset)
        return f.read(CHUNK_BYTES) or b""


def log_path(job: Job, name: LogName) -> str:
    """Where a log lies."""
    return os.path.join(job.logs(name.attempt, name.group.folder), name.file)


def attempt_of(name: str) -> int:
    """The attempt that a log's name means."""
    found = LogName.parse(name)
    return found.attempt if found is not None else 1


def latest_attempt(job: Job) -> Optional[int]:
    """Number of the last attempt that has a log folder; None before the first."""
    return max(attempts(job), default=None)


def next_attempt(job: Job, attempt: int) -> Optional[int]:
    """Number of the attempt that came after this one; None when this is the last so far."""
    return min((n for n in attempts(job) if n > attempt), default=None)


def attempts(job: Job) -> List[int]:
    """Numbers of the attempts that have a log folder, in no order."""
    try:
        names = os.listdir(os.path.dirname(job.logs(1)))
    except OSError:
        return []
    return [int(m.group(1)) for m in map(_ATTEMPT.match, names) if m]


def log_names(job: Job, attempt: int, chosen: Chosen = ALL) -> List[LogName]:
    """An attempt's logs in reading order: preparation, launchers, then ranks by role, node and number."""
    found = [LogName(attempt, group, file) for group, file in group_files(job.logs(attempt)) if is_log(file)]
    return sorted(filter(chosen.takes, found), key=_reading_order)


def _reading_order(name: LogName) -> Tuple[int, Tuple[str, int], int]:
    rank = name.rank
    kind = 2 if rank is not None else 1 if name.file == LAUNCHER_LOG else 0
    return kind, name.group.order, rank or 0


def tail_offsets(job: Job, lines: int, chosen: Chosen = ALL, attempt: Optional[int] = None) -> Dict[str, int]:
    """Where to begin in each log of an attempt (the latest one) to get its last `lines` lines (0: none of it)."""
    attempt = attempt or latest_attempt(job)
    names = log_names(job, attempt, chosen) if attempt is not None else []
    return {name.text: _tail_offset(log_path(job, name), lines) for name in names}


def last_lines(job: Job, chosen: Chosen, lines: int, *, attempt: Optional[int] = None) -> bytes:
    """The last lines of the first log of the chosen ranks in an attempt (the latest), at most TAIL_BYTES. If no ranks
    are chosen: of the launcher's, or the preparation's when nothing was launched. Empty when there is none."""
    attempt = attempt or latest_attempt(job)
    names = log_names(job, attempt, chosen) if attempt is not None else []
    if chosen.ranks is None:
        names = [name for file in (LAUNCHER_LOG, PREPARE_LOG) for name in names if name.file == file]
    for path in (log_path(job, name) for name in names):
        if os.path.getsize(path):
            with open(path, "rb") as f:
                f.seek(_tail_offset(path, lines))
                return f.read(TAIL_BYTES)
    return b""


def _tail_offset(path: str, lines: int) -> int:
    """Offset of the n-th last line; a last line without newline is a line. Not before the last TAIL_BYTES."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            start = max(0, size - TAIL_BYTES)
            if lines <= 0:
                return size
            position, wanted = size, lines
            while position > start:
                block_start = max(start, position - CHUNK_BYTES)
                f.seek(block_start)
                block = f.read(position - block_start)
                if position == size and block.endswith(b"\n"):
                    wanted += 1  # the newline at the very end begins no line
                newlines = block.count(b"\n")
                if newlines >= wanted:
                    return block_start + _nth_last_newline(block, wanted) + 1
                wanted -= newlines
                position = block_start
            return start
    except OSError:
        return 0


def line_start(path: str, offset: int) -> int:
    """Where the line begins that goes on at `offset`; `offset` itself when that is further back than CHUNK_BYTES."""
    start = max(0, offset - CHUNK_BYTES)
    try:
        with open(path, "rb") as f:
            f.seek(start)
            newline = f.read(offset - start).rfind(b"\n")
    except OSError:
        return offset
    return start + newline + 1 if newline >= 0 or start == 0 else offset


def _nth_last_newline(block: bytes, n: int) -> int:
    position = len(block)
    for _ in range(n):
        position = block.rindex(b"\n", 0, position)
    return position
