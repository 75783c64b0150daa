"""The return values and errors of the Python interface."""

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
"""Keys of a config with their new values: `{"train.steps": 200}`, or `["train.steps=200"]`."""


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
    """Known causes, from the host or this client: a full disk, a file that was not sent."""
    last_lines: tuple[str, ...] = ()
    """The last lines of the log that explains a failure best."""
    hint: str = ""
    results: Path | None = None
    """The folder with the pulled results; None if nothing was pulled."""
    not_home: tuple[str, ...] = ()
    """Requested results that were not pulled, with the reason."""


@dataclass(frozen=True)
class JobStatus:
    """The current status of a job on its host."""

    id: str
    state: str
    """`queued`, `preparing`, `running`, or a state of Result."""
    code: int | None
    reason: str
    causes: tuple[str, ...]
    last_lines: tuple[str, ...]
    hint: str
    attempt: int
    latest: dict[str, Any]
    """The last row of the job's metrics."""
    raw: dict[str, Any] = field(repr=False)
    """The complete output of `status --json`."""


@dataclass(frozen=True)
class JobInfo:
    """A row of `ps`."""

    id: str
    state: str
    """A state of JobStatus, or `unreachable`: then `raw` has the last known state."""
    host: str
    name: str
    gpus: tuple[str, ...]
    step: int | None
    created: str
    raw: dict[str, Any] = field(repr=False)
    """The job's row of `ps --json`."""


class JobFailed(FerryError):
    """A job did not succeed after a wait: `result` contains how it ended."""

    code = "job_failed"

    def __init__(self, result: Result) -> None:
        said = f"{result.id} {result.state}" + (f": {result.reason}" if result.reason else "")
        super().__init__(said, where=(*result.causes, *result.last_lines), hint=result.hint)
        self.result = result
        self.exit_code = result.code or 1


@contextmanager
def told() -> Iterator[None]:
    """Adds the place and the hint to the text of an error, so that Python prints them with the message."""
    try:
        yield
    except FerryError as error:
        hint = [f"hint: {error.hint}"] if error.hint else []
        error.args = ("\n  ".join(map(shown, [error.message, *error.where, *hint])),)  # may contain text from a host
        raise


def warn(text: str) -> None:
    """Warns of a setting that has no effect, or probably not the intended one."""
    warnings.warn(text, stacklevel=2)
