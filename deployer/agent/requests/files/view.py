"""The requests of a pull and the host's answers about a job's files, pushed ones included.

Stdlib only, Python 3.8: both sides use it.
"""

from typing import NamedTuple, Optional, Tuple

CODE = "code/"
"""Prefix of the path of a project file."""
DIGEST_BYTES = 16
LINKS = 8
"""How many links are named."""


class FilesRequest(NamedTuple):
    job: str
    parts: Tuple[str, ...] = ()
    """Names in the job's folder; a missing one is no error."""
    named: Tuple[str, ...] = ()
    """Paths in the job's folder or its code that the user requests."""
    outputs: bool = False
    """Also the paths that the job's plan names."""
    stays: bool = False
    """Also list the other files that the job has written."""


class FileRow(NamedTuple):
    """A regular file; `path` is relative to the job's folder."""

    path: str
    size: int
    mtime_ns: int
    """0 for a time before 1970."""
    inode: str
    """As decimal digits: some file systems use all 64 bits."""
    stored: int
    """Bytes on the disk."""


class Names(NamedTuple):
    """The first of some names, and how many more there are."""

    names: Tuple[str, ...]
    more: int = 0


class Piece(NamedTuple):
    """A range of a file that a client requests."""

    path: str
    inode: str
    offset: int
    length: int
    version: Optional[Tuple[int, ...]] = None
    """Size and time of the listed file, which must be unchanged; None for a file that may have grown."""
    have: Optional[str] = None
    """The hash of the client's bytes."""


class FetchRequest(NamedTuple):
    job: str
    pieces: Tuple[Piece, ...]


class PieceEnd(NamedTuple):
    """The result of reading one piece."""

    digest: str = ""
    """The hash of the bytes that were read."""
    same: bool = False
    """The client has the same bytes."""
    changed: bool = False
    """The file is not the listed one any more."""
    gone: bool = False
    hole: bool = False
    """The range is all zeros: the dropped part of a log."""
    unreadable: str = ""


class UnpulledFiles(NamedTuple):
    """A summary of the files that a pull does not copy."""

    files: int = 0
    size_bytes: int = 0
    largest: Tuple[str, ...] = ()
    """The first few of them, relative to the job's folder."""
    names: Tuple[str, ...] = ()
    """Names with which a pull copies all of them."""
    at_least: bool = False
    """There are more files than were counted."""


class Pushed(NamedTuple):
    job_id: str
    path: str
    """The job's folder."""
    written: int
    """Number of files written."""
    there: int
    """Number of files that already existed with the same content."""
