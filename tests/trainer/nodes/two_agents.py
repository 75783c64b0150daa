"""Two torchrun agents on loopback as two nodes, each with a run folder of its own; one of them is killed or halted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

PAUSE_S = 0.1


class Agent:
    """A torchrun with one rank, in the run folder `folder`."""

    def __init__(
        self, folder: Path, config: Path, *, port: int, is_host: bool, attempt: int, overrides: list[str]
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log_{attempt}.txt"
        conf = f"is_host={int(is_host)}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-id=test.{attempt}", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += [f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", "--max-restarts=0"]
        env = {"TORCHFERRY_RUN_DIR": str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, str(REPO / "train.py"), str(config), *overrides],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
            )

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the agent, its rank, and everything below them; agents first, as a node's end would."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        below = descendants(self.process.pid)
        self.signal_all(signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, waiting = [], [pid]
    while waiting:
        above = waiting.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        waiting += below
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def two_agents(
    folder: Path, config: Path, *, attempt: int = 1, overrides: tuple[str, ...] = ()
) -> Iterator[list[Agent]]:
    """Both nodes' agents; the first one holds torch's store."""
    port, agents = free_port(), list[Agent]()
    try:
        for number, name in enumerate("ab"):
            given = {"port": port, "is_host": number == 0, "attempt": attempt, "overrides": list(overrides)}
            agents.append(Agent(folder / name, config, **given))
        yield agents
    finally:
        for agent in agents:
            agent.end()


def wait_for(what: str, is_so, *, limit_s: float = HANG_S) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < limit_s, f"no {what} within {limit_s:.0f} s"
        time.sleep(PAUSE_S)
    return time.monotonic() - began
