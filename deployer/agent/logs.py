"""A job's logs as bytes: every file of an attempt by offset, so that a reader can go on after any cut.

Offsets are per file name (prepare.log, launcher.log, rank_N.log) of one attempt. Polling only: inotify is blind on
network file systems. Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
from typing import Collection, Dict, List, NamedTuple, Optional

from .layout import Job

CHUNK_BYTES = 48 * 1024  # of one frame's body
POLL_BYTES = 1 << 20
"""At most so much comes from one poll, taken in turns from all files."""
TAIL_BYTES = 1 << 20
"""How far back a file is searched for its last lines: a progress bar may be one endless line."""

_ATTEMPT = re.compile(r"attempt_(\d+)\Z")
_RANK = re.compile(r"rank_(\d+)\.log\Z")
_ORDER = ("prepare.log", "launcher.log")


class Chunk(NamedTuple):
    file: str
    offset: int  # of the first byte of data
    data: bytes


class LogReader:
    """Reads on in the files of one attempt (the latest one, unless given), also in those that appear later.

    `offsets` say where to begin in each file (0 unless named); `ranks` restricts it to the logs of those ranks.
    """

    def __init__(
        self,
        job: Job,
        attempt: Optional[int] = None,
        offsets: Optional[Dict[str, int]] = None,
        ranks: Optional[Collection[int]] = None,
    ) -> None:
        self.offsets: Dict[str, int] = dict(offsets or {})
        self._job = job
        self._attempt = attempt
        self._ranks = ranks

    def poll(self) -> List[Chunk]:
        """What has come since the last poll, at most POLL_BYTES, in pieces of at most CHUNK_BYTES; offsets move on."""
        if self._attempt is None:
            self._attempt = latest_attempt(self._job)
        if self._attempt is None:
            return []
        folder = self._job.logs(self._attempt)
        chunks: List[Chunk] = []
        files = log_files(folder, self._ranks)
        budget = POLL_BYTES
        while files and budget > 0:
            more = []
            for name in files:
                data = self._read(folder, name)
                if data:
                    chunks.append(Chunk(name, self.offsets[name] - len(data), data))
                    budget -= len(data)
                if len(data) == CHUNK_BYTES:
                    more.append(name)
            files = more
        return chunks

    def _read(self, folder: str, name: str) -> bytes:
        offset = self.offsets.setdefault(name, 0)
        path = os.path.join(folder, name)
        try:
            if os.stat(path).st_size <= offset:
                return b""
            with open(path, "rb", buffering=0) as f:
                f.seek(offset)
                data = f.read(CHUNK_BYTES) or b""
        except OSError:  # not readable now; the next poll tries again
            return b""
        self.offsets[name] = offset + len(data)
        return data


def latest_attempt(job: Job) -> Optional[int]:
    """Number of the last attempt that has a log folder; None before the first."""
    try:
        names = os.listdir(os.path.dirname(job.logs(1)))
    except OSError:
        return None
    numbers = [int(m.group(1)) for m in map(_ATTEMPT.match, names) if m]
    return max(numbers) if numbers else None


def log_files(folder: str, ranks: Optional[Collection[int]] = None) -> List[str]:
    """Log names of an attempt's folder in reading order: preparation, launcher, then ranks by number."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return []
    of_rank = sorted((int(m.group(1)), name) for m, name in ((_RANK.match(n), n) for n in names) if m)
    if ranks is not None:
        return [name for rank, name in of_rank if rank in ranks]
    return [name for name in _ORDER if name in names] + [name for _, name in of_rank]


def tail_offsets(job: Job, lines: int, ranks: Optional[Collection[int]] = None) -> Dict[str, int]:
    """Where to begin in each log of the latest attempt to get its last `lines` lines (0: none of it)."""
    attempt = latest_attempt(job)
    if attempt is None:
        return {}
    folder = job.logs(attempt)
    return {name: _tail_offset(os.path.join(folder, name), lines) for name in log_files(folder, ranks)}


def last_lines(job: Job, rank: Optional[int], lines: int) -> bytes:
    """The last lines of a rank's log in the latest attempt, at most TAIL_BYTES. Without a rank: of the launcher's log,
    or the preparation's when nothing was launched. Empty when there is none."""
    attempt = latest_attempt(job)
    if attempt is None:
        return b""
    names = ["rank_%d.log" % rank] if rank is not None else ["launcher.log", "prepare.log"]
    for path in (os.path.join(job.logs(attempt), name) for name in names):
        if os.path.exists(path) and os.path.getsize(path):
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


def _nth_last_newline(block: bytes, n: int) -> int:
    position = len(block)
    for _ in range(n):
        position = block.rindex(b"\n", 0, position)
    return position
