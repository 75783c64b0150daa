"""Reading, writing and removing files: a write is complete or has no effect, and removing never raises.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import json
import os
import stat
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Dict, Iterator

if TYPE_CHECKING:
    from hashlib import blake2b as blake2b
else:
    try:  # the very function; hashlib loads OpenSSL beside it, which takes longer than this whole package
        from _blake2 import blake2b as blake2b
    except ImportError:
        from hashlib import blake2b as blake2b


def read_text(path: str, size: int = 1 << 20) -> str:
    """The content of a file of /proc, /sys or /etc; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read(size)
    except OSError:
        return ""


def read_meminfo() -> Dict[str, int]:
    """The values of /proc/meminfo in bytes."""
    rows = [line.split() for line in read_text("/proc/meminfo").splitlines()]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3 and row[1].isdigit()}


def is_name(text: str) -> bool:
    """Whether this can be a file name: its bytes are this text's UTF-8 with `surrogateescape`, and none is 0."""
    if text.isascii():  # nearly all are
        return "\0" not in text
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def is_path_below(text: str) -> bool:
    """Whether this can be a file's path relative to a folder that, as written, stays below the folder."""
    return is_name(text) and not any(part in ("", ".", "..") for part in text.split("/"))


def read_whole(path: str, most: int) -> bytes:
    """The first `most` bytes of a regular file. Raises OSError if there is no such file."""
    with open_regular(path) as f:
        return f.read(most)


def open_to_read(path: str) -> int:
    """A descriptor of a regular file. Raises OSError if there is none."""
    # opening a pipe would block
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", path)
    return fd


@contextmanager
def open_regular(path: str) -> Iterator[BinaryIO]:
    """Opens a regular file for reading. Raises OSError if there is none."""
    fd = open_to_read(path)
    try:
        with open(fd, "rb", closefd=False) as f:
            yield f
    finally:
        os.close(fd)


def write_json(path: str, value: Dict[str, Any]) -> None:
    """Writes JSON completely or not at all, also if the power is cut."""
    write_whole(path, json.dumps(value, indent=1).encode("ascii"), sync=True)
    _sync_folder(os.path.dirname(path))


def write_whole(path: str, data: bytes, *, sync: bool = False, aside: str = "") -> None:
    """Writes a file so that no process reads a part of it. `sync`: the content reaches the disk before the name.
    `aside`: the temporary path, if it is not beside `path`."""
    temporary = aside or "%s.%d-%s.tmp" % (path, os.getpid(), os.urandom(4).hex())  # two requests may judge one job
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as f:
            f.write(data)
            f.flush()
            if sync:
                os.fsync(f.fileno())
        put_in_place(temporary, path)
    except OSError:
        remove(temporary)
        raise


def put_in_place(temporary: str, path: str) -> None:
    """Renames a file to `path`. A folder with this name, which a file cannot replace, is renamed."""
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        os.rename(path, "%s.%d.aside" % (path, time.time_ns()))
        os.replace(temporary, path)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some network file systems sync no folders
        pass
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Removes the file if that is possible; never raises."""
    try:
        os.unlink(path)
    except OSError:
        pass


def remove_folder(folder: str) -> None:
    """Removes as much of a folder as possible, including read-only folders. Of a link, removes only the link."""
    import shutil  # nine modules that a supervisor, which removes single files alone, starts without

    if os.path.islink(folder) or not os.path.isdir(folder):
        remove(folder)
        return
    _let_in(folder)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            _let_in(os.path.join(path, name))
    shutil.rmtree(folder, ignore_errors=True)


def _let_in(folder: str) -> None:
    """Makes the user's own folder readable and writable; does not follow a link."""
    try:
        if not os.path.islink(folder):
            os.chmod(folder, 0o700)
    except OSError:
        pass
