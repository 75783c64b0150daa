"""The peers' side of bench/train.py: one process per GPU runs all settings of a peer, one after another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from train_cases import Contender
from train_processes import MARK_ENV, end_marked, new_mark

PEERS = Path(__file__).resolve().parent / "peers"
SCRIPTS = {"raw": "raw.py", "titan": "titan.py", "hf": "hf.py", "liger": "hf.py", "trl": "hf.py"}
NEEDS = {
    "raw": ("triton",),
    "titan": ("torchtitan",),
    "hf": ("transformers", "accelerate"),
    "liger": ("transformers", "accelerate", "liger_kernel"),
    "trl": ("transformers", "accelerate", "trl", "datasets", "peft"),
}
STALL_S = 120
"""Seconds without output after which a peer counts as hung."""
LEAST_S = 15
"""Seconds; with less time left, nothing is started."""

Measured = dict[str, Any]


def lacking(who: str) -> list[str]:
    """The packages that a peer needs and that this Python does not have."""
    return [name for name in NEEDS[who] if find_spec(name) is None]


def run_peers(
    contenders: Sequence[Contender], *, warm: int, steps: int, limit_s: float, log: Path, gpu: int = 0
) -> Iterator[Measured]:
    """Each contender's result as soon as it is measured, or why it failed. All have the same peer and number of GPUs.

    If one hangs or dies, it is reported as failed, and a new process continues with the rest.
    """
    deadline, done = time.monotonic() + limit_s, 0
    while done < len(contenders):
        left_s, last = deadline - time.monotonic(), None
        if left_s < LEAST_S:
            yield {"failed": "no time was left"}
            done += 1
            continue
        for last in _run(contenders[done:], warm=warm, steps=steps, limit_s=left_s, log=log, gpu=gpu):
            yield last
            done += 1
        told = last is not None and "failed" in last  # the process may have ended after the failure that it reported
        if done < len(contenders) and not told:
            yield {"failed": "hung, died or out of time"}
            done += 1


def _run(
    contenders: Sequence[Contender], *, warm: int, steps: int, limit_s: float, log: Path, gpu: int
) -> Iterator[Measured]:
    """The results up to the first contender that hangs or dies."""
    mark, settings = new_mark(), json.dumps([build_settings(c, warm, steps) for c in contenders])
    processes = _start(contenders[0], settings, log, mark, gpu)
    output = _Output(processes[0], log)
    try:
        yield from _results(output, lambda: _goes_on(processes, output, limit_s))
    finally:
        end_marked(mark)
        for process in processes:
            process.wait()
    output.close()
    yield from output.take()


class _Output:
    """Copies rank 0's output into a log, and collects the results in it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._results: list[Measured] = []
        self.began_s = self.last_line_s = time.monotonic()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._log.open("a") as out:
            for line in self._process.stdout or ():
                self.last_line_s = time.monotonic()
                out.write(line)
                out.flush()
                if line.startswith("RESULT "):
                    self._results.append(json.loads(line.removeprefix("RESULT ")))

    def take(self) -> Iterator[Measured]:
        while self._results:
            yield self._results.pop(0)

    def close(self) -> None:
        self._thread.join(timeout=5)


def _results(output: _Output, goes_on: Callable[[], bool]) -> Iterator[Measured]:
    while goes_on():
        time.sleep(0.2)
        yield from output.take()


def _goes_on(processes: Sequence[subprocess.Popen[str]], output: _Output, limit_s: float) -> bool:
    """Whether some processes still run, none has failed, and rank 0 was not silent or running for too long."""
    codes, now = [process.poll() for process in processes], time.monotonic()
    if any(codes):  # None and 0 are no failures
        time.sleep(1)  # for the last output of the others
        return False
    return None in codes and now - output.last_line_s < STALL_S and now - output.began_s < limit_s


def build_settings(contender: Contender, warm: int, steps: int) -> dict[str, Any]:
    """A contender's settings, in the form that its script takes."""
    made: dict[str, Any] = {
        "model": contender.model,
        "seq": contender.seq_len,
        "mb": contender.micro_batch,
        "warm": warm,
        "steps": steps,
    }
    if contender.who in ("hf", "liger", "trl"):
        made["engine"] = "trl" if contender.who == "trl" else "hf"
        made["liger"] = contender.who == "liger"
        made["fsdp"] = contender.gpus > 1
        made["pack"] = "bfd" if contender.packed else "wrapped"
    return {**made, **contender.options}


def _start(contender: Contender, settings: str, log: Path, mark: str, gpu: int) -> list[subprocess.Popen[str]]:
    """Starts a process per GPU. Rank 0 prints into a pipe, each other rank into a separate log."""
    gpus, started = contender.gpus, []
    environ = {
        **os.environ, MARK_ENV: mark, "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpu, gpu + gpus))),
    }  # fmt: skip
    command = [sys.executable, str(PEERS / SCRIPTS[contender.who]), settings]
    for rank in range(gpus):
        own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = subprocess.PIPE if rank == 0 else log.with_suffix(f".{rank}").open("a")
        started.append(
            subprocess.Popen(
                command, env=own, stdout=output, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True,
            )
        )  # fmt: skip
    return started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
