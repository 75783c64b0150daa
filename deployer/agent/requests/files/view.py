"""What a pull asks of a host, and what the host says of a job's files, of those that a push brought too.

Stdlib only, Python 3.8: both ends use it.
"""

from typing import NamedTuple, Optional, Tuple

CODE = "code/"
"""Before the path of a file of the project."""
DIGEST_BYTES = 16
LINKS = 8
"""So many links are named."""


class FilesRequest(NamedTuple):
    """The files of a job that a client asks for."""

    job: str
    parts: Tuple[str, ...] = ()
    """Names in its folder that may be there."""
    named: Tuple[str, ...] = ()
    """Paths in its folder or its code that somebody asks for."""
    outputs: bool = False
    """Those that its plan names, too."""
    stays: bool = False
    """Say what else the job has written."""


class FileRow(NamedTuple):
    """A regular file; `path` is relative to the job's folder."""

    path: str
    size: int
    mtime_ns: int
    """0 for a time before 1970."""
    inode: str
    """In digits: some file systems use all 64 bits."""
    stored: int
    """Bytes on the disk."""


class Names(NamedTuple):
    """The first of some names, and how many more there are."""

    names: Tuple[str, ...]
    more: int = 0


class Piece(NamedTuple):
    """A range of a file that a client asks for."""

    path: str
    inode: str
    offset: int
    length: int
    version: Optional[Tuple[int, ...]] = None
    """Size and time of a file that must be the one that was listed; None of one that may have grown."""
    have: Optional[str] = None
    """The hash of what the client holds already."""


class FetchRequest(NamedTuple):
    job: str
    pieces: Tuple[Piece, ...]


class PieceEnd(NamedTuple):
    """The result of reading one piece."""

    digest: str = ""
    """Of the bytes as they were read."""
    same: bool = False
    """The client has them."""
    changed: bool = False
    """The file is no longer the one that was listed."""
    gone: bool = False
    hole: bool = False
    """The file has none but zeros there: a log whose oldest part was dropped."""
    unreadable: str = ""


class UnpulledFiles(NamedTuple):
    """Files that stay, in short."""

    files: int = 0
    size_bytes: int = 0
    largest: Tuple[str, ...] = ()
    """The first few of them, relative to the job's folder."""
    names: Tuple[str, ...] = ()
    """What names all of them to a pull."""
    at_least: bool = False
    """There are more files than were looked at."""


class Pushed(NamedTuple):
    """The result of a push."""

    job_id: str
    path: str
    """The job's folder."""
    written: int
    """Files."""
    there: int
    """Files that were there already, with the same content."""
