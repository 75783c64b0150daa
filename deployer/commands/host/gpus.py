"""`gpus`: who holds and uses a host's GPUs, and who waits for them."""

from __future__ import annotations

import time
from typing import Any

from deployer import terminal
from deployer.connection.host import Host
from deployer.errors import HostError
from deployer.printable import Shown, cells


def gpus(host: Host, *, as_json: bool) -> None:
    with host.connect(request={"op": "gpus"}) as link:
        found = link.first.result("gpus")
    if as_json:
        terminal.say_json(found)
        return
    try:
        rows, queue = [_row(gpu) for gpu in found["gpus"]], [_ticket(ticket) for ticket in found["queue"]]
    except (TypeError, ValueError, LookupError) as error:
        raise HostError(f"{host.name} sent a list of GPUs that is not understood: {error!r}") from error
    terminal.table(cells("GPU", "NAME", "MEMORY", "HELD BY", "PROCESSES"), rows)
    if queue:
        terminal.table(cells("WAITING", "USER", "FOR GPU", "AGE"), queue)


def _row(gpu: dict[str, Any]) -> tuple[Shown, ...]:
    memory = f"{gpu['memory_used_mib']:,} of {gpu['memory_total_mib']:,} MiB"
    held = ", ".join(_holder(holder) for holder in gpu["held"])
    processes = "; ".join(_process(process) for process in gpu["processes"])
    return cells(gpu["index"], gpu["name"], memory, held or "-", processes or "-")


def _process(process: dict[str, Any]) -> str:
    return f"pid {process['pid']} of {process['user']}, {process['memory_mib']:,} MiB: {str(process['command'])[:40]}"


def _holder(holder: dict[str, Any]) -> str:
    beside = ", shared" if holder["shared"] else ""
    return f"{holder['job']} ({holder['user']}, {_age(holder)}{beside})"


def _ticket(ticket: dict[str, Any]) -> tuple[Shown, ...]:
    return cells(ticket["job"], ticket["user"], ticket["wants"], _age(ticket))


def _age(what: dict[str, Any]) -> str:
    return terminal.age(time.time() - float(what["since"]))
