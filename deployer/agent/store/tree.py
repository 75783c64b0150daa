"""A tree of files as data: entries, their canonical form and the root hash that names it. Both sides use this.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
import os
import zlib
from typing import Dict, List, Literal, NamedTuple, Optional, Sequence, Set

from ..host.files import blake2b, is_path_below, open_regular
from ..host.typed import InvalidData, as_row, parse

Mode = Literal["f", "x", "l"]
FILE: Mode = "f"
EXECUTABLE: Mode = "x"
LINK: Mode = "l"
MAX_BYTES = 64 << 20
"""Maximum bytes of a tree's entries as text: some 500,000 files."""


@as_row
class Entry(NamedTuple):
    """One file of a tree. Folders exist through their files; an empty folder is not sent (as in git)."""

    path: str  # relative, '/'-separated, surrogateescape for bytes that are not UTF-8
    mode: Mode
    size: int  # bytes; of a link: of its target text
    hash: str  # of the content; of a link: the target text itself


class Changes(NamedTuple):
    """The changes of a tree that a client sends without a request: relative to `base`, or the whole tree if `base` is
    None."""

    base: Optional[str]
    put: List[Entry]
    gone: List[str]


def content_hash(data: bytes) -> str:
    return blake2b(data, digest_size=20).hexdigest()


def file_hash(path: str) -> str:
    """The content hash of a regular file. Raises OSError if it cannot be read."""
    digest = blake2b(digest_size=20)
    with open_regular(path) as file:
        for data in iter(lambda: file.read(1 << 20), b""):
            digest.update(data)
    return digest.hexdigest()


def root_hash(entries: Sequence[Entry]) -> str:
    """The name of a tree: a hash of its sorted entries."""
    return content_hash(dump_entries(sorted(entries)))


def dump_entries(entries: Sequence[Entry]) -> bytes:
    return json.dumps([list(e) for e in entries], separators=(",", ":")).encode("ascii")


def load_entries(data: bytes) -> List[Entry]:
    """Entries from a file or the other side. Raises InvalidData, also for an entry that points outside the tree."""
    entries = parse(data, List[Entry], most=MAX_BYTES)
    for entry in entries:
        check_entry(entry)
    return entries


def unpacked(data: bytes) -> bytes:
    """Decompresses entries or Changes. Raises InvalidData if the data is not valid or too large."""
    try:
        text = zlib.decompressobj().decompress(data, MAX_BYTES + 1)
    except zlib.error as error:
        raise InvalidData("it cannot be unpacked: %s" % error) from None
    return text


def check_entry(entry: Entry) -> None:
    """Raises InvalidData for a path that is absolute, leaves the tree, or is not a plain name."""
    if not is_path_below(entry.path):
        raise InvalidData("unsafe path in a tree: %.200r" % entry.path)
    if entry.mode not in (FILE, EXECUTABLE, LINK):
        raise InvalidData("unknown mode %.20r of %.200r" % (entry.mode, entry.path))
    if entry.mode == LINK and ("\0" in entry.hash or not entry.hash):
        raise InvalidData("unsafe link target of %.200r" % entry.path)
    if entry.mode != LINK and not all(c in "0123456789abcdef" for c in entry.hash):
        raise InvalidData("not a hash: %.60r" % entry.hash)


def folders_of(entries: Sequence[Entry]) -> List[str]:
    """Every folder that the entries need, parents before children."""
    folders: Set[str] = set()
    for entry in entries:
        path = entry.path
        while "/" in path:
            path = path[: path.rindex("/")]
            if path in folders:
                break
            folders.add(path)
    return sorted(folders)


def blobs_of(entries: Sequence[Entry]) -> Dict[str, int]:
    """Content hash -> size of every blob that a tree needs."""
    return {e.hash: e.size for e in entries if e.mode != LINK}


def changed(base: Sequence[Entry], put: Sequence[Entry], gone: Sequence[str]) -> List[Entry]:
    """`base` with the entries of `put`, which replace entries with the same path, and without the paths `gone`;
    sorted."""
    entries = {entry.path: entry for entry in base}
    entries.update((entry.path, entry) for entry in put)
    for path in gone:
        entries.pop(path, None)
    return sorted(entries.values())


def new_blobs(base: Sequence[Entry], put: Sequence[Entry]) -> Dict[str, int]:
    """Content hash -> size of the blobs that `put` needs in addition to `base`, in the order in which both sides send
    and receive them."""
    there = blobs_of(base)
    return {digest: size for digest, size in blobs_of(put).items() if digest not in there}


def entry_of_link(path: str, target: str) -> Entry:
    return Entry(path, LINK, len(os.fsencode(target)), target)
