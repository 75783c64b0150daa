"""`forget`: deletes this client's notes about jobs or a host. No host is asked, and nothing there changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deployer import terminal
from deployer.agent.job.status import FINAL
from deployer.errors import UnknownJob, UsageError
from deployer.jobs.registry import find_record, forget, forget_place, noted_places, read_records, recall_rows
from deployer.printable import shown

HERE = "this machine"


class _Known(NamedTuple):
    """A job for which there is a note or a record."""

    job_id: str
    ssh: str | None
    root: str
    may_run: bool


def forget_jobs(job_ids: Sequence[str], *, yes: bool, as_json: bool) -> None:
    records = [find_record(job_id) for job_id in dict.fromkeys(job_ids)]
    jobs = [_known(record.job_id, record.ssh, record.root) for record in records]
    _ask(jobs, yes=yes, as_json=as_json)
    _drop(jobs, as_json=as_json)


def forget_host(ssh: str | None, root: str | None, *, yes: bool, as_json: bool) -> None:
    """Forgets the jobs of a host, or of one root folder on it."""
    places = {(r.ssh, r.root) for r in (*read_records(), *noted_places())}
    meant = sorted(place for place in places if place[0] == ssh and root in (None, place[1]))
    if not meant:
        known = ", ".join(sorted({place[0] for place in places if place[0]})) or "none"
        name = ssh or HERE
        raise UnknownJob(f"nothing is noted here of {name}{f' {root}' if root else ''}", hint=f"known hosts: {known}")
    ids = {(r.job_id, r.ssh, r.root) for r in read_records() if (r.ssh, r.root) in meant}
    ids |= {(row.job.id, *place) for place in meant for row in recall_rows(*place)}
    jobs = [_known(*job) for job in sorted(ids, key=str)]
    _ask(jobs, yes=yes, as_json=as_json)
    _drop(jobs, as_json=as_json)
    for place in meant:
        forget_place(*place)
    if not as_json:
        terminal.notice(shown(f"{ssh or HERE} is forgotten here; ps asks it no more"))


def _known(job_id: str, ssh: str | None, root: str) -> _Known:
    states = [row.job.state for row in recall_rows(ssh, root) if row.job.id == job_id]
    return _Known(job_id, ssh, root, not states or states[0] not in FINAL)


def _ask(jobs: Sequence[_Known], *, yes: bool, as_json: bool) -> None:
    running = [job.job_id for job in jobs if job.may_run]
    if yes or not running:
        return
    told = ", ".join(running[:5]) + (f" and {len(running) - 5} more" if len(running) > 5 else "")
    if not terminal.has_person(as_json=as_json):
        hint = f"to end it first: deploy.py stop {running[0]}; else --yes"
        raise UsageError(f"as far as this client knows, {told} may still run, and goes on", hint=hint)
    question = f"As far as this client knows, {told} may still run, and goes on. Forget it all the same?"
    terminal.confirm(shown(question), declined=shown("nothing was forgotten"))


def _drop(jobs: Sequence[_Known], *, as_json: bool) -> None:
    for job in jobs:
        forget(job.job_id, job.ssh, job.root)
        if not as_json:
            terminal.notice(shown(f"{job.job_id} is forgotten here; on {job.ssh or HERE} it stays as it is"))
    if as_json:
        terminal.say_json([{"id": job.job_id, "ssh": job.ssh, "root": job.root} for job in jobs])
