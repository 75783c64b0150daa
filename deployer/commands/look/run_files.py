"""Finds the source of a run's files: a local folder, a job's pulled results, or its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deployer import terminal
from deployer.agent.host.files import open_regular, read_whole
from deployer.agent.host.typed import MAX_BYTES as MAX_STATUS
from deployer.agent.host.typed import InvalidData, load_json
from deployer.agent.job.status import FINAL, Status, status_from_json
from deployer.connection.host import Host
from deployer.curves.metrics import MAX_BYTES, Metrics, read_metrics
from deployer.errors import ConnectError, FerryError, HostError, LostConnection, UnknownJob
from deployer.jobs.registry import JobRecord, recall_rows
from deployer.printable import shown
from deployer.pull.some import bring_some

METRICS = "metrics.jsonl"
NO_ANSWER = (ConnectError, LostConnection, HostError)

FindHost = Callable[[str | None], tuple[Host, JobRecord | None]]
"""Finds a job's host and this client's record of it by its ID; without an ID the newest job. Raises UnknownJob."""


Found = tuple[Host, JobRecord | None] | Path
"""A job's host with the record of the job, or a run's folder or metrics file on this machine."""


@dataclass
class Run:
    """A run whose files are in `folder`."""

    name: str
    """The job's ID, or the path as it was typed."""
    folder: Path
    host: Host | None = None
    """None for a local folder that was named by its path."""
    record: JobRecord | None = None
    from_host: bool = False
    """Whether the files were just read from the host."""
    trouble: str = ""
    """Why the host was not read, so that the pulled files are used."""
    lacks: dict[str, str] = field(default_factory=dict)
    """Files that exist on the host and were not read, with the reason."""

    def read(self, path: str, most: int) -> bytes | None:
        """The beginning of a file of the run, in its folder or the project's."""
        for place in (self.folder / path, self.folder / "code" / path):
            with suppress(OSError, ValueError):
                return read_whole(str(place), most)
        return None

    def read_end(self, path: str, most: int) -> bytes | None:
        """Reads the end of the file, with the same limits."""
        for place in (self.folder / path, self.folder / "code" / path):
            with suppress(OSError, ValueError), open_regular(str(place)) as file:
                file.seek(max(0, file.seek(0, 2) - most))
                return file.read(most)
        return None

    def metrics(self) -> Metrics | None:
        """None if the run has written no metrics."""
        name = self.folder.name if self.folder.is_file() else METRICS
        folder = self.folder.parent if self.folder.is_file() else self.folder
        for place in (folder / name, folder / "code" / name):
            with suppress(OSError), open_regular(str(place)) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - MAX_BYTES))
                return read_metrics(file.read(MAX_BYTES), is_cut=size > MAX_BYTES)
        return None


def locate(word: str | None, find_host: FindHost) -> Found:
    """Resolves a word of the command line: a job by its ID, else a local folder or metrics file of a run. Without a
    word it is the newest job, which has a record."""
    if word is None:
        return find_host(None)
    path = Path(word)
    if "/" in word or word.endswith(".jsonl"):
        return _checked(path, word)
    try:
        return find_host(word)
    except UnknownJob as error:
        if path.exists():
            return path
        raise UnknownJob(
            error.message, where=error.where, hint=f"{error.hint}; a run's folder here is named by its path"
        ) from None


def _checked(path: Path, word: str) -> Path:
    if not path.exists():
        raise UnknownJob(f"there is no {word} here", hint="a job's id, a run's folder, or a metrics.jsonl")
    return path


def open_run(word: str, found: Found, paths: Sequence[str], folder: Path, *, anew: bool = False) -> Run:
    """Makes these files of a run readable: a job's pulled results if they are complete, else the files on its host,
    copied into `folder`. If the host cannot be asked, the pulled results; raises the host's error if there are none.

    `anew`: ask the host in any case.
    """
    if isinstance(found, Path):
        return Run(word, found)
    host, record = found
    job_id = record.job_id if record is not None else word.lower()
    home = Path(record.results) if record is not None else None
    if home is not None and record is not None and not anew and is_whole(home, record):
        return Run(job_id, home, host, record)
    try:
        lacks = bring_some(host, job_id, paths, folder, most=MAX_BYTES, tell=terminal.notice)
    except (*NO_ANSWER, UnknownJob) as error:  # the host may have cleaned up
        if home is None or not home.is_dir():
            raise
        return Run(job_id, home, host, record, trouble=error.message)
    return Run(job_id, folder, host, record, from_host=True, lacks=lacks)


def is_whole(home: Path, record: JobRecord) -> bool:
    """Whether the pulled results of a job are final: the job had ended before the pull, and has started no new attempt
    since then, as far as this client knows."""
    status = home_status(home)
    if status is None or status.state not in FINAL:
        return False
    row = next((row.job for row in recall_rows(record.ssh, record.root) if row.job.id == record.job_id), None)
    return row is None or (row.state in FINAL and row.attempt <= status.attempt)


def home_status(folder: Path) -> Status | None:
    """The job's status in the pulled results; None if there is none."""
    with suppress(OSError, InvalidData):
        return status_from_json(load_json(read_whole(str(folder / "status.json"), MAX_STATUS + 1)))
    return None


def tell_source(run: Run) -> None:
    """Shows where a run's files come from if the host could not be read, and which files are missing."""
    if run.trouble and run.host is not None:
        terminal.notice(
            shown(f"{run.host.name} does not tell of it ({run.trouble}): {run.name} is shown as it was pulled")
        )
        terminal.notice(shown(f"  in {run.folder}"))
    for name, reason in run.lacks.items():
        again = f"{terminal.invoked_as()} pull {run.name} {terminal.typed(name)}"
        terminal.notice(shown(f"{run.name}: {name} is not read, {reason}; {again} pulls it"))


def tell_trouble(name: str, error: FerryError) -> None:
    terminal.notice(shown(f"{name} is not shown: {error.message}"))
