"""The files that a launch sends: a project's files after git's ignore rules, each with its hash, and what was left out
and why."""
# names are bytes here, as for git, and pathlib takes none:
# ruff: noqa: PTH115, PTH117, PTH118, PTH120

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deployer.agent.host.typed import InvalidData, read_typed
from deployer.agent.store.tree import EXECUTABLE, FILE, Entry, entry_of_link
from deployer.errors import UsageError
from deployer.paths import write_whole
from deployer.project.walk import JUNK, Found, Ignored, Keep, Notes, Reason, Walk, unreadable, walk_included

__all__ = ["JUNK", "HashCache", "Ignored", "Reason", "Scan", "Shipment", "hash_file", "scan", "scan_include"]

ALWAYS_HASH_BYTES = 200 * 10**6
"""Trees up to this size are hashed completely each time; in larger trees, files with an unchanged stat keep their
hash."""


@dataclass(frozen=True)
class Scan:
    """A tree that can be named (`tree.root_hash(entries)`) and sent."""

    entries: tuple[Entry, ...]  # sorted by path; paths carry the prefix
    sources: dict[str, str]  # content hash -> absolute path of a file with that content
    total_bytes: int
    ignored: Ignored
    largest: tuple[tuple[str, int], ...]  # the five largest files: (path without the prefix, bytes)
    warnings: tuple[str, ...]

    def why_ignored(self, path: str) -> Reason | None:
        """The rule that left out a path (relative to the project) or a folder above it; None if there is none."""
        parts = path.split("/")
        prefixes = ("/".join(parts[: n + 1]) for n in range(len(parts)))
        return next((self.ignored.paths[p] for p in prefixes if p in self.ignored.paths), None)


@dataclass(frozen=True)
class Shipment:
    """The trees that a plan names, and the path on this machine of each file's content."""

    trees: Mapping[str, tuple[Entry, ...]]
    sources: Mapping[str, str]


def scan(
    project: Path,
    *,
    prefix: str = "code/",
    extra_ignore: str = ".deployignore",
    hash_cache: Path | None,
    included: Collection[str] = (),
) -> Scan:
    """The project's tree, without the paths that are sent as separate trees (`included`). `hash_cache`: a folder of
    this machine for trees beyond ALWAYS_HASH_BYTES (None: no cache).

    Raises UsageError if the project is not a folder, or a file or folder cannot be read. Files that disappear during
    the scan are left out. If a file changes while it is read, its hash is that of the bytes that were read; the store
    checks the sent bytes against it.
    """
    project = project.resolve()
    if not project.is_dir():
        raise UsageError(f"the project folder {project} does not exist or is no folder")
    notes = Notes()
    walk = Walk(os.fsencode(project), extra_ignore, notes)
    apart = [os.fsencode(path) for path in included]
    return _finish(list(walk.files()), notes, prefix=prefix, root=project, hash_cache=hash_cache, apart=apart)


def scan_include(path: Path, *, hash_cache: Path | None, keep: Keep | None = None) -> Scan:
    """The tree of a file or folder given by `--include`: no ignore rules (`.git` stays behind), hashes by stat.

    A file becomes a tree of one entry with its name. A link that leads out of the folder (as in Hugging Face's cache)
    is followed; one inside stays a link. `keep`: which entries of a folder to include.
    """
    root = Path(os.path.realpath(path))
    if not root.exists():
        raise UsageError(f"{path} does not exist", hint="--include takes a file or folder of this machine")
    notes = Notes()
    if root.is_dir():
        top = os.fsencode(root)
        found = list(walk_included(top, b"", top, notes, frozenset({top}), keep))
    elif not root.is_file():
        raise UsageError(f"{path} is neither a file nor a folder")
    else:
        found = [Found(os.fsencode(path.name), os.fsencode(root), root.stat())]
    return _finish(found, notes, prefix="", root=root, hash_cache=hash_cache, always_hash_bytes=0)


def _finish(
    found: Sequence[Found],
    notes: Notes,
    *,
    prefix: str,
    root: Path,
    hash_cache: Path | None,
    always_hash_bytes: int = ALWAYS_HASH_BYTES,
    apart: Sequence[bytes] = (),
) -> Scan:
    here = {file.path for file in found}
    found = [file for file in found if not _is_below(file.path, apart)]
    total = sum(f.stat.st_size for f in found)
    cache = HashCache(hash_cache, root) if hash_cache and total > always_hash_bytes else None
    entries, sources, sizes = [], {}, []
    for file in sorted(found):
        path = os.fsdecode(file.path)
        entry = _entry_of(file, prefix + path, cache, notes)
        if entry is not None:
            entries.append(entry)
        if entry is not None and not stat.S_ISLNK(file.stat.st_mode):
            sources[entry.hash] = os.fsdecode(file.absolute)
            sizes.append((path, entry.size))
    if cache:
        cache.save()
    largest = tuple(sorted(sizes, key=lambda item: -item[1])[:5])
    total_bytes = sum(size for _, size in sizes)
    warnings = (*notes.warnings, *_incomplete(found, notes, here={*here, *apart}, apart=apart, root=os.fsencode(root)))
    return Scan(tuple(sorted(entries)), sources, total_bytes, notes.ignored(), largest, warnings)


def _entry_of(file: Found, path: str, cache: HashCache | None, notes: Notes) -> Entry | None:
    try:
        if stat.S_ISLNK(file.stat.st_mode):
            target = os.fsdecode(os.readlink(file.absolute))
            if _leads_out(os.fsdecode(file.path), target):
                notes.warnings.append(
                    f"{os.fsdecode(file.path)} is a link out of the project, to {target}; only the link goes"
                )
            return entry_of_link(path, target)
        known = cache.get(file.absolute, file.stat) if cache else None
        digest, size, start = (*known, b"") if known else _read_file(file.absolute)
        pointer = next((kind for kind, begins in POINTERS.items() if start.startswith(begins)), None)
        if pointer and size <= MOST_POINTER_BYTES:
            notes.pointers.setdefault(pointer, []).append(file.path)
        elif cache:  # a pointer is looked at each time
            cache.put(file.absolute, file.stat, digest, size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(file.absolute, error) from error
    return Entry(path, EXECUTABLE if file.stat.st_mode & stat.S_IXUSR else FILE, size, digest)


def _leads_out(path: str, target: str) -> bool:
    joined = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return os.path.isabs(target) or joined == ".." or joined.startswith("../")


# --- incomplete files -------------------------------------------------------------------------------------------------

POINTERS = {"git lfs pull": b"version https://git-lfs.github.com/spec/v1\n", "git annex get": b"/annex/objects/"}
"""How a small file begins that stands for another one, by the command that fetches the other one."""
MOST_POINTER_BYTES = 1024


def _incomplete(
    found: Sequence[Found], notes: Notes, *, here: set[bytes], apart: Sequence[bytes], root: bytes
) -> Iterator[str]:
    """A warning for each kind of file that is probably incomplete on this machine for the job. `here`: all paths that
    are sent, in this tree or another one."""
    for command, pointers in notes.pointers.items():
        yield f"{_named(pointers)} only points to the content, which is not here: {command}"
    if notes.empty_submodules:
        yield f"{_named(notes.empty_submodules)} is an empty submodule: git submodule update --init"
    if absent := [path for path in notes.sparse if path not in here and not os.path.lexists(os.path.join(root, path))]:
        yield f"{_named(absent)} is not here: a sparse checkout (git sparse-checkout disable brings all)"
    if links := [file for file in found if stat.S_ISLNK(file.stat.st_mode)]:
        there = here | {folder for path in here for folder in _folders_above(path)}
        if astray := [link.path for link in links if not _arrives(link, there, apart, root)]:
            yield f"{_named(astray)} is a link to what does not travel"


def _named(paths: Sequence[bytes]) -> str:
    shown = ", ".join(os.fsdecode(path) for path in sorted(paths)[:3])
    return f"{shown} and {len(paths) - 3} more: each" if len(paths) > 3 else f"{shown}: each" if paths[1:] else shown


def _folders_above(path: bytes) -> Iterator[bytes]:
    while path := os.path.dirname(path):
        yield path


def _arrives(link: Found, there: set[bytes], apart: Sequence[bytes], root: bytes) -> bool:
    """Whether a link's target is sent too. True for a link out of the project, which is reported elsewhere."""
    target = os.readlink(link.absolute)
    if _leads_out(os.fsdecode(link.path), os.fsdecode(target)):
        return True
    beside = os.path.normpath(os.path.join(os.path.dirname(link.path), target))
    real = os.path.relpath(os.path.realpath(link.absolute), root)
    return any(path == b"." or path in there or _is_below(path, apart) for path in (beside, real))


def _is_below(path: bytes, folders: Collection[bytes]) -> bool:
    return path in folders or any(folder in folders for folder in _folders_above(path))


# --- hashes -----------------------------------------------------------------------------------------------------------

_VERSION = 1
MAX_BYTES = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]+")
_STILL_NS = 2 * 10**9
"""A file must be unchanged for this long before its hash is stored: a coarse clock may hide a later change."""


def hash_file(path: bytes) -> tuple[str, int]:
    """(content hash as in `store/tree`, number of bytes), from one reading. Raises OSError if the file cannot be
    read."""
    return _read_file(path)[:2]


def _read_file(path: bytes) -> tuple[str, int, bytes]:
    """`hash_file`, and the file's first bytes."""
    digest, size, start = hashlib.blake2b(digest_size=20), 0, b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while chunk := os.read(descriptor, 1 << 20):
            digest.update(chunk)
            size += len(chunk)
            start = start or chunk[:MOST_POINTER_BYTES]
    finally:
        os.close(descriptor)
    return digest.hexdigest(), size, start


class HashCache:
    """The hashes of one tree's files at the last scan, in a file of `folder` that is named by the tree's root."""

    def __init__(self, folder: Path, root: Path, *, now_ns: int | None = None) -> None:
        self._file = folder / (hashlib.blake2b(os.fsencode(root), digest_size=12).hexdigest() + ".json")
        self._old = self._read()
        self._new: dict[str, list[Any]] = {}
        self._now_ns = now_ns or time.time_ns()

    def _read(self) -> dict[str, Any]:
        try:
            kept = read_typed(str(self._file), _Kept, most=MAX_BYTES)
        except (OSError, InvalidData):
            return {}
        return kept.files if kept.version == _VERSION else {}

    def get(self, path: bytes, status: os.stat_result) -> tuple[str, int] | None:
        """(hash, bytes) of an unchanged file, else None."""
        known = self._old.get(os.fsdecode(path))
        if not isinstance(known, list) or known[:4] != _key(status):  # looked at now: there may be very many
            return None
        digest = known[-1]
        return (digest, status.st_size) if isinstance(digest, str) and _DIGEST.fullmatch(digest) else None

    def put(self, path: bytes, status: os.stat_result, digest: str, size: int) -> None:
        """Stores a hash unless the file changed recently or while it was read; `status` is from before that."""
        still = max(status.st_mtime_ns, status.st_ctime_ns) < self._now_ns - _STILL_NS
        if still and size == status.st_size:
            self._new[os.fsdecode(path)] = [*_key(status), digest]

    def save(self) -> None:
        """Writes the hashes of this scan. A cache that cannot be written only costs time."""
        if self._new == self._old:
            return
        with contextlib.suppress(OSError):
            write_whole(self._file, json.dumps({"version": _VERSION, "files": self._new}).encode("ascii"))


class _Kept(NamedTuple):
    """The content of a cache file."""

    version: int
    files: dict[str, Any]
    """Path -> [stat values that change with the file, ..., its hash]."""


def _key(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
