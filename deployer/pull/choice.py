"""Chooses which of a job's files a pull copies: pure functions of the host's list and the user's request."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deployer.agent.host.layout import CHECKPOINT_MARKER, TIMES_FILE
from deployer.agent.requests.files.names import covers
from deployer.agent.requests.files.view import CODE
from deployer.errors import UsageError
from deployer.pull.pieces import RemoteFile

RESULT_PARTS = (
    "metrics.jsonl",
    "samples.jsonl",
    "config.yaml",
    "job.json",
    "git.patch",
    "status.json",
    "outcome.json",
    "logs",
    "export",
    "hang",
    "tensorboard",
    "profile",
)
"""Token files and locks stay on the host: they are of use only there, and token files are as large as the data."""
WHOLE_PARTS = ("export", "profile")
"""Each of these is copied as a whole or, beyond the limit, not at all."""
CHECKPOINT_PARTS = ("checkpoints",)
BEYOND_LIMIT = "beyond the limit"
GONE = "it was removed on the host"
ABSENT = "the job has no such file"
LINK = "a link; links are not followed"
DAMAGED = "damaged"

_STAYS = f"/{TIMES_FILE}"
"""An index for `logs --since`: of use only on the host, and thinned out now and then, so it does not only grow."""
_STEP = re.compile(r"\D*(\d{1,18})\Z")


@dataclass(frozen=True)
class PullRequest:
    checkpoints: str | None = None
    """`all`, `latest`, a step or a folder's name; None for none."""
    max_bytes: int | None = None
    """Maximum bytes: exports, traces and checkpoints beyond this stay on the host."""
    may_lack: bool = False
    """It is no error if the named checkpoint does not exist yet."""
    streams: int | None = None
    """Maximum number of connections; None: decided by the bytes to copy."""
    paths: tuple[str, ...] = ()
    """Copy only these paths, in the job's folder or its code."""
    list_unpulled: bool = False
    """Also list the other files that the job has written."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names in the job's folder that the client requests."""
        results = () if self.paths else RESULT_PARTS
        return results + (CHECKPOINT_PARTS if self.checkpoints else ())


@dataclass(frozen=True)
class LeftOut:
    """A file, an export or a checkpoint that was not copied."""

    name: str
    files: int
    size_bytes: int
    reason: str
    wanted: bool = True
    """Whether it was requested; otherwise it is of use only on the host, or more than was requested."""


def choose(
    files: Sequence[RemoteFile], request: PullRequest, *, outputs: Sequence[str] = (), folds_case: bool = False
) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files to copy, and which stay on the host and why. Raises UsageError if a named checkpoint does not exist.

    Small files always come first. Within the limit follow the files that were requested by path (`outputs`: those of
    the plan), the export, the traces, and whole checkpoints from the newest on.
    """
    units: dict[str, list[RemoteFile]] = {"": []}
    kept, left_out = _without_twins(files) if folds_case else (list(files), [])
    kept = [file for file in kept if request.paths or not _is_index(file)]
    named: list[tuple[str, RemoteFile]] = []
    for file in sorted(kept, key=_is_marker):  # last: while it is there, nothing of the checkpoint was removed
        name = name_of(file.path, request.paths, outputs)
        if name is not None and not file.unit.startswith("checkpoints/"):
            named.append((name, file))
        else:
            units.setdefault(file.unit, []).append(file)
    chosen = units.pop("")
    room = _Room(request.max_bytes, sum(file.size for file in chosen))
    chosen += _named_within(named, room, left_out)
    whole = [part for part in WHOLE_PARTS if part in units]
    asked = [unit for unit in units if unit not in whole and name_of(unit, request.paths) is not None]
    for name in dict.fromkeys([*whole, *_checkpoints(units, request, asked=asked)]):
        unit_bytes = sum(file.size for file in units[name])
        if room.takes(unit_bytes):
            chosen += units[name]
        else:
            is_wanted = name not in WHOLE_PARTS or name in request.paths
            left_out.append(LeftOut(name, len(units[name]), unit_bytes, BEYOND_LIMIT, wanted=is_wanted))
    for name in asked:
        if not any(map(_is_marker, units[name])):
            left_out.append(LeftOut(name, 0, 0, "a checkpoint comes whole, by its folder, once it is complete"))
    if request.checkpoints in ("all", "latest") and set(units) <= set(WHOLE_PARTS):
        left_out.append(LeftOut("checkpoints", 0, 0, "none is complete yet", wanted=False))  # nothing is there to bring
    return chosen, left_out


def name_of(path: str, paths: Sequence[str], outputs: Sequence[str] = ()) -> str | None:
    """The requested name that includes this path: one of `paths`, in the job's folder or its code, or one of its
    outputs."""
    tops = [*((top, name) for name in paths for top in (name, CODE + name)), *((CODE + name, name) for name in outputs)]
    return next((name for top, name in tops if covers(top, path)), None)


@dataclass
class _Room:
    """The bytes that are left under a limit."""

    most: int | None
    used: int

    def takes(self, size: int) -> bool:
        """Reserves `size` bytes if they fit. Returns whether they do."""
        fits = self.most is None or self.used + size <= self.most
        self.used += size if fits else 0
        return fits


def _named_within(
    named: Sequence[tuple[str, RemoteFile]], room: _Room, left_out: list[LeftOut]
) -> Iterator[RemoteFile]:
    """The files within the limit, small ones first."""
    beyond: dict[str, list[int]] = {}
    for name, file in sorted(named, key=lambda one: one[1].size):
        if room.takes(file.size):
            yield file
        else:
            beyond.setdefault(name, []).append(file.size)
    left_out += [LeftOut(name, len(sizes), sum(sizes), BEYOND_LIMIT) for name, sizes in beyond.items()]


def _is_index(file: RemoteFile) -> bool:
    return file.path.startswith("logs/") and file.path.endswith(_STAYS)


def _checkpoints(units: Mapping[str, Sequence[RemoteFile]], request: PullRequest, *, asked: Sequence[str]) -> list[str]:
    """The requested complete checkpoints, the newest first."""
    complete = [name for name, files in units.items() if name not in WHOLE_PARTS and any(map(_is_marker, files))]
    there = sorted(complete, key=_age, reverse=True)
    if request.checkpoints is None:
        return [name for name in there if name in asked]
    if request.checkpoints == "all":
        return there
    if request.checkpoints == "latest":
        return there[:1]
    wanted = [name for name in there if request.checkpoints in (name.partition("/")[2], str(_age(name)[0]))]
    if not wanted and not request.may_lack:
        names = ", ".join(name.partition("/")[2] for name in there[:8]) or "none"
        raise UsageError(f"the job has no complete checkpoint {request.checkpoints!r}", hint=f"there are: {names}")
    return wanted


def _is_marker(file: RemoteFile) -> bool:
    return file.path == f"{file.unit}/{CHECKPOINT_MARKER}"


def _age(unit: str) -> tuple[int, str]:
    match = _STEP.search(unit)
    return (int(match[1]) if match else -1, unit)


def _without_twins(files: Sequence[RemoteFile]) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files without those whose names differ only in case or Unicode form, for a disk that ignores case."""
    first: dict[str, RemoteFile] = {}
    for file in files:
        first.setdefault(unicodedata.normalize("NFD", file.path).casefold(), file)
    kept = list(first.values())
    twins = set(files) - set(kept)
    return kept, [LeftOut(f.path, 1, f.size, "this disk takes it for another file's name") for f in twins]
