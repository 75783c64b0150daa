"""What a person waits for at the screen: `--help` against `python -c "import click"`, and `top` after a key.

    .venv/bin/python bench/screen.py [--rounds 9] [--keys 50]

`top` shows a job on this machine with 20,000 steps of metrics and a long log, on a terminal of 160 x 45. A key asks a
question, the next one takes it back. A redraw takes from the key to the last byte that `top` then writes.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import time

from lab import DEPLOY, Lab, interleave, parser_of, report, timed

HELP_LIMIT = 2.0
REDRAW_S = 0.1
QUIET_S = 0.03
"""Seconds without further output after which the screen counts as drawn."""
WRITES = """
import json, os, time
with open(os.environ["TORCHFERRY_RUN_DIR"] + "/metrics.jsonl", "w") as file:
    for step in range(1, 20001):
        file.write(json.dumps({"step": step, "loss": 4 / step, "tokens_per_s_per_gpu": 1000 + step % 7}) + chr(10))
for line in range(5000):
    print("line", line, "x" * 100, flush=line == 4999)
time.sleep(600)
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keys", type=int, default=50)
    chosen = parser.parse_args()
    with Lab.open() as lab:
        ways = {
            "help": lambda: timed([sys.executable, DEPLOY, "--help"], env=lab.env, cwd=lab.folder),
            "click": lambda: timed([sys.executable, "-c", "import click"], env=lab.env, cwd=lab.folder),
        }
        medians = interleave(ways, chosen.rounds)
        report("--help", medians["help"], medians["click"], by="import click", limit=HELP_LIMIT)
        taken = redraws(lab, chosen.keys)
    print(f"top, {len(taken)} keys: {min(taken) * 1000:.0f} to {max(taken) * 1000:.0f} ms")
    report("top, median redraw", statistics.median(taken), REDRAW_S, by="100 ms", limit=1.0)
    report("top, slowest redraw", max(taken), REDRAW_S, by="100 ms", limit=1.0)
    return 0


def redraws(lab: Lab, keys: int) -> list[float]:
    """Seconds from each key to the end of its output."""
    project = lab.folder / "project"
    project.mkdir()
    (project / "writes.py").write_text(WRITES)
    run = [sys.executable, DEPLOY, "run", "--detach", "--python", sys.executable, "--", "python", "writes.py"]
    subprocess.run(run, env=lab.env, cwd=project, check=True, capture_output=True)
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.execve(sys.executable, [sys.executable, DEPLOY, "top"], {**lab.env, "TERM": "xterm-256color"})
    try:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 45, 160, 0, 0))
        shown = b""
        while b"20000" not in shown or b"line 4999" not in shown:
            shown += os.read(fd, 1 << 16)
        taken = []
        for key in (b"s", b"n") * (keys // 2):
            time.sleep(0.2)
            drawn(fd)
            began = time.perf_counter()
            os.write(fd, key)
            taken.append(drawn(fd, wait_s=5.0) - began)
        os.write(fd, b"q")
        drawn(fd, wait_s=5.0)
        return taken
    finally:
        stop = [sys.executable, DEPLOY, "stop", "--all", "--grace", "0"]
        subprocess.run(stop, env=lab.env, cwd=project, capture_output=True)
        os.close(fd)
        os.waitpid(pid, 0)


def drawn(fd: int, wait_s: float = 0.0) -> float:
    """Reads until no more output comes; returns the time of the last bytes."""
    last, within_s = time.perf_counter(), wait_s
    while select.select([fd], [], [], within_s)[0]:
        os.read(fd, 1 << 16)
        last, within_s = time.perf_counter(), QUIET_S
    return last


if __name__ == "__main__":
    sys.exit(main())
