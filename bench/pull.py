"""How long results take to come home, as ratios: `deploy.py pull` against `rsync -a` and `rsync -az` of the same files.

    sudo .venv/bin/python bench/pull.py [--rounds 1] [--rtt 100] [--size 1GB] [--only big,small]

* big: what a checkpoint is like, four files of random bytes, `--size` in all.
* small: 1,000 files of 1 kB.

Both ends are this machine, in two network namespaces; the target is empty before each round. The ratio is of seconds:
below 1.0 ours is the faster one. The goal of `big` at 100 ms is 0.33.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab import ALIAS, DEPLOY, Lab, Line, SshServer, interleave, parser_of, report, require, timed

from deployer.commands.values import parse_size

LIMIT = 1.0
JOB_ID = "bench"
BLOCK_BYTES = 1 << 20


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rtt", type=float, nargs="+", default=[100], metavar="MS")
    parser.add_argument("--size", type=parse_size, default="1GB")
    parser.add_argument("--only", default="big,small")
    chosen = parser.parse_args()
    require("ip", "rsync", "ssh", namespaces=True)
    with Lab.open() as lab:
        for part in chosen.only.split(","):
            root = lab.folder / part
            (make_big if part == "big" else make_small)(root / "jobs" / JOB_ID / "export", chosen.size)
            for rtt_ms in chosen.rtt:
                with lab.host(rtt_ms, f"{part}{rtt_ms:g}") as (line, server):
                    bench(part, Way(lab, line, server, root), rtt_ms=rtt_ms, rounds=chosen.rounds)
    return 0


def make_big(folder: Path, size_bytes: int) -> None:
    """Makes four files of random bytes, the same every time."""
    folder.mkdir(parents=True)
    source = random.Random(0)
    for number in range(4):
        with (folder / f"__{number}_0.distcp").open("wb") as file:
            for _ in range(size_bytes // 4 // BLOCK_BYTES):
                file.write(source.randbytes(BLOCK_BYTES))


def make_small(folder: Path, _: int) -> None:
    """Makes 1,000 files of 1 kB in 10 folders."""
    source = random.Random(0)
    for number in range(1000):
        path = folder / f"part{number % 10}" / f"{number:04d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(1000))


@dataclass(frozen=True)
class Way:
    """One line between a client and a server, and the root with the job."""

    lab: Lab
    line: Line
    server: SshServer
    root: Path

    def ours(self, *options: str) -> float:
        words = ("pull", JOB_ID, "--ssh", ALIAS, "--remote-root", str(self.root), "--pull-max", "0", *options)
        return self._time(sys.executable, DEPLOY, *words, "--to", str(self._target()))

    def first_contact(self) -> None:
        """Installs the agent on the host and compiles our modules: neither is part of a pull."""
        self._run(sys.executable, DEPLOY, "ps", "--ssh", ALIAS, "--remote-root", str(self.root))

    def rsync(self, flags: str) -> float:
        ssh = f"ssh -F {self.server.client_config_path}"
        source = f"{ALIAS}:{self.root}/jobs/{JOB_ID}/"
        return self._time("rsync", flags, "-e", ssh, source, f"{self._target()}/")

    def _time(self, *argv: str) -> float:
        seconds = self._run(*argv)
        self._check()
        return seconds

    def _run(self, *argv: str) -> float:
        return timed([*self.line.client, *argv], env=self.lab.client_env(self.server), cwd=self.lab.folder)

    def _target(self) -> Path:
        shutil.rmtree(self.lab.folder / "home-coming", ignore_errors=True)
        return self.lab.folder / "home-coming"

    def _check(self) -> None:
        """Raises RuntimeError unless every file has arrived with its full size: an incomplete pull is not a faster
        one."""
        came = sizes(self.lab.folder / "home-coming" / "export")
        if came != sizes(self.root / "jobs" / JOB_ID / "export"):
            raise RuntimeError(f"{len(came)} files have come, and not all that there are")


def sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def bench(part: str, way: Way, *, rtt_ms: float, rounds: int) -> None:
    ways: dict[str, Callable[[], float]] = {
        "rsync -a": lambda: way.rsync("-a"),
        "rsync -az": lambda: way.rsync("-az"),
        "ours": way.ours,
        "one stream": lambda: way.ours("--streams", "1"),
    }
    way.first_contact()
    medians = interleave(ways, rounds, warm_up=0)
    for theirs in ("rsync -a", "rsync -az"):
        report(f"pull {part} {rtt_ms:g} ms", medians["ours"], medians[theirs], by=theirs, limit=LIMIT)
    report("  one stream", medians["one stream"], medians["rsync -a"], by="rsync -a")


if __name__ == "__main__":
    sys.exit(main())
