"""Where the files of a run are to be read from: a folder here, what is home of a job, or its host."""

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
"""The host of a job by its id, and this client's record of it; without an id of the newest job. UnknownJob."""


Found = tuple[Host, JobRecord | None] | Path
"""A job's host with the record of it, or a run's folder or metrics file here."""


@dataclass
class Run:
    """A run whose files lie in `folder`."""

    name: str
    """The job's id, or the path as it was typed."""
    folder: Path
    host: Host | None = None
    """None for a folder of this machine that is nobody's job."""
    record: JobRecord | None = None
    from_host: bool = False
    """The files came from its host just now."""
    trouble: str = ""
    """Why they did not, and are what is home."""
    lacks: dict[str, str] = field(default_factory=dict)
    """Files that are there and did not come, with the reason."""

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
    """What a word of the command line means: a job, by its id, else a run's folder or metrics file here; no word means
    the newest job, which has a record."""
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
    """The run with these of its files readable: what is home of a job if that is whole, else what its host has, brought
    into `folder`. Where the host cannot be asked, what is home. The host's error where nothing is.

    `anew`: the host is asked in any case.
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
    """Whether what was pulled of a job is all that there will be: it had ended by then, and has begun no other attempt
    since, as far as this client knows."""
    status = home_status(home)
    if status is None or status.state not in FINAL:
        return False
    row = next((row.job for row in recall_rows(record.ssh, record.root) if row.job.id == record.job_id), None)
    return row is None or (row.state in FINAL and row.attempt <= status.attempt)


def home_status(folder: Path) -> Status | None:
    """The job's status as it was pulled."""
    with suppress(OSError, InvalidData):
        return status_from_json(load_json(read_whole(str(folder / "status.json"), MAX_STATUS + 1)))
    return None


def tell_source(run: Run) -> None:
    """Says where a run's files come from, if that is not what one would expect."""
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
