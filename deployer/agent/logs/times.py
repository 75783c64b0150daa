"""Records when each byte of a log was written: an index beside the raw logs, which contain no times.

One line per second in which a log grew: Unix time, time since boot, size of every file. The time since boot shows how
far apart two lines are, even if the clock was changed. Stdlib only, Python 3.8, Linux.
"""

import json
import os
import time
from typing import Dict, Iterable, List, NamedTuple, Optional

from ..host.files import read_whole, write_whole
from ..host.layout import ALONE, TIMES_FILE, Job, group_files, is_log
from ..host.typed import InvalidData, as_row, parse
from .read import attempts, line_start, log_names, log_path

EVERY_S = 1.0
MAX_BYTES = 1 << 20
"""If an index is larger, every other line of its older three quarters is removed."""


@as_row
class Entry(NamedTuple):
    unix_s: float
    boot_s: float
    sizes: Dict[str, int]  # of every log at that moment


class TimeIndex:
    def __init__(self, folder: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: Dict[str, int] = {}

    def note(self, sizes: Dict[str, int]) -> None:
        """Adds a line if a size has changed. On a full disk the index only becomes coarser."""
        if sizes == self._sizes:
            return
        line = json.dumps([round(time.time(), 3), round(_since_boot(), 3), sizes], separators=(",", ":"))
        try:
            size = _append(os.path.join(self._folder, TIMES_FILE), line.encode("ascii") + b"\n")
            if size > self._max_bytes:
                self._thin()
        except OSError:
            return
        self._sizes = dict(sizes)

    def _thin(self) -> None:
        path = os.path.join(self._folder, TIMES_FILE)
        with open(path, "rb") as f:
            lines = thinned(f.read().splitlines(True))
        write_whole(path, b"".join(lines))


def thinned(lines: List[bytes]) -> List[bytes]:
    """Every other line of the older three quarters, all of the newest quarter."""
    old = len(lines) * 3 // 4
    return lines[:old:2] + lines[old:]


def sizes_of(folder: str) -> Dict[str, int]:
    """The current size of every log directly in a folder."""
    sizes = {}
    for file in sorted(file for group, file in group_files(folder) if group == ALONE and is_log(file)):
        try:
            sizes[file] = os.stat(os.path.join(folder, file)).st_size
        except OSError:
            continue
    return sizes


def read_index(folder: str) -> List[Entry]:
    """The lines that can be read; empty for a job without an index."""
    try:
        lines = read_whole(os.path.join(folder, TIMES_FILE), 4 * MAX_BYTES).splitlines()
    except OSError:
        return []
    return [entry for entry in map(_parse, lines) if entry is not None]


def offsets_since(entries: Iterable[Entry], unix_s: float) -> Dict[str, int]:
    """The size of each log just before this time, to the second, or earlier; a file that is not in the result had size
    0.

    The clock of the newest line counts as right, and the older lines are placed by the time since boot. So a clock that
    was changed in between has no effect.
    """
    entries = list(entries)
    if not entries:
        return {}
    newest = entries[-1]
    found: Dict[str, int] = {}
    for entry in entries:
        if newest.unix_s - (newest.boot_s - entry.boot_s) >= unix_s:
            break
        found = entry.sizes
    return dict(found)


def attempt_at(job: Job, unix_s: float) -> Optional[int]:
    """The attempt from which to read what was written since then: the first one that still wrote, or the latest."""
    numbers = sorted(attempts(job))
    for number in numbers:
        if any(index[-1].unix_s >= unix_s for index in _indices(job, number).values() if index):
            return number
    return numbers[-1] if numbers else None


def offsets_at(job: Job, attempt: int, unix_s: float) -> Dict[str, int]:
    """`offsets_since` of an attempt, each moved back to the start of its line, by LogName."""
    stood = {folder: offsets_since(index, unix_s) for folder, index in _indices(job, attempt).items()}
    paths = {name: log_path(job, name) for name in log_names(job, attempt)}
    found = {name: stood[os.path.dirname(path)].get(name.file, 0) for name, path in paths.items()}
    return {name.text: line_start(paths[name], offset) for name, offset in found.items() if offset}


def _indices(job: Job, attempt: int) -> Dict[str, List[Entry]]:
    """The index of each folder with logs of an attempt."""
    folders = {os.path.dirname(log_path(job, name)) for name in log_names(job, attempt)}
    return {folder: read_index(folder) for folder in sorted(folders)}


def _parse(line: bytes) -> Optional[Entry]:
    try:
        return parse(line, Entry)
    except InvalidData:  # cut by a full disk or a power cut
        return None


def _append(path: str, data: bytes) -> int:
    """Appends to a file. Returns its new size."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, data)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps
