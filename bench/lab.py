"""The common parts of the benchmarks: a project, a client's home, a server over a line, and timing and judging."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from delay_tun import Line  # noqa: E402

from tests.support.sshd import ALIAS, SshServer, start_sshd  # noqa: E402

DEPLOY = str(HERE.parent / "deploy.py")


@dataclass(frozen=True)
class Lab:
    """A temporary folder with an empty home for the client."""

    folder: Path
    env: dict[str, str]

    @staticmethod
    @contextmanager
    def open() -> Iterator[Lab]:
        with tempfile.TemporaryDirectory(prefix="tf-bench-") as name:
            folder = Path(name)
            (folder / "home").mkdir()
            env = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "PYTHON"))}
            env.pop("TORCHFERRY_STATE_DIR", None)
            # compiled modules are kept, as on a user's machine, but not in this checkout
            yield Lab(folder, {**env, "HOME": str(folder / "home"), "PYTHONPYCACHEPREFIX": str(folder / "pycache")})

    def client_env(self, server: SshServer) -> dict[str, str]:
        return {**self.env, "TORCHFERRY_SSH_CONFIG": str(server.client_config_path)}

    def project(self, name: str, *, files: int = 1000, size_bytes: int = 22_000_000) -> Path:
        """A folder of files, 13 each, half of the bytes random and half text, the same every time."""
        tree, source, size = self.folder / name, random.Random(0), size_bytes // files
        for number in range(files):
            path = tree / f"folder{number % (files // 13 + 1):04d}" / f"file{number:05d}.dat"
            path.parent.mkdir(parents=True, exist_ok=True)
            words = f"words and more words {number}\n".encode()
            path.write_bytes(source.randbytes(size) if number % 2 else words * (size // len(words)))
        return tree

    @contextmanager
    def host(self, rtt_ms: float, name: str = "host") -> Iterator[tuple[Line, SshServer]]:
        """A server at the other end of a line with this round-trip time."""
        folder = self.folder / f"{name}-{rtt_ms:g}"
        with Line(rtt_ms) as line, start_sshd(folder, address=line.server_ip, run_by=line.server) as server:
            took = line.measured_rtt_ms(server.port)
            print(f"round trip {rtt_ms:g} ms: a TCP connection takes {took:.1f} ms", flush=True)
            yield line, server


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def require(*programs: str, namespaces: bool = False) -> None:
    """Ends the benchmark with a sentence if a program is missing, or root for network namespaces."""
    absent = [name for name in programs if shutil.which(name) is None]
    if namespaces and os.getuid() != 0:
        absent.append("root, to make network namespaces")
    if absent:
        sys.exit(f"{Path(sys.argv[0]).name} needs {', '.join(absent)}")


# --- measuring --------------------------------------------------------------------------------------------------------


def timed(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> float:
    """Seconds from start to end. Raises RuntimeError with stderr if the command fails."""
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


def interleave(ways: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1) -> dict[str, float]:
    """The median seconds of each way. The ways run in turn, after warm-up rounds that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + warm_up):
        for name, run in ways.items():
            seconds = run()
            if number >= warm_up:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def peak_memory_mib(process: subprocess.Popen[bytes]) -> float:
    """Waits for the end of a process and returns its largest resident memory."""
    peak_kib = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak_kib = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), peak_kib)
        time.sleep(0.02)
    return peak_kib / 1024


def report(name: str, ours: float, theirs: float, *, by: str, limit: float | None = None) -> None:
    """Prints one line: the ratio of two times, both in milliseconds, and whether it is within its limit."""
    print(f"{name:22} {ours / theirs:6.2f} x {by}  [{ours * 1000:,.0f} / {theirs * 1000:,.0f} ms]", end="")
    print(judged(ours / theirs, limit), flush=True)


def judged(value: float, limit: float | None) -> str:
    return "" if limit is None else f"  (at most {limit:g}: {'ok' if value <= limit else 'MISSED'})"


__all__ = [
    "ALIAS", "DEPLOY", "HERE", "Lab", "Line", "SshServer", "interleave", "judged", "parser_of", "peak_memory_mib",
    "report", "require", "start_sshd", "time_to_first_byte", "timed",
]  # fmt: skip
