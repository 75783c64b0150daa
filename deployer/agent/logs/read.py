"""A job's logs as bytes: every file of its attempts by offset, so that a reader can continue after a broken connection.

Offsets are per file name (LogName): prepare.log, launcher.log, rank_N.log of the first attempt, attempt_2/rank_N.log
and so on of later ones; ROLE/nodeK/rank_N.log of a job with several groups of processes. It only polls: inotify does
not work on network file systems.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
from typing import Collection, Dict, List, NamedTuple, Optional, Set, Tuple

from ..host.files import open_to_read
from ..host.layout import LAUNCHER_LOG, PREPARE_LOG, Job, LogName, group_files, is_log, rank_of
from .dropped import LIMIT_KEY, Dropped
from .identity import TAIL, Change, LogMark, Stream, ends_with, find_log, inode_of, named_path

CHUNK_BYTES = 48 * 1024  # of one frame's body
POLL_BYTES = 1 << 20
"""Maximum bytes of one poll, taken in turns from all files."""
TAIL_BYTES = 1 << 20
"""How far back a file is searched for its last lines: a progress bar may be one endless line."""

_ATTEMPT = re.compile(r"attempt_(\d+)\Z")


class Chunk(NamedTuple):
    file: str
    offset: int  # of the first byte of data
    data: bytes
    dropped: int = 0  # bytes that stood before it and are gone by the log's size limit
    mark: str = ""  # by which the file is known again from here on


class Chosen(NamedTuple):
    """A selection of an attempt's processes; None selects all."""

    role: Optional[str] = None
    node: Optional[int] = None
    ranks: Optional[Collection[int]] = None

    def takes(self, name: LogName) -> bool:
        """Whether the log belongs to the selected processes. A name without a role means the only role, one without a
        node means node 0. prepare.log belongs to all."""
        if self.ranks is None and name.file == PREPARE_LOG:
            return True
        role, node = name.group
        of_rank = self.ranks is None or name.rank in self.ranks
        return of_rank and self.role in (None, role or self.role) and self.node in (None, node or 0)


ALL = Chosen()


class LogReader:
    """Reads an attempt's files, including those that appear later, and then those of the next attempts.

    It begins with `attempt`, else with the last one in `offsets`, else with the latest. `offsets`: where to begin in
    each file (default 0). `marks`: which file that is. `chosen`: read only the logs of some processes. `stay`: read
    only one attempt. A file is read to its end whatever happens to its name; a file that gets its name is read after
    it. `changes`: the changes of names so far.
    """

    def __init__(
        self,
        job: Job,
        attempt: Optional[int] = None,
        offsets: Optional[Dict[str, int]] = None,
        chosen: Chosen = ALL,
        *,
        marks: Optional[Dict[str, str]] = None,
        stay: bool = False,
    ) -> None:
        self.offsets: Dict[str, int] = dict(offsets or {})
        self.changes: List[Change] = []
        self._marks = dict(marks or {})
        self._job = job
        self._attempt = attempt or max(map(attempt_of, self.offsets), default=None)
        self._chosen = chosen
        self._stay = stay
        self._streams: Dict[LogName, List[Stream]] = {}
        self._gone: Set[LogName] = set()
        self._dropped: Dict[str, Dropped] = {}
        self._ends: Dict[int, int] = {}

    def stop_here(self) -> None:
        """Limits reading to the current sizes of the logs. Otherwise a reader would never reach the end of a job that
        writes without a pause."""
        attempt = latest_attempt(self._job)
        for name in log_names(self._job, attempt) if attempt is not None else []:
            try:
                found = os.stat(log_path(self._job, name))
            except OSError:
                continue
            self._ends[found.st_ino] = found.st_size

    def close(self) -> None:
        for stream in (stream for streams in self._streams.values() for stream in streams):
            os.close(stream.fd)
        self._streams = {}

    def limit(self, name: str) -> Optional[int]:
        """The size limit of a file, in bytes, once a part of it was dropped; else None."""
        dropped = self._dropped.get(os.path.dirname(name))
        return dropped.read().get(LIMIT_KEY) if dropped else None

    def mark(self, file: str, tail: bytes) -> str:
        """A mark that identifies a file, given its last bytes so far."""
        name = LogName.parse(file)
        streams = self._streams.get(name._replace(copy=1), []) if name is not None else []
        inode = next((stream.inode for stream in streams if stream.name == name), 0)
        return LogMark(inode, tail[-TAIL:]).text

    def poll(self) -> List[Chunk]:
        """New content since the last poll, at most POLL_BYTES, in pieces of at most CHUNK_BYTES; advances the
        offsets."""
        if self._attempt is None:
            self._attempt = latest_attempt(self._job)
        if self._attempt is None:
            return []
        # checked first: once a later attempt exists, this one's logs are complete
        following = None if self._stay else next_attempt(self._job, self._attempt)
        chunks = self._poll(self._attempt)
        while not chunks and following is not None:
            self.close()
            self._attempt, following = following, next_attempt(self._job, following)
            chunks = self._poll(self._attempt)
        return chunks

    def _poll(self, attempt: int) -> List[Chunk]:
        chunks: List[Chunk] = []
        files = self._streams_of(attempt)
        budget = POLL_BYTES
        while files and budget > 0:
            more = []
            for stream in files:
                chunk = self._read(stream)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= len(chunk.data)
                    if len(chunk.data) == CHUNK_BYTES:
                        more.append(stream)
            files = more
        return chunks

    def _streams_of(self, attempt: int) -> List[Stream]:
        """The files to read, in reading order."""
        names = {*log_names(self._job, attempt, self._chosen), *self._streams}
        for name in names:
            if not self._streams.get(name):
                self._streams[name] = self._begin(name)
        return [stream for name in sorted(names, key=_reading_order) for stream in self._streams[name]]

    def _begin(self, name: LogName) -> List[Stream]:
        """The files of a log with their start offsets: the beginning, or the client's last position in each file of
        this name."""
        found: List[Stream] = []
        known = {text: LogName.parse(text) for text in self.offsets}
        copies = [copy for copy in known.values() if copy is not None and copy._replace(copy=1) == name]
        for copy in sorted(copies or [name], key=lambda n: -n.copy):
            offset, told = self.offsets.get(copy.text, 0), self._marks.get(copy.text)
            mark = LogMark.parse(told or "")
            place = find_log(self._job, copy, mark.inode)
            if place is None:
                self._tell_gone(copy)
                continue
            try:
                stream = Stream(copy, open_to_read(place.path), offset, mark.tail if told else None)
            except OSError:  # not readable now; the next poll tries again
                continue
            if any(stream.inode == other.inode for other in found):  # it was cut: the later one goes on in it
                os.close(stream.fd)
                continue
            found.append(stream)
            if place.change is not None:
                self._tell_moved(stream, place.change)
        return sorted(found, key=lambda stream: stream.name.copy)

    def _tell_gone(self, name: LogName) -> None:
        if name not in self._gone:
            self._gone.add(name)
            self.changes.append(Change(name.text, "gone"))

    def _tell_moved(self, stream: Stream, change: Change) -> None:
        """Reports that a log is not the file under its name. If it was "replaced", the bytes show whether it is another
        file."""
        if change.what != "replaced":
            stream.moved = True
        elif ends_with(stream.fd, stream.tail, stream.offset) and stream.offset:
            return
        else:
            stream.begin_anew()
        self.changes.append(change._replace(file=stream.name.text))

    def _read(self, stream: Stream) -> Optional[Chunk]:
        dropped = self._dropped_of(stream.name)
        begun, first = stream.offset, self._first_kept(dropped, stream)
        try:
            data = stream.read(CHUNK_BYTES, first)
            # read after the data: a part is recorded before it is freed, and freed bytes read as zeros
            first = self._first_kept(dropped, stream)
            if data is None and stream.offset >= first:
                stream.begin_anew()
                self.changes.append(Change(stream.name.text, "cut"))
                begun, data = 0, stream.read(CHUNK_BYTES, 0)
            offset = stream.offset
            if offset < first and data != b"":
                offset, data = first, os.pread(stream.fd, CHUNK_BYTES, first)
        except OSError:  # not readable now; the next poll tries again
            return None
        if not data:
            self._look_again(stream)
            return None
        name = stream.name.text
        data = data[: max(0, self._ends.get(stream.inode, offset + len(data)) - offset)]
        stream.go_on(offset, data)
        self.offsets[name] = stream.offset
        return Chunk(name, offset, data, offset - begun, stream.mark.text) if data else None

    def _look_again(self, stream: Stream) -> None:
        """Checks a file that was read to its end: whether it still has its name, or another file has it now."""
        base = stream.name._replace(copy=1)
        streams = self._streams.get(base, [])
        path = named_path(self._job, base)
        here = inode_of(path)
        if here in [other.inode for other in streams] or stream is not streams[-1]:
            return
        if not stream.moved:
            place = find_log(self._job, stream.name, stream.inode)
            change = place.change if place is not None else None
            if here and (change is None or change.what == "replaced") and self._is_alike(path, stream):
                return
            stream.moved = True
            self.changes.append(change or Change(stream.name.text, "removed"))
        if here:
            try:
                streams.append(Stream(base._replace(copy=stream.name.copy + 1), open_to_read(path), 0))
            except OSError:
                return

    def _is_alike(self, path: str, stream: Stream) -> bool:
        """Whether a file with another inode is still the same one: some file systems change inodes."""
        try:
            fd = open_to_read(path)
        except OSError:
            return False
        try:
            same = os.fstat(fd).st_size == os.fstat(stream.fd).st_size
            return same and bool(stream.tail) and ends_with(fd, stream.tail, stream.offset)
        finally:
            os.close(fd)

    def _dropped_of(self, name: LogName) -> Dropped:
        folder = os.path.dirname(name.text)
        return self._dropped.setdefault(folder, Dropped(os.path.dirname(named_path(self._job, name))))

    def _first_kept(self, dropped: Dropped, stream: Stream) -> int:
        first = dropped.first_kept(stream.name.file)
        # what the first file of this name has lost does not concern the next one
        return first if stream.name.copy == 1 or first <= os.fstat(stream.fd).st_size else 0


def log_path(job: Job, name: LogName) -> str:
    """A log's path, possibly under another name; if it is gone, its original path."""
    place = find_log(job, name)
    return named_path(job, name) if place is None else place.path


def attempt_of(name: str) -> int:
    found = LogName.parse(name)
    return found.attempt if found is not None else 1


def latest_attempt(job: Job) -> Optional[int]:
    """Number of the last attempt that has a log folder; None before the first."""
    return max(attempts(job), default=None)


def next_attempt(job: Job, attempt: int) -> Optional[int]:
    """Number of the attempt after this one; None if this is the last so far."""
    return min((n for n in attempts(job) if n > attempt), default=None)


def attempts(job: Job) -> List[int]:
    """Numbers of the attempts that have a log folder, unordered."""
    try:
        names = os.listdir(os.path.dirname(job.logs(1)))
    except OSError:
        return []
    return [int(m.group(1)) for m in map(_ATTEMPT.match, names) if m]


def log_names(job: Job, attempt: int, chosen: Chosen = ALL) -> List[LogName]:
    """An attempt's logs in reading order: preparation, launchers, then ranks by role, node and number."""
    found = {LogName(attempt, group, file) for group, file in group_files(job.logs(attempt)) if is_log(file)}
    for group, file in group_files(job.ranks(attempt)):  # its log may have another name by now
        rank = rank_of(file, ".json")
        if rank is not None:
            found.add(LogName(attempt, group, "rank_%d.log" % rank))
    return sorted(filter(chosen.takes, found), key=_reading_order)


def _reading_order(name: LogName) -> Tuple[int, Tuple[str, int], int]:
    rank = name.rank
    kind = 2 if rank is not None else 1 if name.file == LAUNCHER_LOG else 0
    return kind, name.group.order, rank or 0


def tail_offsets(job: Job, lines: int, chosen: Chosen = ALL, attempt: Optional[int] = None) -> Dict[str, int]:
    """The start offset of the last `lines` lines in each log of an attempt (default: the latest); 0 lines: the end."""
    attempt = attempt or latest_attempt(job)
    names = log_names(job, attempt, chosen) if attempt is not None else []
    return {name.text: _tail_offset(log_path(job, name), lines) for name in names}


def last_lines(job: Job, chosen: Chosen, lines: int, *, attempt: Optional[int] = None) -> bytes:
    """The last lines of the first log of the chosen ranks in an attempt (default: the latest), at most TAIL_BYTES. If
    no ranks are chosen: of launcher.log, or of prepare.log if nothing was launched. Empty if there is none."""
    attempt = attempt or latest_attempt(job)
    names = log_names(job, attempt, chosen) if attempt is not None else []
    if chosen.ranks is None:
        names = [name for file in (LAUNCHER_LOG, PREPARE_LOG) for name in names if name.file == file]
    return next(filter(None, (tail_of(log_path(job, name), lines) for name in names)), b"")


def tail_of(path: str, lines: int) -> bytes:
    """The last lines of a log, at most TAIL_BYTES; empty if it cannot be read."""
    try:
        with open(path, "rb") as f:
            f.seek(_tail_offset(path, lines))
            return f.read(TAIL_BYTES)
    except OSError:
        return b""


def _tail_offset(path: str, lines: int) -> int:
    """Offset of the n-th last line, at most TAIL_BYTES back; a last line without a newline counts."""
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
    """The start of the line at `offset`; `offset` itself if the start is more than CHUNK_BYTES back."""
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
