"""What can be done with a job that was launched: look at it, stop it, run commands beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from deployer.errors import FerryError, HostError
from deployer.host import Host
from deployer.link import Call
from deployer.registry import JobRecord

# --- looking ----------------------------------------------------------------------------------------------------------


def list_jobs(hosts: Sequence[Host], records: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """Every job of the hosts, newest last; those of hosts that do not answer come from the records, as unreachable."""
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        answers = list(pool.map(_ask_jobs, hosts))
    rows = [row for answer in answers if isinstance(answer, list) for row in answer]
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, FerryError):
            rows += [_unreachable(r, answer) for r in records if (r.ssh, r.root) == (host.ssh, host.root)]
    return sorted(rows, key=lambda row: str(row.get("created") or ""))


def _ask_jobs(host: Host) -> list[dict[str, Any]] | FerryError:
    try:
        with host.connect(request={"op": "ps"}) as link:
            jobs = link.first.result("jobs")
        return [_job_row(job, host) for job in jobs]
    except FerryError as error:
        return error
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        return HostError(f"{host.name} sent a list of jobs that is not understood: {error!r}")


def _job_row(job: dict[str, Any], host: Host) -> dict[str, Any]:
    gpus = [str(gpu) for gpu in job.get("gpus") or []]
    return {**job, "id": str(job["id"]), "state": str(job["state"]), "gpus": gpus, "where": host.name}


def _unreachable(record: JobRecord, error: FerryError) -> dict[str, Any]:
    return {
        "id": record.job_id,
        "name": record.name,
        "state": "unreachable",
        "reason": error.message,
        "created": record.created,
        "where": record.ssh or "this machine",
    }


def read_status(host: Host, job_id: str) -> dict[str, Any]:
    with host.connect(request={"op": "status", "job": job_id}) as link:
        return dict(link.first.result("status"))


def stop_job(host: Host, job_id: str, *, grace_s: float, on_state: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Stops a job and returns its final status. Idempotent; the host goes on stopping it if the connection breaks."""
    with host.connect(request={"op": "stop", "job": job_id, "grace_s": grace_s}) as link:
        final: dict[str, Any] = {}
        for name, value, _ in link.first.events():
            if name == "state":
                on_state(value)
            elif name == "status":
                final = dict(value)
        return final


def last_lines(host: Host, job_id: str, *, rank: int | None, lines: int) -> bytes:
    with host.connect(request={"op": "last_lines", "job": job_id, "rank": rank, "lines": lines}) as link:
        return b"".join(data for name, _, data in link.first.events() if name == "data")


# --- commands ---------------------------------------------------------------------------------------------------------


def execute(
    host: Host, argv: Sequence[str], *, job_id: str | None, stdin: BinaryIO | None, out: BinaryIO, err: BinaryIO
) -> int:
    """Runs a command on the host, in a job's code folder when one is given, and returns its exit code."""
    with host.connect() as link:
        call = link.call("exec", argv=list(argv), job=job_id)
        if stdin is None:
            call.end_data()
        else:
            threading.Thread(target=_feed, args=(call, stdin), daemon=True).start()
        for name, value, data in call.events():
            if name == "data":
                stream = out if value["stream"] == "stdout" else err
                stream.write(data)
                stream.flush()
            elif name == "ok":
                return int(value["exit"])
    raise HostError("the command ended without an exit code")


def _feed(call: Call, stdin: BinaryIO) -> None:
    try:
        while data := os.read(stdin.fileno(), 32768):
            call.send_data(data)
        call.end_data()
    except (FerryError, OSError):
        pass  # the command or the connection has ended: its reader tells
