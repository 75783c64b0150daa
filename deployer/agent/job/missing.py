"""Finds the files and modules that a job's last log lines report as missing, and whether this host has them.

The client knows what the launch left out and combines both. Stdlib only, Python 3.8: both sides use it.
"""

import os
import re
from typing import Iterator, List, Tuple

from .causes import Cause
from .status import Missing

MOST = 8
NAME = 300
"""Maximum characters of one."""

_LINE = re.compile(
    r"no such file|not found|does(?:n't| not) exist|cannot find|can't find|unable to find|can't open|cannot open"
    r"|cannot create|nonexistent"
    r"|unable to open|failed to open|is not a (?:local )?(?:folder|directory)|can't cd to|\berrno = 2\b"
    r"|there is no (?:such )?(?:file|folder)|No module named",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|`([^`'\n]+)['`]")
_BEFORE_COLON = re.compile(r"(?:^|[\s:])([^\s:'\"]+)'?: (?:No such file|not found)", re.IGNORECASE)
_OPENED = re.compile(
    r"(?:can't|cannot|unable to|failed to) (?:open|create|cd to|find|access|stat)(?: file)?:? ([^\s:'\"]+)", re.I
)
_PATHLIKE = re.compile(r"[^\s:'\"()<>,;=]*[/.][^\s:'\"()<>,;=]+")
_MODULE = re.compile(r"No module named ['\"]?([A-Za-z_]\w*(?:\.\w+)*)")
_NO_PATH = re.compile(r"[\x00-\x1f\x7f]|://|^-|^\.+$|^/+$")


def find_missing(words: str, code: str) -> Tuple[Missing, ...]:
    """The missing files and modules in the last log lines that do not exist here; the last ones first. `code`: the
    job's working folder."""
    found: List[Missing] = []
    for line in reversed(words.splitlines()):
        if len(found) >= MOST:
            break
        if not _LINE.search(line[:4000]):
            continue
        module = _MODULE.search(line)
        found += [Missing(module.group(1)[:NAME], "module")] if module else map(Missing, _files(line[:4000], code))
    return tuple(dict.fromkeys(found))[:MOST]


def _files(line: str, code: str) -> Iterator[str]:
    quoted = [next(filter(None, groups)) for groups in _QUOTED.findall(line)]
    candidates = [*quoted, *_BEFORE_COLON.findall(line), *_OPENED.findall(line), *_PATHLIKE.findall(line)]
    for candidate in dict.fromkeys(text.rstrip(".,;:)") for text in candidates):
        path = os.path.normpath(candidate) if candidate else ""
        if not path or len(path) > NAME or _NO_PATH.search(path):
            continue
        for top in {code, os.path.realpath(code)}:
            if path.startswith(top + "/"):
                path = path[len(top) + 1 :]
        if not os.path.exists(os.path.join(code, path)):
            yield path


def explain_here(missing: Tuple[Missing, ...], code: str) -> Iterator[Cause]:
    """Causes that only this host can find: a name with another case, a link without a target."""
    for name in (one.name for one in missing if one.kind == "file" and not os.path.isabs(one.name)):
        place = code
        for part in name.split("/"):
            inner = os.path.join(place, part)
            if os.path.islink(inner) and not os.path.exists(inner):
                link, shown = os.path.relpath(inner, code), os.readlink(inner)
                hint = "--include %s sends what the link leads to" % link
                yield Cause("%s is a link to %s, which this host does not have" % (link, shown), hint)
            if not os.path.isdir(inner):
                alike = [] if os.path.lexists(inner) else _alike(place, part)
                if alike:
                    there = os.path.relpath(os.path.join(place, alike[0]), code)
                    line = "%s is not there, but %s is: names differ by case on this host" % (name, there)
                    yield Cause(line, "write %s" % there)
                break
            place = inner


def _alike(folder: str, name: str) -> List[str]:
    try:
        return sorted(other for other in os.listdir(folder) if other != name and other.lower() == name.lower())
    except OSError:
        return []
