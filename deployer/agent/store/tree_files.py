"""Creates a tree's folders, files and links on a disk; writes nothing through an existing link.

Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import os
import stat
import threading
from typing import BinaryIO, Callable, Iterator, List, Sequence

from ..host.errors import AgentError
from ..host.files import blake2b
from .tree import EXECUTABLE, Entry, folders_of

_FICLONE = 0x40049409
_CHUNK = 1 << 20
THREADS = 3


def make_folders(dest: str, entries: Sequence[Entry]) -> None:
    """Creates the folder `dest` and every folder in it that the entries need. Raises AgentError if something else is in
    the way."""
    os.makedirs(dest, mode=0o700, exist_ok=True)
    for folder in folders_of(entries):
        path = os.path.join(dest, folder)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise AgentError("host", "%s is in the way: it is no folder" % path)


def write_file(path: str, data: bytes, mode: str) -> None:
    """Writes a tree's file; does not follow a link in its place. Raises OSError."""
    target = _create(path, mode)
    try:
        _write_all(target, data)
    finally:
        os.close(target)


def _create(path: str, mode: str) -> int:
    permissions = 0o700 if mode == EXECUTABLE else 0o600
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, permissions)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Copier:
    """Copies files, by reflink if the file system supports it."""

    def __init__(self) -> None:
        self._reflink = True

    def copy(self, source: BinaryIO, path: str, entry: Entry) -> bool:
        """Copies the file. Returns whether the copy has the entry's content."""
        digest, size = blake2b(digest_size=20), 0
        target = _create(path, entry.mode)
        try:
            cloned = self._reflink and self._clone(source, target)
            for chunk in iter(lambda: source.read(_CHUNK), b""):
                digest.update(chunk)
                size += len(chunk)
                if not cloned:
                    _write_all(target, chunk)
        finally:
            os.close(target)
        return (digest.hexdigest(), size) == (entry.hash, entry.size)

    def _clone(self, source: BinaryIO, target: int) -> bool:
        try:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        except OSError:
            self._reflink = False
        return self._reflink


def in_threads(work: Callable[[Entry], None], entries: Sequence[Entry]) -> None:
    """Does the work for each entry, and raises the first error. Creating a file takes 0.7 ms of kernel time on some
    disks, so several threads do it."""
    failures: List[BaseException] = []
    coming = iter(entries)
    turn = threading.Lock()

    def work_on() -> None:
        while not failures:
            with turn:
                entry = next(coming, None)
            if entry is None:
                return
            try:
                work(entry)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work_on, daemon=True) for _ in range(min(THREADS, len(entries) // THREADS))]
    for thread in threads:
        thread.start()
    work_on()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def make_link(target: str, path: str) -> None:
    """Creates a link, replacing an existing file or link. Raises OSError."""
    try:
        os.symlink(target, path)
    except FileExistsError:
        os.unlink(path)
        os.symlink(target, path)


def make_read_only(folder: str) -> None:
    """Removes write permission from all entries below the folder, not from the folder. Raises OSError."""
    for path in _walk_up(folder):
        if not os.path.islink(path):
            os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) & ~0o222)


def _walk_up(folder: str) -> Iterator[str]:
    """All paths below the folder, the deepest first; not the folder itself, which must stay writable for its rename."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in folders + files:
            yield os.path.join(path, name)
