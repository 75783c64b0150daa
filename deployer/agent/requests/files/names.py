"""Requested names of a job's files: a path, or a pattern of paths. Pure; both sides use it.

`*`, `?` and `[ab]` stand for characters of one name, `**` for any folders; none of them for a dot at the start of a
name. A file with this exact name comes before a pattern.
Stdlib only, Python 3.8: this package runs on the host.
"""

import fnmatch
import os
import re
from typing import Iterator, List, Optional, Set

MOST_LOOKS = 200_000
"""Maximum number of files and folders that are compared with a pattern."""


def is_pattern(name: str) -> bool:
    return re.search(r"[*?\[]", name) is not None


def covers(name: str, path: str) -> bool:
    """Whether a request for `name` includes `path`: the same path, a path below it, or a match of the pattern."""
    return path == name or path.startswith(name + "/") or (is_pattern(name) and _compare(name, path) is True)


def matching(base: str, pattern: str) -> List[str]:
    """The topmost files and folders below the folder `base` that match a pattern, sorted; follows no link."""
    parts = pattern.split("/")
    fixed = parts[: next(index for index, part in enumerate(parts) if is_pattern(part))]
    found = []
    for looks, path in enumerate(_below(base, "/".join(fixed), pattern)):
        if looks >= MOST_LOOKS:
            break
        if _compare(pattern, path):
            found.append(path)
    return sorted(found)


def _below(base: str, folder: str, pattern: str) -> Iterator[str]:
    """The paths below a folder, as deep as the pattern may match."""
    waiting = [folder]
    while waiting:
        top = waiting.pop()
        if os.path.islink(os.path.join(base, top)):
            continue
        try:
            entries = list(os.scandir(os.path.join(base, top)))
        except OSError:
            continue
        for entry in entries:
            path = "%s/%s" % (top, entry.name) if top else entry.name
            yield path
            if entry.is_dir(follow_symlinks=False) and _compare(pattern, path) is None:
                waiting.append(path)


def _compare(pattern: str, path: str) -> Optional[bool]:
    """True: the pattern matches the path or a folder above it. None: it may match something below. False: neither."""
    wanted = pattern.split("/")
    at = _and_beyond({0}, wanted)
    if len(wanted) in at:  # `**` alone
        return True
    for part in path.split("/"):
        at = _and_beyond({there for here in at for there in _after(wanted, here, part)}, wanted)
        if len(wanted) in at:
            return True
    return None if at else False


def _after(wanted: List[str], here: int, part: str) -> Set[int]:
    """The positions in the pattern after one more part of the path."""
    is_hidden = part.startswith(".") and not wanted[here].startswith(".")
    if is_hidden or not (wanted[here] == "**" or fnmatch.fnmatchcase(part, wanted[here])):
        return set()
    return {here} if wanted[here] == "**" else {here + 1}


def _and_beyond(at: Set[int], wanted: List[str]) -> Set[int]:
    """Adds the positions after `**`, which may also stand for no folder."""
    found = set(at)
    for here in sorted(at):
        while here < len(wanted) and wanted[here] == "**":
            here += 1
            found.add(here)
    return found
