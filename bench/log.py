"""A job's log on its way to the screen: nothing lost at 50 MB/s, how late a line is, and what a large log costs here.

    sudo .venv/bin/python bench/log.py [--only rate,latency,memory] [--seconds 6] [--large-mb 1000]

* rate: a job prints 50 MB of numbered lines a second while we follow: every byte must arrive in its place.
* latency: a job prints the time 20 times a second; from there to our stdout, over 0 and 100 ms of round trip, at most
  half a round trip and 150 ms for 99 of 100 lines.
* memory: the client's largest resident memory while a log of 1 GB goes through it, at most 100 MB.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lab import ALIAS, DEPLOY, Lab, judged, parser_of, peak_memory_mib, require, start_sshd

RATE_MB_S = 50
LATENCY_LIMIT_S = 0.150
MEMORY_LIMIT_MIB = 100e6 / 2**20
LINES = 400

# prints blocks of numbered 100-byte lines, `rate` MB a second (0: at full speed)
WRITER = """
import sys, time
total, rate, block = int(sys.argv[1]), float(sys.argv[2]), 5000
begun, out = time.monotonic(), sys.stdout.buffer
for first in range(0, total // 100, block):
    out.write(b"".join(b"%099d\\n" % n for n in range(first, min(first + block, total // 100))))
    out.flush()
    if rate:
        time.sleep(max(0, (first + block) * 100 / rate / 1e6 - (time.monotonic() - begun)))
"""
CLOCK = """
import sys, time
for _ in range(int(sys.argv[1])):
    print(time.time(), flush=True)
    time.sleep(0.05)
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="rate,latency,memory")
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--large-mb", type=int, default=1000)
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 100], metavar="MS")
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    require("ssh", "ip", namespaces="latency" in parts)
    with Lab.open() as lab:
        (lab.folder / "project").mkdir()
        if "rate" in parts:
            bench_stream(lab, "rate", RATE_MB_S * chosen.seconds * 10**6, rate_mb_s=RATE_MB_S)
        if "memory" in parts:
            bench_stream(lab, "memory", chosen.large_mb * 10**6, rate_mb_s=0)
        for rtt_ms in chosen.rtt if "latency" in parts else ():
            bench_latency(lab, rtt_ms)
    return 0


def job(program: str, *arguments: object) -> list[str]:
    options = ["--ssh", ALIAS, "--device", "cpu", "--no-pull", "--log-max", "0"]
    return [sys.executable, DEPLOY, "run", *options, "--", "python3", "-c", program, *map(str, arguments)]


def bench_stream(lab: Lab, name: str, size_bytes: int, *, rate_mb_s: float) -> None:
    """Follows a numbered log that is written at a rate, and compares it byte by byte with the expected log."""
    output = lab.folder / "log.out"
    with start_sshd(lab.folder / f"log-{name}") as server, output.open("wb") as file:
        argv, env = job(WRITER, size_bytes, rate_mb_s), lab.client_env(server)
        begun = time.perf_counter()
        process = subprocess.Popen(argv, env=env, cwd=lab.folder / "project", stdout=file, stderr=subprocess.DEVNULL)
        memory_mib = peak_memory_mib(process)
        seconds = time.perf_counter() - begun
    wrong = first_difference(output, size_bytes)
    print(
        f"log of {size_bytes / 1e6:,.0f} MB: {'every byte' if wrong is None else f'DIFFERS at byte {wrong:,}'}, "
        f"status {process.returncode}, {size_bytes / seconds / 1e6:.0f} MB/s with deploy and start, "
        f"client at most {memory_mib:.0f} MiB{judged(memory_mib, round(MEMORY_LIMIT_MIB, 1))}",
        flush=True,
    )
    output.unlink()


def first_difference(path: Path, size_bytes: int) -> int | None:
    """The offset at which a file of numbered lines differs from the printed lines; None if it does not."""
    with path.open("rb") as f:
        for first in range(0, size_bytes // 100, 10_000):
            expected = b"".join(b"%099d\n" % n for n in range(first, min(first + 10_000, size_bytes // 100)))
            found = f.read(len(expected))
            if found != expected:
                pairs = zip(found, expected, strict=False)
                return first * 100 + next((at for at, (a, b) in enumerate(pairs) if a != b), len(found))
        return None if not f.read(1) else size_bytes


def bench_latency(lab: Lab, rtt_ms: float) -> None:
    with lab.host(rtt_ms, "latency") as (line, server):
        argv, env = [*line.client, *job(CLOCK, LINES)], lab.client_env(server)
        process = subprocess.Popen(
            argv, env=env, cwd=lab.folder / "project", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        late = sorted(lateness(process.stdout.fileno()))
        process.wait()
    p50, p99 = statistics.median(late), late[int(0.99 * len(late))]
    limit_ms = rtt_ms / 2 + LATENCY_LIMIT_S * 1000
    print(
        f"line to screen at {rtt_ms:g} ms: {len(late)} of {LINES} lines, p50 {p50 * 1000:.0f} ms, "
        f"p99 {p99 * 1000:.0f} ms{judged(p99 * 1000, limit_ms)}",
        flush=True,
    )


def lateness(descriptor: int) -> list[float]:
    """Seconds between each printed time and its arrival here; both sides share this machine's clock."""
    held, late = b"", []
    while data := os.read(descriptor, 1 << 16):
        now = time.time()
        *lines, held = (held + data).split(b"\n")
        late += [now - float(line) for line in lines]
    return late


if __name__ == "__main__":
    sys.exit(main())
