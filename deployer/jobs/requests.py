"""Requests to a host about a launched job: its status, its last log lines, and its stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deployer.agent.host.layout import GroupName
from deployer.agent.job.status import Status
from deployer.agent.job.views import JobView, StopReport
from deployer.connection.call import Call
from deployer.connection.host import Host
from deployer.errors import FerryError, HostError

AT_ONCE = 16
"""Jobs of one host that are stopped at the same time."""


def read_status(host: Host, job_id: str) -> JobView:
    """A job's state as its host finds it, with the whole ID. Raises HostError if the answer is not valid."""
    with host.connect(request={"op": "status", "job": job_id}) as link:
        call = link.first
        found = call.result("status", JobView)
        call.check_job_id(found.job_id, "status.job_id")
        return found


End = StopReport | FerryError
"""How a stop went, or why the job was not stopped."""


def stop_jobs(
    places: Sequence[tuple[Host, str]], *, grace_s: float, force: bool, on_state: Callable[[str, Status], None]
) -> list[End]:
    """Stops jobs at the same time, over one connection to each host. Returns how each stop ended, in the order of
    `places`.

    Idempotent; a host continues the stop if the connection breaks. Calls `on_state` with the ID and each new status.
    """
    by_host: dict[tuple[str | None, str], list[int]] = {}
    for number, (host, _) in enumerate(places):
        by_host.setdefault((host.ssh, host.root), []).append(number)
    ends: dict[int, End] = {}

    def one_host(numbers: list[int]) -> None:
        request: dict[str, Any] = {"op": "stop", "grace_s": grace_s, "force": force}
        host = places[numbers[0]][0]
        for start in range(0, len(numbers), AT_ONCE):
            part = numbers[start : start + AT_ONCE]
            try:
                with host.connect(request={**request, "job": places[part[0]][1]}) as link:
                    calls = [link.first, *(link.call(**request, job=places[n][1]) for n in part[1:])]
                    _in_threads([partial(one_job, n, call) for n, call in zip(part, calls, strict=True)])
            except FerryError as error:
                ends.update({n: error for n in part if n not in ends})

    def one_job(number: int, call: Call) -> None:
        host, job_id = places[number]
        ends[number] = _end_of(call, host.name, lambda status: on_state(job_id, status))

    _in_threads([partial(one_host, numbers) for numbers in by_host.values()])
    return [ends[number] for number in range(len(places))]


def _in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs all tasks at the same time and waits for them; an interrupted client leaves without waiting."""
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_of(call: Call, host: str, on_state: Callable[[Status], None]) -> End:
    try:
        for name, value, _ in call.events():
            if name == "state":
                on_state(call.read(value, Status, name))
            elif name == "status":
                report = call.read(value, StopReport, name)
                call.check_job_id(report.job_id, f"{name}.job_id")
                return report
    except FerryError as error:
        return error
    return HostError(f"{host} ended the stop without a status")


def last_lines(host: Host, job_id: str, group: GroupName, *, rank: int | None, lines: int) -> bytes:
    """The last lines of one rank, or of its group's launcher."""
    chosen = {**group._asdict(), "ranks": None if rank is None else [rank]}
    with host.connect(request={"op": "last_lines", "job": job_id, "lines": lines, **chosen}) as link:
        return b"".join(data for name, _, data in link.first.events() if name == "data")
