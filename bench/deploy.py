"""How long a deploy takes, as ratios against what one would type by hand.

    sudo .venv/bin/python bench/deploy.py [--rounds 7] [--rtt 0 50 100 200] [--only unchanged,changed,first,packet]

* unchanged: a tree of 1,000 files and 22 MB that the host has, from the start of `deploy.py run` to the first byte that
  the job's own process printed, against `rsync -az --delete … && ssh host true`; a new connection each time. The round
  trips are counted from the difference to 0 ms.
* changed: the same after one file has changed.
* first: trees of 1,000 files (22 MB) and 20,000 files (60 MB) to a host that has neither them nor our agent, against
  `tar | ssh tar`.
* openssh: as unchanged, through the system's `ssh` (`--transport openssh`), and again over a live ControlMaster against
  the same commands by hand over that master.
* start: `--help` and `--dry-run` of the tree, against `python -c "import click"`.
* packet: from the start of `deploy.py run --ssh HOST -- PROGRAM` and of `deploy.py CONFIG --ssh HOST` until the host
  sees a connection, until it has read the client's first packet (its SSH version), and until the first of the key
  exchange comes, for which the SSH library must be loaded; against the same click. The host is a listening socket on
  loopback that says an SSH server's first line and nothing more.

Both ends are this machine, in two network namespaces. Rounds are interleaved, medians are compared. Ratios
depend little on the machine; the milliseconds do.
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab import (
    ALIAS,
    DEPLOY,
    Lab,
    Line,
    SshServer,
    interleave,
    judged,
    parser_of,
    report,
    require,
    time_to_first_byte,
    timed,
)

PROGRAM = ["--device", "cpu", "--no-pull", "--", "sh", "-c", "echo first"]
MOST_ROUND_TRIPS = 7
FIRST_PACKET = 2.5
NO_NETWORK = ("start", "packet")


def deploy_limit(rtt_ms: float) -> float:
    return 0.70 if rtt_ms == 0 else 0.32


def first_limit(rtt_ms: float) -> float | None:
    limits: dict[float, float] = {0: 1.15, 100: 1.0}
    return limits.get(rtt_ms)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 50, 100, 200], metavar="MS")
    parser.add_argument("--only", default="unchanged,changed,first,openssh,start,packet")
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 20_000], help="sizes of the first deploys")
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    network = not set(parts) <= set(NO_NETWORK)
    require("ip", "rsync", "ssh", "tar", namespaces=network)
    with Lab.open() as lab:
        tree = lab.project("project")
        if "start" in parts:
            bench_start(lab, tree, rounds=chosen.rounds)
        if "packet" in parts:
            bench_packet(lab, tree, rounds=chosen.rounds)
        unchanged: dict[float, float] = {}
        for rtt_ms in chosen.rtt if network else ():
            with lab.host(rtt_ms) as (line, server):
                way = Way(lab, line, server, tree)
                if "unchanged" in parts:
                    unchanged[rtt_ms] = bench_unchanged(way, rounds=chosen.rounds)
                if "changed" in parts:
                    bench_changed(way, rounds=chosen.rounds)
                if "openssh" in parts:
                    bench_openssh(way, rounds=chosen.rounds)
            if "first" in parts and first_limit(rtt_ms) is not None:
                bench_first(lab, rtt_ms, chosen.files, rounds=max(3, chosen.rounds // 2))
        report_round_trips(unchanged)
    return 0


def bench_start(lab: Lab, tree: Path, *, rounds: int) -> None:
    def run(*argv: str) -> Callable[[], float]:
        return lambda: timed([sys.executable, *argv], env=lab.env, cwd=tree)

    ways = {
        "click": run("-c", "import click"),
        "--help": run(DEPLOY, "--help"),
        "--dry-run": run(DEPLOY, "run", "--device", "cpu", "--dry-run", "--", "sh", "-c", "echo first"),
    }
    medians = interleave(ways, rounds)
    for name, limit in (("--help", 2.0), ("--dry-run", 4.0)):
        report(name, medians[name], medians["click"], by="python -c 'import click'", limit=limit)


def bench_packet(lab: Lab, tree: Path, *, rounds: int) -> None:
    (tree / "config.py").write_text("from trainer.schema import Config\n\nconfig = Config()\n")
    commands = {"run": ["run", "--ssh", ALIAS, *PROGRAM], "CONFIG": ["config.py", "--ssh", ALIAS]}
    taken: dict[str, list[float]] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = lab.folder / "packet-config"
        config.write_text(f"Host {ALIAS}\n  Hostname 127.0.0.1\n  Port {server.getsockname()[1]}\n  User nobody\n")
        env = {**lab.env, "TORCHFERRY_SSH_CONFIG": str(config)}
        for number in range(rounds + 1):
            seconds = {"click": timed([sys.executable, "-c", "import click"], env=env, cwd=tree)}
            for name, words in commands.items():
                moments = first_packets([sys.executable, DEPLOY, *words], server, env=env, cwd=tree)
                seconds |= {f"{name}: {moment}": value for moment, value in moments.items()}
            for name, value in seconds.items() if number else ():
                taken.setdefault(name, []).append(value)
    (tree / "config.py").unlink()
    click = statistics.median(taken["click"])
    for name, values in taken.items():
        limit = FIRST_PACKET if name.endswith("first packet") else None
        low, middle, high = (value / click for value in (min(values), statistics.median(values), max(values)))
        print(f"{name:22} {middle:6.2f} x click, {low:.2f} to {high:.2f}{judged(middle, limit)}", flush=True)


def first_packets(argv: list[str], server: socket.socket, *, env: Mapping[str, str], cwd: Path) -> dict[str, float]:
    """Seconds from a client's start to each of its packets."""
    begun = time.perf_counter()
    with subprocess.Popen(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as client:
        server.settimeout(30.0)
        connection, _ = server.accept()
        moments = {"connection": time.perf_counter() - begun}
        with connection, connection.makefile("rb") as words:
            connection.sendall(b"SSH-2.0-OpenSSH_bench\r\n")
            greeting = words.readline()
            moments["first packet"] = time.perf_counter() - begun
            packet = words.read(1)
        moments["key exchange"] = time.perf_counter() - begun
        client.kill()
    if not greeting.startswith(b"SSH-2.0-") or not packet:
        raise RuntimeError(f"{argv} sent {greeting!r}, then {packet!r}")
    return moments


@dataclass(frozen=True)
class Way:
    """The compared commands, from one end of a line to the server at the other."""

    lab: Lab
    line: Line
    server: SshServer
    tree: Path
    own_config: Path | None = None
    """The client's ssh_config, if it is not the server's."""

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.config}"

    @property
    def config(self) -> Path:
        return self.own_config or self.server.client_config_path

    @property
    def env(self) -> dict[str, str]:
        return {**self.lab.env, "TORCHFERRY_SSH_CONFIG": str(self.config)}

    def shell(self, text: str) -> float:
        return timed([*self.line.client, "sh", "-c", text], env=self.env, cwd=self.tree)

    def by_hand(self) -> float:
        target = self.server.home / "by-hand"
        return self.shell(f"rsync -az --delete -e '{self.ssh}' ./ {ALIAS}:{target}/ && {self.ssh} {ALIAS} true")

    def ours(self, *options: str, state: Path | None = None) -> float:
        env = self.env | ({"TORCHFERRY_STATE_DIR": str(state)} if state else {})
        argv = [*self.line.client, sys.executable, DEPLOY, "run", "--ssh", ALIAS, *options, *PROGRAM]
        return time_to_first_byte(argv, b"first", env=env, cwd=self.tree)


def bench_unchanged(way: Way, *, rounds: int) -> float:
    rtt_ms = way.line.rtt_ms
    ways = {"hand": way.by_hand, "ssh": lambda: way.shell(f"{way.ssh} {ALIAS} true"), "ours": way.ours}
    medians = interleave(ways, rounds)
    by = "rsync && ssh by hand"
    report(f"unchanged {rtt_ms:g} ms", medians["ours"], medians["hand"], by=by, limit=deploy_limit(rtt_ms))
    report(f"  ssh true {rtt_ms:g} ms", medians["ssh"], medians["hand"], by=by)
    return medians["ours"]


def bench_changed(way: Way, *, rounds: int) -> None:
    rtt_ms = way.line.rtt_ms
    numbers = itertools.count()

    def after_a_change(run: Callable[[], float]) -> Callable[[], float]:
        def change_and_run() -> float:
            (way.tree / "folder0000" / "file00000.dat").write_text(f"another line {next(numbers)}\n" * 500)
            return run()

        return change_and_run

    ways = {"hand": after_a_change(way.by_hand), "ours": after_a_change(way.ours)}
    medians = interleave(ways, rounds)
    by = "rsync && ssh by hand"
    report(f"one file {rtt_ms:g} ms", medians["ours"], medians["hand"], by=by, limit=deploy_limit(rtt_ms))


def bench_openssh(way: Way, *, rounds: int) -> None:
    rtt_ms = way.line.rtt_ms
    medians = interleave({"hand": way.by_hand, "ours": lambda: way.ours("--transport", "openssh")}, rounds)
    by, limit = "rsync && ssh by hand", 0.50 if rtt_ms >= 50 else None
    report(f"openssh {rtt_ms:g} ms", medians["ours"], medians["hand"], by=by, limit=limit)
    with live_master(way) as warm:
        medians = interleave({"hand": warm.by_hand, "ours": lambda: warm.ours("--transport", "openssh")}, rounds)
    by, limit = "the same over its master", 0.40 if rtt_ms >= 50 else None
    report(f"  over a master {rtt_ms:g} ms", medians["ours"], medians["hand"], by=by, limit=limit)


@contextmanager
def live_master(way: Way) -> Iterator[Way]:
    """The same way with an open connection of the user that is shared."""
    socket, config = way.lab.folder / "master", way.lab.folder / "config-with-master"
    config.write_text(f"ControlPath {socket}\n{way.server.client_config_path.read_text()}")
    warm = replace(way, own_config=config)
    master = subprocess.Popen([*way.line.client, *warm.ssh.split(), "-MN", ALIAS], stdin=subprocess.DEVNULL)
    try:
        while not socket.exists() and master.poll() is None:
            time.sleep(0.02)
        yield warm
    finally:
        master.terminate()
        master.wait()


def bench_first(lab: Lab, rtt_ms: float, sizes: list[int], *, rounds: int) -> None:
    for files in sizes:
        size_bytes = 22_000_000 if files <= 1000 else 60_000_000
        tree = lab.project(f"first{files}", files=files, size_bytes=size_bytes)
        with lab.host(rtt_ms, f"first{files}") as (line, server):
            way = Way(lab, line, server, tree)
            medians = interleave({"tar": partial(first_by_tar, way), "ours": partial(first, way)}, rounds)
        label = f"first {files:,} at {rtt_ms:g} ms"
        report(label, medians["ours"], medians["tar"], by="tar | ssh tar", limit=first_limit(rtt_ms))
        shutil.rmtree(tree)


def first_by_tar(way: Way) -> float:
    target = way.server.home / "by-tar"
    seconds = way.shell(f"tar cf - . | {way.ssh} {ALIAS} 'mkdir {target} && tar xf - -C {target}'")
    shutil.rmtree(target)
    return seconds


def first(way: Way) -> float:
    """A deploy to a root that does not exist, from a client without any state."""
    root, state = way.server.home / "root", way.lab.folder / "state"
    seconds = way.ours("--remote-root", str(root), state=state)
    with (root / "store" / "spare.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a spare copy is being made, and must not slow the next round
    shutil.rmtree(root)
    shutil.rmtree(state)
    return seconds


def report_round_trips(unchanged: dict[float, float]) -> None:
    if {0, 100} <= unchanged.keys():
        count = (unchanged[100] - unchanged[0]) / 0.1
        print(f"unchanged: {count:.1f} round trips{judged(count, MOST_ROUND_TRIPS)}")


if __name__ == "__main__":
    sys.exit(main())
