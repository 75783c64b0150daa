"""The peers' side of bench/train.py: one process a GPU runs all settings of a peer, one after another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from train_cases import Contender
from train_processes import MARK_ENV, end_marked, new_mark

SCRIPTS = {"raw": "raw.py", "titan": "titan.py", "hf": "hf.py", "liger": "hf.py", "trl": "hf.py"}
NEEDS = {
    "raw": ("triton",),
    "titan": ("torchtitan",),
    "hf": ("transformers", "accelerate"),
    "liger": ("transformers", "accelerate", "liger_kernel"),
    "trl": ("transformers", "accelerate", "trl", "datasets"),
}
STALL_S = 120
"""Without a line for so long a peer counts as hung."""


def lacking(who: str) -> list[str]:
    """The packages that a peer needs and this Python has not."""
    return [name for name in NEEDS[who] if find_spec(name) is None]


def run_peers(
    contenders: Sequence[Contender], *, warm: int, steps: int, limit_s: float, log: Path, gpu: int = 0
) -> list[dict[str, Any]]:
    """A measured row for each contender, all of one peer and number of GPUs; `failed` says why there is none.

    One that hangs or dies is told so, and a new process goes on with the rest.
    """
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + limit_s
    while len(rows) < len(contenders):
        if time.monotonic() > deadline:
            rows += [{"failed": "no time was left"}] * (len(contenders) - len(rows))
            break
        left = contenders[len(rows) :]
        found = _run(left, warm=warm, steps=steps, limit_s=deadline - time.monotonic(), log=log, gpu=gpu)
        rows += found
        told = bool(found) and "failed" in found[-1]  # the process may have ended with the failure that it told
        if len(found) < len(left) and not told:
            rows.append({"failed": "hung, died or out of time"})
    return rows


def _run(
    contenders: Sequence[Contender], *, warm: int, steps: int, limit_s: float, log: Path, gpu: int
) -> list[dict[str, Any]]:
    """The rows up to the first that hangs or dies."""
    first = contenders[0]
    port, found, mark = _free_port(), [], new_mark()
    last = [time.monotonic()]
    settings = json.dumps([_settings(c, warm, steps) for c in contenders])
    processes = [_start(first, rank, port, settings, log, mark, gpu) for rank in range(first.gpus)]

    def read() -> None:
        for line in processes[0].stdout or ():
            last[0] = time.monotonic()
            with log.open("a") as out:
                out.write(line)
            if line.startswith("RESULT "):
                found.append(json.loads(line.removeprefix("RESULT ")))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        _await_ends(processes, last_line=lambda: last[0], limit_s=limit_s)
    finally:
        end_marked(mark)
        for process in processes:
            process.wait()
    reader.join(timeout=5)
    return found


def _await_ends(processes: Sequence[subprocess.Popen[str]], *, last_line: Callable[[], float], limit_s: float) -> None:
    """Return when all have ended, one has failed, none has said a word for STALL_S, or the time is over."""
    began = time.monotonic()
    while any(process.poll() is None for process in processes):
        time.sleep(0.2)
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed or time.monotonic() - last_line() > STALL_S or time.monotonic() - began > limit_s:
            time.sleep(1)  # for what the others have to say
            return


def _settings(contender: Contender, warm: int, steps: int) -> dict[str, Any]:
    base = {
        "model": contender.model,
        "seq": contender.seq_len,
        "mb": contender.micro_batch,
        "warm": warm,
        "steps": steps,
    }
    by_who: dict[str, dict[str, Any]] = {
        "hf": {"engine": "hf"}, "liger": {"engine": "hf", "liger": True}, "trl": {"engine": "trl"},
    }  # fmt: skip
    alone = {"fsdp": contender.gpus > 1} if contender.who in by_who else {}
    pack = {"pack": "bfd" if contender.packed else "wrapped"} if contender.who == "trl" else {}
    return {**base, **by_who.get(contender.who, {}), **alone, **pack, **contender.options}


def _start(
    contender: Contender, rank: int, port: int, settings: str, log: Path, mark: str, gpu: int
) -> subprocess.Popen[str]:
    script = Path(__file__).resolve().parent / "peers" / SCRIPTS[contender.who]
    environ = {
        **os.environ, MARK_ENV: mark, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(contender.gpus),
        "LOCAL_WORLD_SIZE": str(contender.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpu, gpu + contender.gpus))),
    }  # fmt: skip
    output = subprocess.PIPE if rank == 0 else log.with_suffix(f".{rank}").open("a")
    return subprocess.Popen(
        [sys.executable, str(script), settings], env=environ, stdout=output, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
