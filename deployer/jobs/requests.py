"""What can be asked of a host about a job that was launched: how it is, its last words, to stop it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deployer.agent.host.layout import JOB_ID
from deployer.agent.host.typed import Damage, from_json
from deployer.agent.job.groups import Processes
from deployer.connection.call import Call
from deployer.connection.host import Host
from deployer.errors import FerryError, HostError

AT_ONCE = 16
"""Jobs of one host that are stopped at the same time."""


def read_status(host: Host, job_id: str) -> dict[str, Any]:
    """A job's status as its host judges it, with its whole id. HostError for an answer that is none."""
    with host.connect(request={"op": "status", "job": job_id}) as link:
        found = link.first.result("status")
    return _understood(found, host.name)


def _understood(found: Any, host: str) -> dict[str, Any]:
    # the id stands in commands that people copy, and in a path
    if not (isinstance(found, dict) and isinstance(found.get("state"), str) and JOB_ID.match(str(found.get("job_id")))):
        raise HostError(f"{host} sent a status that is not understood: {repr(found)[:200]}")
    return found


def processes_in(status: dict[str, Any], host: Host) -> list[Processes]:
    """The job's groups of processes, as `read_status` brought them. HostError for what are none."""
    groups = status.get("groups")
    try:
        found = [from_json(group, Processes) for group in groups] if isinstance(groups, list) else []
    except Damage:
        found = []
    if not found:
        raise HostError(f"{host.name} sent a status that is not understood: groups {repr(groups)[:200]}")
    return found


End = dict[str, Any] | FerryError
"""How a stop went: the job's final status, or why it was not stopped."""


def stop_jobs(
    places: Sequence[tuple[Host, str]], *, grace_s: float, force: bool, on_state: Callable[[str, dict[str, Any]], None]
) -> list[End]:
    """Stops jobs at the same time, over one connection to each host; how each ended, in their order.

    Idempotent; a host goes on stopping if the connection breaks. `on_state` is told the id and each new status.
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
    """Runs all at the same time to their end; an interrupted client leaves without them."""
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_of(call: Call, host: str, on_state: Callable[[dict[str, Any]], None]) -> End:
    try:
        for name, value, _ in call.events():
            if name == "state" and isinstance(value, dict):
                on_state(value)
            elif name == "status":
                return _understood(value, host)
    except FerryError as error:
        return error
    return HostError(f"{host} ended the stop without a status")


def last_lines(host: Host, job_id: str, *, rank: int | None, lines: int) -> bytes:
    ranks = None if rank is None else [rank]
    with host.connect(request={"op": "last_lines", "job": job_id, "ranks": ranks, "lines": lines}) as link:
        return b"".join(data for name, _, data in link.first.events() if name == "data")
