"""What a launch on 64 hosts at once costs its client, and how late the last one starts.

    .venv/bin/python bench/fanout.py [--hosts 64] [--servers 8]

One client process launches the same plan on every host at the same time, each in a separate thread. The hosts are 64
roots behind 8 SSH servers of this machine, each with an agent, a separate supervisor and job: they share the cores
of this machine, which real hosts do not. What these cores need for all of that is printed beside it.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from lab import Lab, SshServer, judged, parser_of, require, start_sshd
from ps import client_config

from deployer.agent.job.views import Ack
from deployer.connection.host import Host
from deployer.launch.follow import Watcher
from deployer.launch.start import launch_and_follow
from deployer.plan.options import Options, read_config
from deployer.plan.prepare import Prepared, prepare

START_LIMIT = 5.0


class Clock(Watcher):
    """The time when the host acknowledged the job."""

    started_at = 0.0

    def started(self, ack: Ack) -> None:
        self.started_at = time.perf_counter()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--servers", type=int, default=8)
    chosen = parser.parse_args()
    require("ssh")
    with Lab.open() as lab, ExitStack() as stack:
        names = [f"server{number}" for number in range(chosen.servers)]
        servers = [stack.enter_context(start_sshd(lab.folder, name=name)) for name in names]
        os.environ["TORCHFERRY_SSH_CONFIG"] = str(client_config(lab.folder, names, servers))
        prepared = prepared_job(lab.project("project", files=50, size_bytes=500_000))
        hosts = [(names[n % len(names)], root_of(servers[n % len(names)], n)) for n in range(chosen.hosts + 1)]
        launch_all(hosts, prepared, "agents")  # now every host has the agent and the tree
        (single,) = launch_all(hosts[-1:], prepared, "single")
        before = time.process_time(), total_cpu_s()
        begun = time.perf_counter()
        starts = launch_all(hosts[:-1], prepared, "all")
        seconds = time.perf_counter() - begun
        client_s = time.process_time() - before[0]
        cores_s = (total_cpu_s() - before[1]) / (os.cpu_count() or 1)
    print(
        f"{len(starts)} hosts at once: all started in {seconds:.1f} s, {client_s / len(starts):.3f} CPU s of ours "
        f"per host; one alone starts in {single:.2f} s, the last of all in {max(starts):.2f} s, "
        f"{max(starts) / single:.1f} x{judged(max(starts) / single, START_LIMIT)}; "
        f"this machine's {os.cpu_count()} cores were busy for {cores_s:.1f} s"
    )
    return 0


def root_of(server: SshServer, number: int) -> str:
    return str(server.home / f"root{number}")


def prepared_job(project: Path) -> Prepared:
    options = Options(command=("true",), keys={"target.device": "cpu", "run.name": "fan"})
    return prepare(read_config(options), options=options, project=project)


def launch_all(hosts: list[tuple[str, str]], prepared: Prepared, name: str) -> list[float]:
    """Seconds from the common start to each host's acknowledgement. Raises RuntimeError if one does not acknowledge."""
    clocks, begun = [Clock() for _ in hosts], time.perf_counter()
    threads = [
        threading.Thread(target=launch, args=(host, prepared, f"fan-{name}", clock))
        for host, clock in zip(hosts, clocks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if silent := [host for host, clock in zip(hosts, clocks, strict=True) if not clock.started_at]:
        raise RuntimeError(f"not started: {silent}")
    return [clock.started_at - begun for clock in clocks]


def launch(where: tuple[str, str], prepared: Prepared, job_id: str, clock: Clock) -> None:
    host = Host(where[0], where[1])
    launch_and_follow(
        host.connect,
        prepared.plan._replace(job_id=job_id),
        shipment=prepared.shipment,
        payload=prepared.payload,
        git=None,
        view=None,
        watcher=clock,
    )
    host.close()


def total_cpu_s() -> float:
    """CPU seconds that all processes of this machine have used so far."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = (int(word) for word in words[:3])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, max(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    sys.exit(main())
