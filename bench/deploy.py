"""How long a deploy takes, as ratios: ours against `rsync -az --delete … && ssh host true` typed by hand.

    sudo .venv/bin/python bench/deploy.py [--rounds 7] [--rtt 0 100] [--only deploy,start,log]

* deploy: an unchanged tree of 1,000 files and 22 MB, from the start of `deploy.py run` to the first byte that the job's
  own process printed, against the commands by hand; both ends are this machine, in two network namespaces.
* start: `--help` and `--dry-run` of the same tree, against `python -c "import click"`.
* log: a job prints 50 MB at once while we follow: bytes lost, and the client's largest memory.

Rounds are interleaved, medians are compared. Ratios do not depend much on the machine; the milliseconds do.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from delay_tun import Line  # noqa: E402
from sshd import ALIAS, SshServer, start_sshd  # noqa: E402

DEPLOY = str(HERE.parent / "deploy.py")
FILES, FOLDERS, TREE_BYTES = 1000, 80, 22_000_000
LOG_BYTES = 50_000_000
LIMITS = {"deploy 0 ms": 0.9, "deploy 100 ms": 0.5, "--help": 2.0, "--dry-run": 4.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 100], metavar="MS")
    parser.add_argument("--only", default="deploy,start,log")
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    if missing := missing_for(parts):
        sys.exit(f"bench/deploy.py needs {missing}")
    with tempfile.TemporaryDirectory(prefix="tf-bench-") as folder:
        lab = Lab.build(Path(folder))
        if "start" in parts:
            bench_start(lab, chosen.rounds)
        for rtt_ms in chosen.rtt if "deploy" in parts else ():
            bench_deploy(lab, rtt_ms, rounds=chosen.rounds)
        if "log" in parts:
            bench_log(lab)
    return 0


def missing_for(parts: Sequence[str]) -> str:
    """What is not there: programs, or root for the network namespaces."""
    programs = {"deploy": ("ip", "rsync", "ssh"), "log": ("ssh",), "start": ()}
    absent = [name for part in parts for name in programs[part] if shutil.which(name) is None]
    if "deploy" in parts and os.getuid() != 0:
        absent.append("root, to make network namespaces (or --only start,log)")
    return ", ".join(dict.fromkeys(absent))


@dataclass
class Lab:
    """A folder with a project tree and an empty home for the client."""

    folder: Path
    tree: Path
    env: dict[str, str]

    @staticmethod
    def build(folder: Path) -> Lab:
        tree = folder / "project"
        make_tree(tree)
        home = folder / "home"
        home.mkdir()
        env = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))}
        # compiled modules are kept, as on a user's machine, but not in this checkout
        return Lab(folder, tree, {**env, "HOME": str(home), "PYTHONPYCACHEPREFIX": str(folder / "pycache")})

    def client_env(self, server: SshServer) -> dict[str, str]:
        return {**self.env, "TORCHFERRY_SSH_CONFIG": str(server.client_config_path)}


def make_tree(tree: Path) -> None:
    """1,000 files in 80 folders, 22 MB, half of the bytes random and half text, the same every time."""
    source = random.Random(0)
    size = TREE_BYTES // FILES
    for number in range(FILES):
        path = tree / f"folder{number % FOLDERS:02d}" / f"file{number:04d}.dat"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(size) if number % 2 else b"words and more words\n" * (size // 21))


# --- measuring --------------------------------------------------------------------------------------------------------


def timed(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> float:
    """Seconds from start to end. RuntimeError with its words when the command fails."""
    begun = time.perf_counter()
    done = subprocess.run(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} returned {done.returncode}:\n{done.stderr}")
    return seconds


def time_to_first_byte(argv: Sequence[str], expected: bytes, *, env: Mapping[str, str], cwd: Path) -> float:
    """Seconds from start to the first bytes on stdout, which must be `expected`; then waits for the end."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 4096)
    seconds = time.perf_counter() - begun
    _, said = process.communicate()
    if process.returncode != 0 or not first.startswith(expected):
        raise RuntimeError(f"{' '.join(argv)} returned {process.returncode}, printed {first!r}:\n{said.decode()}")
    return seconds


def interleave(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of each way, run in turn after one round that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            seconds = run()
            if number:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def report(name: str, ours: float, theirs: float, *, by: str) -> None:
    ratio = ours / theirs
    limit = LIMITS.get(name)
    verdict = "" if limit is None else f"  (at most {limit}: {'ok' if ratio <= limit else 'MISSED'})"
    print(f"{name:15} {ratio:6.2f} x {by}  [{ours * 1000:,.0f} / {theirs * 1000:,.0f} ms]{verdict}", flush=True)


# --- the parts --------------------------------------------------------------------------------------------------------


def bench_start(lab: Lab, rounds: int) -> None:
    def run(*argv: str) -> Callable[[], float]:
        return lambda: timed([sys.executable, *argv], env=lab.env, cwd=lab.tree)

    ways = {
        "click": run("-c", "import click"),
        "--help": run(DEPLOY, "--help"),
        "--dry-run": run(DEPLOY, "run", "--device", "cpu", "--dry-run", "--", "sh", "-c", "echo first"),
    }
    medians = interleave(ways, rounds)
    for name in ("--help", "--dry-run"):
        report(name, medians[name], medians["click"], by="python -c 'import click'")


def bench_deploy(lab: Lab, rtt_ms: float, *, rounds: int) -> None:
    folder = lab.folder / f"rtt{rtt_ms:g}"
    with Line(rtt_ms) as line, start_sshd(folder, address=line.server_ip, run_by=line.server) as server:
        print(
            f"round trip {rtt_ms:g} ms: a TCP connection takes {line.measured_rtt_ms(server.port):.1f} ms", flush=True
        )
        env = lab.client_env(server)
        ssh = f"ssh -F {server.client_config_path}"
        by_hand = f"rsync -az --delete -e '{ssh}' ./ {ALIAS}:{folder}/by-hand/ && {ssh} {ALIAS} true"
        job = [sys.executable, DEPLOY, "run", "--ssh", ALIAS, "--device", "cpu", "--no-pull", "--", "sh", "-c"]
        ways = {
            "hand": lambda: timed([*line.client, "sh", "-c", by_hand], env=env, cwd=lab.tree),
            "ssh": lambda: timed([*line.client, *ssh.split(), ALIAS, "true"], env=env, cwd=lab.tree),
            "ours": lambda: time_to_first_byte([*line.client, *job, "echo first"], b"first", env=env, cwd=lab.tree),
        }
        medians = interleave(ways, rounds)
    report(f"deploy {rtt_ms:g} ms", medians["ours"], medians["hand"], by="rsync && ssh by hand")
    report(f"  ssh {rtt_ms:g} ms", medians["ssh"], medians["hand"], by="rsync && ssh by hand")


def bench_log(lab: Lab) -> None:
    """A numbered log of 50 MB in one burst, checked byte for byte."""
    program = f"import sys\nfor n in range({LOG_BYTES // 100}): sys.stdout.write('%099d\\n' % n)"
    with start_sshd(lab.folder / "log") as server:
        job = [sys.executable, DEPLOY, "run", "--ssh", ALIAS, "--device", "cpu", "--no-pull", "--", "python3", "-c"]
        output = lab.folder / "log.out"
        begun = time.perf_counter()
        with output.open("wb") as file:
            process = subprocess.Popen([*job, program], env=lab.client_env(server), cwd=lab.tree, stdout=file)
            peak_kib = watch_memory(process)
        seconds = time.perf_counter() - begun
        same = output.read_bytes() == b"".join(b"%099d\n" % number for number in range(LOG_BYTES // 100))
    rate = LOG_BYTES / seconds / 1e6
    print(
        f"log of {LOG_BYTES / 1e6:.0f} MB: {'every byte' if same else 'BYTES DIFFER'}, status {process.returncode}, "
        f"client at most {peak_kib / 1024:.0f} MiB (at most 100), {rate:.0f} MB/s with deploy and start",
        flush=True,
    )


def watch_memory(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process and returns its largest resident memory in KiB."""
    peak_kib = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak_kib = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), peak_kib)
        time.sleep(0.02)
    return peak_kib


if __name__ == "__main__":
    sys.exit(main())
