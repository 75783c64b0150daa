"""Which of a job's files come home: pure, from the host's list and what the user asked for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployer.agent.host.layout import CHECKPOINT_MARKER
from deployer.agent.logs.times import TIMES_FILE
from deployer.errors import UsageError
from deployer.pull.pieces import RemoteFile

RESULT_PARTS = (
    "metrics.jsonl",
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
"""Token files and locks stay: of use on the host only, and as large as the data."""
WHOLE_PARTS = ("export", "profile")
"""Of these comes everything or nothing, as the limit allows."""
CHECKPOINT_PARTS = ("checkpoints",)
BEYOND_LIMIT = "beyond the limit"

_STAYS = f"/{TIMES_FILE}"
"""An index for `logs --since`: of use on the host only, and thinned now and then, so that no top-up would do."""
_STEP = re.compile(r"\D*(\d{1,18})\Z")


@dataclass(frozen=True)
class Wish:
    """What of a job's files is wanted, and how."""

    checkpoints: str | None = None
    """`all`, `latest`, a step or a folder's name; None for none."""
    max_bytes: int | None = None
    """The export, traces and checkpoints that would exceed it stay on the host."""
    may_lack: bool = False
    """The named checkpoint may come later."""
    streams: int | None = None
    """Connections at most; None: as many as pay."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names in the job's folder that the host is asked for."""
        return RESULT_PARTS + (CHECKPOINT_PARTS if self.checkpoints else ())


@dataclass(frozen=True)
class LeftOut:
    """A file, an export or a checkpoint that did not come home."""

    name: str
    files: int
    size_bytes: int
    reason: str


def choose(
    files: Sequence[RemoteFile], wish: Wish, *, folds_case: bool = False
) -> tuple[list[RemoteFile], list[LeftOut]]:
    """The files to bring, and what stays on the host and why. UsageError for a checkpoint that is not there.

    Small files always come; then the export, the traces, and checkpoints from the newest on, each whole, while the
    limit holds.
    """
    units: dict[str, list[RemoteFile]] = {"": []}
    kept, left_out = _without_twins(files) if folds_case else (list(files), [])
    kept = [file for file in kept if not (file.path.startswith("logs/") and file.path.endswith(_STAYS))]
    for file in sorted(kept, key=_is_marker):  # last: while it is there, nothing of the checkpoint was removed
        units.setdefault(file.unit, []).append(file)
    chosen = units.pop("")
    size = sum(file.size for file in chosen)
    for name in [*(part for part in WHOLE_PARTS if part in units), *_checkpoints(units, wish)]:
        unit_bytes = sum(file.size for file in units[name])
        if wish.max_bytes is not None and size + unit_bytes > wish.max_bytes:
            left_out.append(LeftOut(name, len(units[name]), unit_bytes, BEYOND_LIMIT))
        else:
            chosen += units[name]
            size += unit_bytes
    if wish.checkpoints in ("all", "latest") and set(units) <= set(WHOLE_PARTS):
        left_out.append(LeftOut("checkpoints", 0, 0, "none is complete yet"))
    return chosen, left_out


def _checkpoints(units: Mapping[str, Sequence[RemoteFile]], wish: Wish) -> list[str]:
    """The wanted ones of the complete checkpoints, the newest first."""
    complete = [name for name, files in units.items() if name not in WHOLE_PARTS and any(map(_is_marker, files))]
    there = sorted(complete, key=_age, reverse=True)
    if wish.checkpoints in (None, "all"):
        return there
    if wish.checkpoints == "latest":
        return there[:1]
    wanted = [name for name in there if wish.checkpoints in (name.partition("/")[2], str(_age(name)[0]))]
    if not wanted and not wish.may_lack:
        names = ", ".join(name.partition("/")[2] for name in there[:8]) or "none"
        raise UsageError(f"the job has no complete checkpoint {wish.checkpoints!r}", hint=f"there are: {names}")
    return wanted


def _is_marker(file: RemoteFile) -> bool:
    return file.path == f"{file.unit}/{CHECKPOINT_MARKER}"


def _age(unit: str) -> tuple[int, str]:
    match = _STEP.search(unit)
    return (int(match[1]) if match else -1, unit)


def _without_twins(files: Sequence[RemoteFile]) -> tuple[list[RemoteFile], list[LeftOut]]:
    """Without files whose names are one on a disk that takes `A` for `a`."""
    first: dict[str, RemoteFile] = {}
    for file in files:
        first.setdefault(unicodedata.normalize("NFD", file.path).casefold(), file)
    kept = list(first.values())
    twins = set(files) - set(kept)
    return kept, [LeftOut(f.path, 1, f.size, "this disk takes it for another file's name") for f in twins]
