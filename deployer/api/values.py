"""What the Python interface gives back, and how it says what went wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer.errors import FerryError
from deployer.printable import shown

Overrides = Mapping[str, Any] | Sequence[str]
"""Keys of a config and what they are to be: `{"train.steps": 200}`, or `["train.steps=200"]`."""


@dataclass(frozen=True)
class Result:
    """How a job ended, and where its results are."""

    id: str
    state: str
    """`succeeded`, `failed`, `stopped` or `lost`."""
    code: int | None
    """The exit code of the rank that failed first; 128+N for signal N."""
    reason: str
    causes: tuple[str, ...] = ()
    """Why, as far as the host or this client knows: a full disk, a file that was left out."""
    last_lines: tuple[str, ...] = ()
    """Of the log that tells most of a failure."""
    hint: str = ""
    results: Path | None = None
    """The folder with what came home; None when nothing was brought."""
    not_home: tuple[str, ...] = ()
    """What was asked for and is not here, with the reason."""


@dataclass(frozen=True)
class JobStatus:
    """A job as its host judges it now."""

    id: str
    state: str
    """`queued`, `preparing`, `running`, or one of Result's."""
    code: int | None
    reason: str
    causes: tuple[str, ...]
    last_lines: tuple[str, ...]
    hint: str
    attempt: int
    latest: dict[str, Any]
    """The last row of its metrics."""
    raw: dict[str, Any] = field(repr=False)
    """All of `status --json`."""


@dataclass(frozen=True)
class JobInfo:
    """A job as `ps` lists it."""

    id: str
    state: str
    """Or `unreachable`: then `raw` has what it was when it was seen last."""
    host: str
    name: str
    gpus: tuple[str, ...]
    step: int | None
    created: str
    raw: dict[str, Any] = field(repr=False)
    """Its row of `ps --json`."""


class JobFailed(FerryError):
    """A job that was waited for did not succeed: `result` says how it ended."""

    code = "job_failed"

    def __init__(self, result: Result) -> None:
        said = f"{result.id} {result.state}" + (f": {result.reason}" if result.reason else "")
        super().__init__(said, where=(*result.causes, *result.last_lines), hint=result.hint)
        self.result = result
        self.exit_code = result.code or 1


@contextmanager
def told() -> Iterator[None]:
    """An error that leaves shows all that it says where Python prints it: the place and the hint are half of it."""
    try:
        yield
    except FerryError as error:
        hint = [f"hint: {error.hint}"] if error.hint else []
        error.args = ("\n  ".join(map(shown, [error.message, *error.where, *hint])),)  # words of a host's, too
        raise


def warn(text: str) -> None:
    """What has no effect, or will hardly do what was meant."""
    warnings.warn(text, stacklevel=2)
