"""The jobs of many hosts, all asked at the same time, each again over the connection that it already has."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from deployer.agent.job.status import FINAL
from deployer.connection.host import HERE, Host
from deployer.connection.link import Link
from deployer.errors import FerryError, HostError
from deployer.jobs.registry import JobRecord, Row, last_asked, recall_rows, remember_rows, stamp, written_at

ANSWER_S = 20.0
"""A host that has not answered by then is shown as it was last seen."""

Answer = list[Row] | FerryError


class Asker:
    """One host, asked in the background. `answer` is what came last; None until then."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answer: Answer | None = None
        self._link: Link | None = None
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Asks again, unless the former question is still open."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name=f"ps {self.host.name}", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> Answer:
        """The answer, or HostError when none has come within the time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.answer if self.answer is not None else HostError("no answer yet")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _ask(self) -> None:
        asked_at = time.time()
        try:
            jobs = self._call().result("jobs")
            rows = [_row(job, self.host) for job in jobs]
        except FerryError as error:
            self.answer = error
            self.close()
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            self.answer = HostError(f"{self.host.name} sent a list of jobs that is not understood: {error!r}")
            self.close()
        else:
            self.answer = rows
            remember_rows(self.host.ssh, self.host.root, rows, asked_at=asked_at)

    def _call(self) -> Any:
        if self._link is not None and not self._link.lost:
            return self._link.call("ps")
        self._link = self.host.connect(request={"op": "ps"})
        return self._link.first


def _row(job: dict[str, Any], host: Host) -> Row:
    gpus = [str(gpu) for gpu in job.get("gpus") or []]
    own = {"id": str(job["id"]), "state": str(job["state"]), "gpus": gpus, "where": host.name}
    return {**job, **own, "seen_at": stamp()}


def ask_all(hosts: Sequence[Host], *, within_s: float = ANSWER_S) -> list[Answer]:
    """Every host's jobs, or why they are not known; one that says nothing keeps the others waiting for `within_s`."""
    askers = [Asker(host) for host in hosts]
    for asker in askers:
        asker.ask()
    deadline = time.monotonic() + within_s
    answers = [asker.wait(max(0.0, deadline - time.monotonic())) for asker in askers]
    for asker in askers:
        asker.close()
    return [
        HostError(f"no answer within {within_s:g} s") if asker.answer is None else answer
        for asker, answer in zip(askers, answers, strict=True)
    ]


def rows_of(hosts: Sequence[Host], answers: Sequence[Answer], records: Sequence[JobRecord]) -> list[Row]:
    """Every job of the hosts, newest last; those of a host without an answer as they were last seen."""
    rows: list[Row] = []
    for host, answer in zip(hosts, answers, strict=True):
        rows += answer if isinstance(answer, list) else _last_rows(host, answer, records)
    return sorted(_once_each(rows, records), key=lambda row: str(row.get("created") or ""))


def _once_each(rows: Sequence[Row], records: Sequence[JobRecord]) -> list[Row]:
    """Hosts that share a home list the same jobs: each is told by the host that it runs on, or was launched on."""
    launched = {record.job_id: record.ssh or HERE for record in records}

    def rank(row: Row) -> tuple[bool, bool]:
        return bool(row.get("on_host")), launched.get(row["id"]) != row["where"]

    best: dict[tuple[Any, Any], Row] = {}
    for row in rows:
        key = row["id"], row.get("created")
        if key not in best or rank(row) < rank(best[key]):
            best[key] = row
    return list(best.values())


def _last_rows(host: Host, error: FerryError, records: Sequence[JobRecord]) -> list[Row]:
    seen = {row["id"]: unreachable(row, error) for row in recall_rows(host.ssh, host.root)}
    asked_at = last_asked(host.ssh, host.root) or 0.0
    here = [r for r in records if (r.ssh, r.root) == (host.ssh, host.root) and r.job_id not in seen]
    unseen = [r for r in here if written_at(r) >= asked_at]  # an older one the host had no more when it was asked
    return [*seen.values(), *(_from_record(r, host, error) for r in unseen)]


def unreachable(row: Row, error: FerryError) -> Row:
    """A job that was seen before, on a host that cannot be reached now. What had ended then has ended for good."""
    if row["state"] in FINAL:
        return row
    return {**row, "state": "unreachable", "last_state": row["state"], "reason": error.message}


def _from_record(record: JobRecord, host: Host, error: FerryError) -> Row:
    return {
        "id": record.job_id,
        "name": record.name,
        "state": "unreachable",
        "reason": error.message,
        "created": record.created,
        "where": host.name,
        "seen_at": None,
    }
