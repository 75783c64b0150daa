"""Sends a job's files to a client: their list, and their bytes in pieces with a hash.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import os
import stat
from typing import Dict, Iterator, List, Optional, Set

from ...host.errors import AgentError
from ...host.files import blake2b, is_path_below
from ...host.layout import CHECKPOINT_MARKER, Job, Root
from ...host.typed import to_json
from ...job.record import known_plan
from ...wire.conversation import Call
from ..jobs import find_folder
from .names import is_pattern, matching
from .view import CODE, DIGEST_BYTES, LINKS, FetchRequest, FileRow, FilesRequest, Names, Piece, PieceEnd

CHECKPOINTS = "checkpoints"
READ_BYTES = 256 << 10
ROWS = 1000


def files(root: Root, call: Call) -> Dict[str, str]:
    """Sends events `files` with lists of FileRow: the regular files below the requested parts and paths. Before them
    `outputs` with the plan's paths. After them, if there are any, `links`: links whose files are not sent under another
    name; `absent`: requested paths that do not exist; and `stays`: see unpulled.py.

    Leaves out links and incomplete checkpoints.
    """
    request = call.read(FilesRequest)
    job = find_folder(root, request.job)
    plan = known_plan(job)
    outputs = plan.policy.outputs if plan is not None and request.outputs else ()
    call.send_event("outputs", list(outputs))
    found = _Found(job)
    absent = [name for name in outputs if not found.ask(CODE + name)]
    absent += [name for name in request.named if not any([found.ask(name), found.ask(CODE + name)])]
    for part in request.parts:
        found.ask(part)
    rows: List[FileRow] = []
    for row in found.rows():
        rows.append(row)
        if len(rows) == ROWS:
            call.send_event("files", to_json(rows))
            rows = []
    call.send_event("files", to_json(rows))
    links = found.lost_links()
    if links:
        call.send_event("links", to_json(Names(tuple(links[:LINKS]), len(links[LINKS:]))))
    if absent:
        call.send_event("absent", absent)
    if request.stays:
        from .unpulled import list_unpulled

        call.send_event("stays", to_json(list_unpulled(root, job, plan, found.asked)))
    return {"job_id": job.id}


class _Found:
    """The files of a job below the requested paths, each once."""

    def __init__(self, job: Job) -> None:
        self.asked: List[str] = []
        self._base = job.path
        self._home = os.path.realpath(job.path)
        self._seen: Set[str] = set()
        self._links: List[str] = []

    def ask(self, path: str) -> bool:
        """Adds a path or a pattern. Returns whether any file matches it."""
        _check_below(path)
        if os.path.lexists(os.path.join(self._base, path)):
            found = [path]
        else:
            found = matching(self._base, path) if is_pattern(path) else []
        self.asked += found
        return bool(found)

    def rows(self) -> Iterator[FileRow]:
        for path in self.asked:
            top = os.path.join(self._base, path)
            if os.path.realpath(os.path.dirname(top)) != os.path.join(self._home, os.path.dirname(path)).rstrip("/"):
                self._links.append(path)  # it lies behind a link
                continue
            for row in self._below_top(top, path):
                if row.path not in self._seen:
                    self._seen.add(row.path)
                    yield row

    def lost_links(self) -> List[str]:
        """The links whose files are not sent under another name."""
        return [link for link in dict.fromkeys(self._links) if not self._comes_anyway(link)]

    def _comes_anyway(self, link: str) -> bool:
        target = os.path.relpath(os.path.realpath(os.path.join(self._base, link)), self._home)
        return any(target == path or target.startswith(path + "/") for path in self.asked)

    def _below_top(self, top: str, part: str) -> Iterator[FileRow]:
        row = _row(self._base, top)
        if row is not None:
            yield row
        if os.path.islink(top):
            self._links.append(part)
            return
        for folder, folders, names in os.walk(top):
            folders.sort()
            if part == CHECKPOINTS and folder == top:
                names, folders[:] = [], [name for name in folders if _is_complete(os.path.join(folder, name))]
            inside = [os.path.join(folder, name) for name in folders + names]
            self._links += [_below(self._base, path) for path in inside if os.path.islink(path)]
            for name in sorted(names):
                row = _row(self._base, os.path.join(folder, name))
                if row is not None:
                    yield row


def _check_below(path: str) -> None:
    """Raises AgentError if the path is not below a folder."""
    if not is_path_below(path):
        raise AgentError("usage", "%.200r is not a path below the job's folder" % path)


def _below(base: str, path: str) -> str:
    return os.path.relpath(path, base)


def _is_complete(checkpoint: str) -> bool:
    is_aside = os.path.basename(checkpoint).startswith(".")
    return not is_aside and os.path.isfile(os.path.join(checkpoint, CHECKPOINT_MARKER))


def _row(base: str, path: str) -> Optional[FileRow]:
    try:
        info = os.lstat(path)
    except OSError:  # gone since its folder was read
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    return FileRow(_below(base, path), info.st_size, _time(info), str(info.st_ino), info.st_blocks * 512)


def _time(info: os.stat_result) -> int:
    return max(0, info.st_mtime_ns)


# --- bytes ------------------------------------------------------------------------------------------------------------


def fetch(root: Root, call: Call) -> None:
    """Sends the requested pieces in order: the bytes of each as data, then an event `piece` with its PieceEnd."""
    request = call.read(FetchRequest)
    job = find_folder(root, request.job)
    for piece in request.pieces:
        if call.cancelled.is_set():
            break
        call.send_event("piece", to_json(_send_piece(call, job.path, piece), sparse=True))


def _send_piece(call: Call, base: str, piece: Piece) -> PieceEnd:
    try:
        fd = _open_below(base, piece.path)
    except FileNotFoundError:
        return PieceEnd(gone=True)
    except OSError as error:
        return PieceEnd(unreadable=error.strerror or str(error))
    offset, length = piece.offset, piece.length
    try:
        if not _is_the_listed(os.fstat(fd), piece):
            return PieceEnd(changed=True)
        if _is_hole(fd, offset, length):
            return PieceEnd(hole=True)
        if piece.have is not None and _digest(fd, offset, length) == piece.have:
            return PieceEnd(same=True)
        digest = _send_bytes(call, fd, offset, length)
        return PieceEnd(digest=digest) if _is_the_listed(os.fstat(fd), piece) else PieceEnd(changed=True)
    except OSError as error:  # its disk
        return PieceEnd(unreadable=error.strerror or str(error))
    finally:
        os.close(fd)


def _open_below(base: str, path: str) -> int:
    _check_below(path)
    full = os.path.join(base, path)
    home = os.path.realpath(base)
    if os.path.commonpath([os.path.realpath(full), home]) != home:
        raise AgentError("usage", "%s is not a file of the job" % path)
    return os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not hold us


def _is_the_listed(info: os.stat_result, piece: Piece) -> bool:
    is_it = stat.S_ISREG(info.st_mode) and str(info.st_ino) == piece.inode
    if not is_it or info.st_size < piece.offset + piece.length:
        return False
    return piece.version is None or (info.st_size, _time(info)) == piece.version


def _is_hole(fd: int, offset: int, length: int) -> bool:
    if length == 0:
        return False
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:  # ENXIO: no data up to the end; a file system may know no holes
        return error.errno == errno.ENXIO


def _digest(fd: int, offset: int, length: int) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for data in _blocks(fd, offset, length):
        digest.update(data)
    return digest.hexdigest()


def _send_bytes(call: Call, fd: int, offset: int, length: int) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for data in _blocks(fd, offset, length):
        digest.update(data)
        call.send_data(data)
    return digest.hexdigest()


def _blocks(fd: int, offset: int, length: int) -> Iterator[bytes]:
    end = offset + length
    while offset < end:
        data = os.pread(fd, min(READ_BYTES, end - offset), offset)
        if not data:
            return
        offset += len(data)
        yield data
