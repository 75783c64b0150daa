"""`gpus`: the jobs and processes that hold or use a host's GPUs, and the jobs that wait for them."""

from __future__ import annotations

import time

from deployer import terminal
from deployer.agent.gpus.report import GpuClaim, GpuReport, GpuRow
from deployer.agent.host.typed import to_json
from deployer.connection.host import Host
from deployer.printable import Shown, cells, shown


def gpus(host: Host, *, as_json: bool) -> None:
    with host.connect(request={"op": "gpus"}) as link:
        found = link.first.result("gpus", GpuReport)
    if as_json:
        terminal.say_json(to_json(found))
        return
    terminal.table(cells("GPU", "NAME", "MEMORY", "HELD BY", "PROCESSES"), [_row(gpu) for gpu in found.gpus])
    if found.limit:
        allowed = ", ".join(found.limit.gpus) or "none"
        terminal.say(shown(f"this login may use GPU {allowed}: CUDA_VISIBLE_DEVICES={found.limit.text}"))
    if found.queue:
        rows = [cells(ticket.job, ticket.user, ticket.wants, _age(ticket.since)) for ticket in found.queue]
        terminal.table(cells("WAITING", "USER", "FOR GPU", "AGE"), rows)


def _row(gpu: GpuRow) -> tuple[Shown, ...]:
    memory = gpu.fault or f"{gpu.memory_used_mib:,} of {gpu.memory_total_mib:,} MiB"
    held = ", ".join(_holder(claim) for claim in gpu.held)
    using = [f"pid {p.pid} of {p.user}, {p.memory_mib:,} MiB: {p.command[:40]}" for p in gpu.processes]
    return cells(gpu.index, gpu.name, memory, held or "-", "; ".join(using) or "-")


def _holder(claim: GpuClaim) -> str:
    beside = ", shared" if claim.shared else ""
    return f"{claim.job} ({claim.user}, {_age(claim.since)}{beside})"


def _age(since: float) -> str:
    return terminal.age(time.time() - since)
