"""This client's notes: the jobs that it launched, where they run, where their results go, and each host's last answer
about its jobs, in case the host is unreachable. The host has the true state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from deployer.agent.host.files import blake2b, is_name
from deployer.agent.host.layout import JOB_ID, matching_ids, name_ids
from deployer.agent.host.typed import InvalidData, from_json, read_typed, to_json
from deployer.agent.job.status import LOST, State
from deployer.agent.job.views import Row
from deployer.connection.host import Way
from deployer.errors import UnknownJob
from deployer.paths import state_dir, write_whole

MAX_NOTE = 64 << 20
MAX_RECORD = 1 << 20


class JobRecord(NamedTuple):
    """What the client needs to reach a job when the user types only a short ID."""

    job_id: str
    name: str
    ssh: str | None
    """The host as the user wrote it; None: this machine."""
    root: str
    results: str
    """Absolute folder on this machine."""
    created: str
    ssh_key: str | None = None
    transport: Way = "auto"
    secrets: tuple[str, ...] = ()
    """Names of the secrets that this client has given the job; it gives the host no others."""
    env_file: str = ""
    """Absolute path of the job's env file; empty without one, and for a pipe."""
    words: tuple[str, ...] = ()
    """The launch's arguments after `run`, as typed, by jobs/words.py; empty in records of earlier versions."""
    folder: str = ""
    """The project's folder on this machine."""
    verb: str = "run"
    """The command before these arguments: run, sft or pretrain."""


def write_record(record: JobRecord) -> None:
    write_whole(_file_of(record), json.dumps(to_json(record), indent=1).encode("ascii"))


def forget(job_id: str, ssh: str | None, root: str) -> bool:
    """Drops this client's notes on a job that its host no longer has. Returns whether there was a record of it."""
    rows = recall_rows(ssh, root)
    if any(row.job.id == job_id for row in rows):
        remember_rows(ssh, root, [row for row in rows if row.job.id != job_id], asked_at=last_asked(ssh, root))
    mine = [r for r in read_records() if (r.job_id, r.ssh, r.root) == (job_id, ssh, root)]
    if mine:
        from deployer.jobs.left_out import forget_left_out  # hardly ever needed

        forget_left_out(job_id)
    for record in mine:
        _file_of(record).unlink(missing_ok=True)
    return bool(mine)


def forget_place(ssh: str | None, root: str) -> None:
    """Drops a host's last answer."""
    _file_of_rows(ssh, root).unlink(missing_ok=True)


def read_records(tell: Callable[[str], None] = lambda damage: None) -> list[JobRecord]:
    """Every readable record, oldest first; calls `tell` with a line for each other one."""
    records = []
    for path in (state_dir() / "jobs").glob("*.json"):
        try:
            records.append(_read(path))
        except (OSError, InvalidData) as error:
            if path.is_symlink() or path.exists():  # else it has just been forgotten; a link to nothing is damage
                tell(_told(path, error))
    return sorted(records, key=lambda r: (r.created, r.job_id))


def newest_records(beginning: str, most: int) -> list[JobRecord]:
    """Readable records of IDs that begin like this, the last written first; reads at most `most` files."""
    found = []
    with suppress(OSError), os.scandir(state_dir() / "jobs") as entries:
        for entry in entries:
            if entry.name.startswith(beginning) and entry.name.endswith(".json"):
                with suppress(OSError):
                    found.append((entry.stat().st_mtime, entry.path))
    records = []
    for _, path in sorted(found, reverse=True)[:most]:
        with suppress(OSError, InvalidData):
            records.append(_read(Path(path)))
    return records


def written_at(record: JobRecord) -> float:
    """When a record was written, in seconds since 1970; 0.0 if it is gone."""
    try:
        return _file_of(record).stat().st_mtime
    except OSError:
        return 0.0


def _file_of(record: JobRecord) -> Path:
    return state_dir() / "jobs" / f"{record.job_id}.json"


def _read(path: Path) -> JobRecord:
    """Raises OSError, or InvalidData if the record does not name its job or its host."""
    record = read_typed(str(path), JobRecord, most=MAX_RECORD)
    if record.job_id != path.stem or not JOB_ID.match(record.job_id):
        raise InvalidData(f"is {record.job_id[:60]!r}, not {path.stem[:60]!r}", place="job_id")
    _check_place(record)
    return record


def _check_place(record: JobRecord) -> None:
    if not record.root.startswith(("/", "~")):
        raise InvalidData(f"is {record.root[:60]!r}, not a folder from / or ~ on", place="root")
    if record.ssh is None and record.ssh_key is not None:
        raise InvalidData("is there, and no host", place="ssh_key")
    for name in ("ssh", "root", "results", "ssh_key"):
        text = getattr(record, name) or ""
        if not is_name(text):
            raise InvalidData(f"is {text[:60]!r}, which names nothing", place=name)


def _told(path: Path, error: OSError | InvalidData) -> str:
    why = error.strerror if isinstance(error, OSError) else error
    return f"this client's record of {path.stem}, {path}, is damaged: {why}"


def find_record(job_id: str) -> JobRecord:
    """The record of this ID, or of the only ID that begins with it, else ends with it. Raises UnknownJob if there is
    none."""
    job_id = job_id.lower()
    if not JOB_ID.match(job_id):
        raise UnknownJob(f"{job_id!r} is not a job id", hint="deploy.py ps lists the jobs")
    damages: list[str] = []
    by_id = {r.job_id: r for r in reversed(read_records(damages.append))}
    found = matching_ids(job_id, by_id)
    if len(found) == 1:
        return by_id[found[0]]
    if found:
        raise UnknownJob(f"{job_id} matches {name_ids(found)}", hint="write more of the ID, or its last letters")
    told = "".join(f"; {damage}" for damage in damages[:3])
    raise UnknownJob(
        f"no job {job_id} was launched from this machine{told}",
        hint="deploy.py ps lists the jobs; for a job launched from another machine, add --ssh HOST",
    )


# --- the hosts' last answers ------------------------------------------------------------------------------------------


class SeenJob(NamedTuple):
    """A job in its host's last answer."""

    job: Row
    where: str
    """The host's name on this client."""
    seen_at: str | None = None
    """Time of the answer by this client's clock; None if no host has reported the job."""
    trouble: str = ""
    """Why the current state is not known."""


class _Note(NamedTuple):
    """A host's answer as it is stored."""

    jobs: list[dict[str, Any]]
    """One row each, with `where` and `seen_at`."""
    asked_at: float | None = None


def stamp() -> str:
    """The current time in the format of `seen_at`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def remember_rows(ssh: str | None, root: str, rows: Sequence[SeenJob], *, asked_at: float | None = None) -> None:
    """Stores a host's answer, whole or not at all. Ignores a disk that cannot be written: `ps` must still work.

    `asked_at`: when the host was asked for all its jobs, in seconds since 1970 on this client.
    """
    jobs = [{**to_json(row.job), "where": row.where, "seen_at": row.seen_at} for row in rows if row.seen_at]
    answer = {"ssh": ssh, "root": root, **to_json(_Note(jobs, asked_at))}
    with suppress(OSError):
        write_whole(_file_of_rows(ssh, root), json.dumps(answer).encode("ascii"))


def note_state(record: JobRecord, where: str, state: State) -> None:
    """Stores a job's current state; its other values stay."""
    rows = recall_rows(record.ssh, record.root)
    before = next((row.job for row in rows if row.job.id == record.job_id), Row(record.job_id, state))
    job = before._replace(state=state, name=record.name, created=record.created)
    others = [row for row in rows if row.job.id != record.job_id]
    remember_rows(
        record.ssh,
        record.root,
        [*others, SeenJob(job, where, stamp())],
        asked_at=last_asked(record.ssh, record.root),
    )


def recall_rows(ssh: str | None, root: str) -> list[SeenJob]:
    """The host's last answer. A job with a damaged note has only its ID and the damage. Empty if the host was never
    asked, or if the whole note is damaged."""
    rows = [_seen_job(value) for value in _read_note(ssh, root).jobs]
    return [row for row in rows if row is not None and JOB_ID.match(row.job.id)]


def _seen_job(value: dict[str, Any]) -> SeenJob | None:
    try:
        seen = from_json({**value, "job": value}, SeenJob)
        if seen.seen_at is None:
            raise InvalidData("is missing", place="seen_at")
    except InvalidData as damage:
        job_id, where = value.get("id"), value.get("where")
        if not isinstance(job_id, str) or not isinstance(where, str):
            return None
        return SeenJob(Row(job_id, LOST), where, trouble=f"what this client has noted of it is damaged: {damage}")
    return seen


def note_damage(ssh: str | None, root: str) -> str:
    """Why the host's last answer cannot be read; empty if it can, or if the host was never asked."""
    path = _file_of_rows(ssh, root)
    try:
        read_typed(str(path), _Note, most=MAX_NOTE)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except InvalidData as damage:
        return f"{path} is damaged: {damage}"
    return ""


def last_asked(ssh: str | None, root: str) -> float | None:
    """When the host last listed all its jobs; None if it never did."""
    return _read_note(ssh, root).asked_at


class _HostKey(NamedTuple):
    """The host of a note."""

    root: str
    ssh: str | None = None


def noted_places() -> list[JobRecord]:
    """A record without a job for each host that has a note."""
    found = []
    for path in (state_dir() / "hosts").glob("*.json"):
        with suppress(OSError, InvalidData):
            place = read_typed(str(path), _HostKey, most=MAX_NOTE)
            record = JobRecord("", "", place.ssh, place.root, "", "")
            _check_place(record)
            found.append(record)
    return found


def _read_note(ssh: str | None, root: str) -> _Note:
    try:
        return read_typed(str(_file_of_rows(ssh, root)), _Note, most=MAX_NOTE)
    except (OSError, InvalidData):
        return _Note([])


def _file_of_rows(ssh: str | None, root: str) -> Path:
    name = blake2b(repr((ssh, root)).encode(), digest_size=16).hexdigest()
    return state_dir() / "hosts" / f"{name}.json"
