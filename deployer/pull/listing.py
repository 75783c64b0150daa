"""The files of a job as its host lists them, judged before anything is done with their names and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployer.agent.requests.fetch import LINKS
from deployer.connection.call import Call
from deployer.errors import HostError
from deployer.pull.choice import LeftOut
from deployer.pull.pieces import RemoteFile

MAX_FILES = 100_000
MAX_NAMES_BYTES = 16 << 20
"""Of all paths together; a list without an end must not fill this machine's memory."""


def read_listing(call: Call, parts: Sequence[str]) -> tuple[list[RemoteFile], list[LeftOut]]:
    """What a `files` request brought, and the links among it, which stay. HostError for a row that is no file below the
    asked parts, and for too many."""
    links: list[LeftOut] = []
    files: dict[str, RemoteFile] = {}
    names_bytes = 0
    for name, value, _ in call.events():
        if name == "links":
            links = _links(value)
        if name != "files":
            continue
        for row in value:
            file = parse_file(row, parts)
            names_bytes += len(file.path)
            if len(files) >= MAX_FILES or names_bytes > MAX_NAMES_BYTES:
                raise HostError(f"the host lists more than {len(files):,} files", hint="pull them with rsync or tar")
            if file.path in files:
                raise HostError(f"the host lists {file.path!r} twice")
            files[file.path] = file
    return list(files.values()), links


def _links(value: Any) -> list[LeftOut]:
    try:
        names, more = [str(name)[:1000] for name in value["names"]][:LINKS], int(value["more"])
    except (KeyError, TypeError, ValueError):
        raise HostError(f"the host lists {_short(value)} as links") from None
    why = "a link; links are not followed"
    named = [LeftOut(name, 1, 0, why) for name in names]
    return named + ([LeftOut(f"{more} more", more, 0, why)] if more else [])


def parse_file(row: Any, parts: Sequence[str]) -> RemoteFile:
    """A file as a host lists it. HostError for what is no path below the asked parts with numbers."""
    if not isinstance(row, list) or [type(value) for value in row] != [str, int, int, int, int]:
        raise HostError(f"the host lists {_short(row)}, which is no file")
    file = RemoteFile(*row)
    check_name(file.path)
    if file.path.split("/", 1)[0] not in parts:
        raise HostError(f"the host lists {_short(file.path)}, which was not asked for")
    plausible = 0 <= file.size < 1 << 62 and abs(file.mtime_ns) < 1 << 62
    if not (plausible and 0 <= file.inode < 1 << 64 and 0 <= file.stored < 1 << 62):
        raise HostError(f"the host lists {_short(file.path)} with {_short(row[1:])} as size, time, inode and blocks")
    return file


def check_name(path: str) -> None:
    """HostError for a name from a host that would leave the target folder or drive a terminal."""
    names = path.split("/")
    if any(name in ("", ".", "..") for name in names) or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in path):
        raise HostError(f"the host names a file {_short(path)}, which is not a path below the job's folder")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
