"""The jobs of many hosts: asks all at the same time, and each one again over its existing connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from deployer.agent.host.typed import InvalidData, from_json
from deployer.agent.job.status import FINAL, LOST
from deployer.agent.job.views import Row
from deployer.connection.call import Call
from deployer.connection.host import HERE, Host
from deployer.connection.link import Link
from deployer.errors import FerryError, HostError
from deployer.jobs.registry import JobRecord, SeenJob, last_asked, recall_rows, remember_rows, stamp, written_at

ANSWER_S = 20.0
"""Seconds after which a silent host is shown with its last answer."""

Answer = list[SeenJob] | FerryError


class Asker:
    """Asks one host in the background. `answer`: the last answer; None until there is one."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answer: Answer | None = None
        self._link: Link | None = None
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Asks again, unless the previous request is still open."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name=f"ps {self.host.name}", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> Answer:
        """The answer, or a HostError if none has arrived within `timeout_s`."""
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
            call = self._call()
            rows = self._rows(call, call.result("jobs", list[dict[str, Any]]))
        except FerryError as error:
            self.answer = error
            self.close()
        else:
            self.answer = rows
            remember_rows(self.host.ssh, self.host.root, rows, asked_at=asked_at)

    def _rows(self, call: Call, jobs: list[dict[str, Any]]) -> list[SeenJob]:
        """The host's rows. A row that is valid only in its ID is replaced by the last stored one."""
        rows: list[SeenJob] = []
        for value in jobs:
            job_id = call.read(value, _Named, "jobs").id
            call.check_job_id(job_id, "jobs.id")
            try:
                rows.append(SeenJob(from_json(value, Row), self.host.name, stamp()))
            except InvalidData as damage:
                trouble = f"what {self.host.name} says of it is not understood: {damage}"
                rows.append(self._seen_before(job_id)._replace(trouble=trouble))
        return rows

    def _seen_before(self, job_id: str) -> SeenJob:
        seen = (row for row in recall_rows(self.host.ssh, self.host.root) if row.job.id == job_id)
        return next(seen, _never_seen(Row(job_id, LOST), self.host))

    def _call(self) -> Call:
        if self._link is not None and not self._link.lost:
            return self._link.call("ps")
        self._link = self.host.connect(request={"op": "ps"})
        return self._link.first


class _Named(NamedTuple):
    id: str


def ask_all(hosts: Sequence[Host], *, within_s: float = ANSWER_S) -> list[Answer]:
    """Every host's jobs, or why they are not known; waits at most `within_s` for a silent host."""
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


def rows_of(hosts: Sequence[Host], answers: Sequence[Answer], records: Sequence[JobRecord]) -> list[SeenJob]:
    """Every job of the hosts, newest last; for a host without an answer, its last stored rows."""
    rows: list[SeenJob] = []
    for host, answer in zip(hosts, answers, strict=True):
        rows += answer if isinstance(answer, list) else _last_rows(host, answer, records)
    return sorted(_once_each(rows, records), key=lambda row: row.job.created)


def _once_each(rows: Sequence[SeenJob], records: Sequence[JobRecord]) -> list[SeenJob]:
    """Each job once, although hosts that share a home list the same jobs: the row of the host on which it runs or was
    launched."""
    launched = {record.job_id: record.ssh or HERE for record in records}

    def rank(row: SeenJob) -> tuple[bool, bool]:
        return bool(row.job.on_host), launched.get(row.job.id) != row.where

    best: dict[tuple[str, str], SeenJob] = {}
    for row in rows:
        key = row.job.id, row.job.created
        if key not in best or rank(row) < rank(best[key]):
            best[key] = row
    return list(best.values())


def _last_rows(host: Host, error: FerryError, records: Sequence[JobRecord]) -> list[SeenJob]:
    seen = {row.job.id: unreachable(row, error) for row in recall_rows(host.ssh, host.root)}
    asked_at = last_asked(host.ssh, host.root) or 0.0
    here = [r for r in records if (r.ssh, r.root) == (host.ssh, host.root) and r.job_id not in seen]
    unseen = [r for r in here if written_at(r) >= asked_at]  # an older one the host had no more when it was asked
    never = (_never_seen(Row(r.job_id, LOST, name=r.name, created=r.created), host) for r in unseen)
    return [*seen.values(), *(row._replace(trouble=error.message) for row in never)]


def unreachable(row: SeenJob, error: FerryError) -> SeenJob:
    """The stored row of a job on an unreachable host. A job that had ended then is still ended."""
    return row if row.job.state in FINAL or row.trouble else row._replace(trouble=error.message)


def _never_seen(job: Row, host: Host) -> SeenJob:
    """A job without a stored row: its state is not known, whatever `job` contains."""
    return SeenJob(job, host.name)
