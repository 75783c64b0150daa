"""Several gloo ranks for a test: `run_ranks(fn, world_size, *args)` gives what `fn(dist, *args)` returned on each rank.

The ranks are forked from one server process that has imported torch, so that a start costs a fraction of a second, and
from a process that has never run autograd, which may not be forked after its first backward pass. Saver
processes are forked there too: `forked_saver` gives one where a rank would start a new interpreter.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from tests.support.limits import HANG_S
from trainer.dist import Dist
from trainer.saver.main import serve
from trainer.saver.process import Launched
from trainer.saver.writer import AsyncSave

_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
_PRELOAD = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.quantizers.auto",  # which imports torchao, where it is installed
    "trainer.models.build",
    "trainer.saver.serve",
]
_savers: list[Launched] = []  # of a rank: the one that was forked with it


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = HANG_S,
    grace_s: float = 5,
    savers: bool = False,
    nodes: Sequence[int] = (),
) -> list[Any]:
    """What `fn(dist, *args)` returned on each rank, in rank order.

    `fn` must be a function of a module's top level; arguments and results go through torch.save. The first failure of
    any rank ends them all, `grace_s` later, and is raised here with that rank's traceback. With `savers` each rank may
    call `forked_saver`, once. `nodes`: the number of ranks on each of several nodes, as torchrun would tell them.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        packed = _pack(args)
        readers, processes, beside = [], [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            saver = None
            if savers:
                saver, process = _fork_saver(context)
                beside.append(process)
            process = context.Process(
                target=_rank_main,
                args=(writer, store, rank, world_size, fn, packed, saver, beside[-1].pid if savers else 0, nodes),
                daemon=True,
            )
            process.start()
            writer.close()
            if saver is not None:
                saver.close()
            readers.append(reader)
            processes.append(process)
        try:
            return _collect(readers, timeout_s)
        finally:
            _end(processes, grace_s)
            _end(beside, grace_s)


def forked_saver() -> Launched:
    """A saver process that had imported torch before it was forked; instead of `launch_saver`."""
    if _savers:
        return _savers.pop()
    connection, process = _fork_saver(_context())

    def end() -> str:
        process.kill()
        process.join()
        return f"was ended by signal {-(process.exitcode or 0)}"

    return Launched(connection, process.pid or 0, end)


FORKED = AsyncSave(launch=forked_saver, wait_from_bytes=0)
"""Savers that were forked, and waited for though the state is small."""


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours = [name for name in _ENV if name not in os.environ]
    os.environ.update({name: _ENV[name] for name in ours})
    try:
        forkserver.ensure_running()  # the ranks have its environment; the tests that come after must not
    finally:
        for name in ours:
            del os.environ[name]
    return context


def _fork_saver(context: Any) -> tuple[Connection, BaseProcess]:
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _kill(pid: int) -> str:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return "was ended"


def _rank_main(
    writer: Connection,
    store: str,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    packed: bytes,
    saver: Connection | None,
    saver_pid: int,
    nodes: Sequence[int],
) -> None:
    if saver is not None:
        _savers.append(Launched(saver, saver_pid, lambda: _kill(saver_pid)))
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    os.environ.update(_place(rank, nodes))
    torch.set_num_threads(1)
    from trainer.dist import start_dist, stop_dist

    try:
        dist = start_dist("cpu", init_method=store)
        writer.send((True, _pack(fn(dist, *_unpack(packed)))))
        stop_dist()
    except BaseException:
        writer.send((False, traceback.format_exc()))


def _place(rank: int, nodes: Sequence[int]) -> dict[str, str]:
    """torchrun's variables about a rank's node, if there are several."""
    for node, count in enumerate(nodes):
        if rank < count:
            place = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node, "GROUP_WORLD_SIZE": len(nodes)}
            return {name: str(value) for name, value in place.items()}
        rank -= count
    return {}


def _collect(readers: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        open_ranks = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_ranks.values())} gave no result within {timeout_s} s")
        for reader in ready:
            rank = open_ranks[reader]
            results[rank] = _receive(reader, rank)
    return [results[rank] for rank in range(len(readers))]


def _receive(reader: Connection, rank: int) -> Any:
    try:
        succeeded, value = reader.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without a result") from None
    if not succeeded:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return _unpack(value)


def _end(processes: list[BaseProcess], grace_s: float) -> None:
    """Give the ranks a moment to leave their process group, then kill what remains."""
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def barrier(dist: Dist) -> None:
    """Wait until every rank is here (on the CPU; does not wait for the GPU)."""
    if dist.control_group is not None:
        torch_dist.barrier(group=dist.control_group)
