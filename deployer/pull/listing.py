"""A job's files as its host lists them. Names and sizes are checked before they are used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployer.agent.host.files import is_path_below
from deployer.agent.host.typed import InvalidData, from_json
from deployer.agent.requests.files.view import LINKS, FileRow, Names, UnpulledFiles
from deployer.connection.call import Call
from deployer.errors import HostError
from deployer.pull.choice import ABSENT, DAMAGED, LINK, LeftOut, PullRequest, name_of
from deployer.pull.pieces import RemoteFile

MAX_FILES = 100_000
MAX_NAMES_BYTES = 16 << 20
"""Maximum bytes of all paths together: an endless list must not fill this machine's memory."""
MOST_DAMAGED = 8
"""How many invalid rows are reported one by one."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass
class Listing:
    """The answer to a `files` request."""

    files: list[RemoteFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    """Links, requested paths that do not exist, and invalid rows."""
    outputs: tuple[str, ...] = ()
    """Paths of the project that the job's plan names."""
    unpulled: UnpulledFiles | None = None


def read_listing(call: Call, request: PullRequest) -> Listing:
    """Reads the host's list; leaves out each row that is not a file below a requested path. Raises HostError if the
    answer is not a list, or has too many rows."""
    reader = _Reader(request)
    for name, value, _ in call.events():
        try:
            if name == "files":
                reader.take_rows(from_json(value, list[Any]))
            elif name == "outputs":
                reader.outputs = tuple(path for path in from_json(value, list[str]) if is_path(path))
            elif name == "links":
                reader.take_links(from_json(value, Names))
            elif name == "absent":
                reader.take_absent(from_json(value, list[str]))
            elif name == "stays":
                reader.unpulled = from_json(value, UnpulledFiles)
        except InvalidData as damage:
            raise HostError(f"the host lists {name} that are not understood: {damage}") from None
    return reader.listing()


class _Reader:
    def __init__(self, request: PullRequest) -> None:
        self.outputs: tuple[str, ...] = ()
        self.unpulled: UnpulledFiles | None = None
        self._request = request
        self._files: dict[str, RemoteFile] = {}
        self._left_out: list[LeftOut] = []
        self._damaged = 0
        self._rows = self._names_bytes = 0

    def take_rows(self, rows: Sequence[object]) -> None:
        for row in rows:
            self._rows += 1
            try:
                file = parse_file(row, self._request, self.outputs)
                if file.path in self._files:
                    raise InvalidData("is listed twice", place=_short(file.path))
            except InvalidData as damage:
                self._take_damage(damage)
                continue
            self._files[file.path] = file
            self._names_bytes += len(file.path)
            if self._names_bytes > MAX_NAMES_BYTES:
                break
        if self._rows > MAX_FILES or self._names_bytes > MAX_NAMES_BYTES:
            raise HostError(f"the host lists more than {len(self._files):,} files", hint="pull them with rsync or tar")

    def _take_damage(self, damage: InvalidData) -> None:
        self._damaged += 1
        if self._damaged <= MOST_DAMAGED:
            self._left_out.append(LeftOut(f"row {self._rows} of the host's list", 1, 0, f"{DAMAGED}: {damage}"))

    def take_links(self, links: Names) -> None:
        self._left_out += [LeftOut(name[:1000], 1, 0, LINK) for name in links.names[:LINKS]]
        if links.more:
            self._left_out.append(LeftOut(f"{links.more} more", links.more, 0, LINK))

    def take_absent(self, names: Sequence[str]) -> None:
        asked = {*self.outputs, *self._request.paths}
        self._left_out += [LeftOut(name, 0, 0, ABSENT) for name in names if name in asked]

    def listing(self) -> Listing:
        if self._damaged > MOST_DAMAGED:
            more = self._damaged - MOST_DAMAGED
            self._left_out.append(LeftOut(f"{more} more rows", more, 0, DAMAGED))
        return Listing(list(self._files.values()), self._left_out, self.outputs, self.unpulled)


def parse_file(row: object, request: PullRequest, outputs: Sequence[str] = ()) -> RemoteFile:
    """A row of the host's list as a file. Raises InvalidData if it is not a path below a requested one, or has invalid
    numbers."""
    file = RemoteFile(*from_json(row, FileRow))
    if not is_path(file.path):
        is_below = is_path(_CONTROL.sub("?", file.path))
        what = "has a control character in its name" if is_below else "is not a path below the job's folder"
        raise InvalidData(what, place=_short(file.path))
    part = file.path.split("/", 1)[0]
    if part not in request.parts and name_of(file.path, request.paths, outputs) is None:
        raise InvalidData("was not asked for", place=_short(file.path))
    if file.size >= 1 << 62 or not file.inode.isdecimal():
        raise InvalidData(f"has the size {file.size} and the inode {_short(file.inode)}", place=_short(file.path))
    return file


def is_path(path: str) -> bool:
    """Whether a name from a host or a user stays below a folder and has no control characters."""
    return is_path_below(path) and not _CONTROL.search(path)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
