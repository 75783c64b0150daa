"""A job's files for one client: which there are, and their bytes in pieces that carry a hash.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import os
import stat
from typing import Any, Dict, Iterator, List, Optional

from ..host.errors import AgentError
from ..host.files import blake2b
from ..host.layout import CHECKPOINT_MARKER, Root
from ..wire.conversation import Call
from .jobs import find_folder

CHECKPOINTS = "checkpoints"
DIGEST_BYTES = 16
READ_BYTES = 256 << 10
ROWS = 1000
LINKS = 8
"""So many links are named."""


def files(root: Root, call: Call) -> Dict[str, str]:
    """Events `files` with rows [path, size, mtime_ns, inode, stored bytes] of the regular files below the asked parts,
    and an event `links` when there are any: the first names, and how many more.

    Links are left out, and so are checkpoints that are not complete.
    """
    job = find_folder(root, call.head["job"])
    rows = []  # type: List[List[Any]]
    links = []  # type: List[str]
    for part in call.head["parts"]:
        for row in _rows(job.path, part, links):
            rows.append(row)
            if len(rows) == ROWS:
                call.send_event("files", rows)
                rows = []
    call.send_event("files", rows)
    if links:
        call.send_event("links", {"names": links[:LINKS], "more": len(links[LINKS:])})
    return {"job_id": job.id}


def _rows(base: str, part: str, links: List[str]) -> Iterator[List[Any]]:
    top = os.path.join(base, part)
    row = _row(base, top)
    if row is not None:
        yield row
    if os.path.islink(top):
        links.append(part)
        return
    for folder, folders, names in os.walk(top):
        folders.sort()
        if part == CHECKPOINTS and folder == top:
            names, folders[:] = [], [name for name in folders if _is_complete(os.path.join(folder, name))]
        links += [_below(base, folder, name) for name in folders + names if os.path.islink(os.path.join(folder, name))]
        for name in sorted(names):
            row = _row(base, os.path.join(folder, name))
            if row is not None:
                yield row


def _below(base: str, folder: str, name: str) -> str:
    return os.path.relpath(os.path.join(folder, name), base)


def _is_complete(checkpoint: str) -> bool:
    is_aside = os.path.basename(checkpoint).startswith(".")
    return not is_aside and os.path.isfile(os.path.join(checkpoint, CHECKPOINT_MARKER))


def _row(base: str, path: str) -> Optional[List[Any]]:
    try:
        info = os.lstat(path)
    except OSError:  # gone since its folder was read
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    return [os.path.relpath(path, base), info.st_size, info.st_mtime_ns, info.st_ino, info.st_blocks * 512]


# --- bytes ------------------------------------------------------------------------------------------------------------


def fetch(root: Root, call: Call) -> None:
    """The asked pieces in order: the bytes of each as data, then an event `piece` that says what became of it.

    A piece is [path, inode, version, offset, length, have]. `version` is [size, mtime_ns] of a file that must be the
    one that was listed, null of one that may have grown. `have` is the hash of what the client holds already, or null.
    The event is {"digest": …} with the hash of the bytes as they were read, {"same": true} when the client has them,
    {"changed": true} when the file is no longer the one that was listed, {"gone": true} without a file,
    {"unreadable": reason}, and {"hole": true} where the file has none but zeros: a log whose oldest part was dropped.
    """
    job = find_folder(root, call.head["job"])
    for piece in call.head["pieces"]:
        if call.cancelled.is_set():
            break
        call.send_event("piece", _send_piece(call, job.path, piece))


def _send_piece(call: Call, base: str, piece: List[Any]) -> Dict[str, Any]:
    path, inode, version, offset, length, have = piece
    try:
        fd = _open_below(base, path)
    except FileNotFoundError:
        return {"gone": True}
    except OSError as error:
        return {"unreadable": error.strerror or str(error)}
    try:
        end = offset + length
        if not _is_the_listed(os.fstat(fd), inode, version, end):
            return {"changed": True}
        if _is_hole(fd, offset, length):
            return {"hole": True}
        if have is not None and _digest(fd, offset, length) == have:
            return {"same": True}
        digest = _send_bytes(call, fd, offset, length)
        return {"digest": digest} if _is_the_listed(os.fstat(fd), inode, version, end) else {"changed": True}
    finally:
        os.close(fd)


def _open_below(base: str, path: str) -> int:
    full = os.path.join(base, path)
    home = os.path.realpath(base)
    if os.path.commonpath([os.path.realpath(full), home]) != home:
        raise AgentError("usage", "%s is not a file of the job" % path)
    return os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not hold us


def _is_the_listed(info: os.stat_result, inode: int, version: Optional[List[int]], end: int) -> bool:
    if not stat.S_ISREG(info.st_mode) or info.st_ino != inode or info.st_size < end:
        return False
    return version is None or [info.st_size, info.st_mtime_ns] == version


def _is_hole(fd: int, offset: int, length: int) -> bool:
    if length == 0:
        return False
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:  # ENXIO: no data up to the end; a file system may know no holes
        return error.errno == errno.ENXIO


def _digest(fd: int, offset: int, length: int) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for data in _read(fd, offset, length):
        digest.update(data)
    return digest.hexdigest()


def _send_bytes(call: Call, fd: int, offset: int, length: int) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for data in _read(fd, offset, length):
        digest.update(data)
        call.send_data(data)
    return digest.hexdigest()


def _read(fd: int, offset: int, length: int) -> Iterator[bytes]:
    end = offset + length
    while offset < end:
        data = os.pread(fd, min(READ_BYTES, end - offset), offset)
        if not data:
            return
        offset += len(data)
        yield data
