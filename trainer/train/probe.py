"""One forward and backward pass over the largest micro-batch before the first step. It detects a failing compiler and a
plan that does not fit before any work can be lost. Gradients are deleted; weights, random states and data stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trainer.config.load import config_to_dict
from trainer.config.parallel import recompute_mode
from trainer.data.batches.steps import micro_batches
from trainer.dist import Dist, DistError, gather
from trainer.kernels.support import give_up_triton, why_no_triton
from trainer.memory.fitting import MemoryKeeper, free_bytes
from trainer.parallel.blocks import is_compile_failure
from trainer.schema import Config
from trainer.train.run import Run
from trainer.words import GIB, first_line


def probe(run: Run, memory: MemoryKeeper) -> None:
    """Try the largest micro-batch on the GPUs; if a plan fails, try the next. Every rank must call this.

    If one of several ranks is out of memory, it raises, because the others wait for it inside a collective; the next
    start then uses the next plan. On the CPU nothing is tried.
    """
    if run.dist.device.type != "cuda":
        return
    run.dist.startup.enter("probe")
    while not _fits(run, memory):
        pass
    torch.cuda.empty_cache()  # later allocations may use other pools and other sizes


def _fits(run: Run, memory: MemoryKeeper) -> bool:
    """Whether the run may begin with the current plan; False: the plan was changed and must be tried."""
    torch.cuda.reset_peak_memory_stats()
    outcome = try_pass(run)
    if outcome is None:
        return _leaves_room(run, memory) or not take_next_plan(run, memory)
    if isinstance(outcome, str):
        if why_no_triton(run.dist.device) is not None:  # it is not in use any more
            raise DistError(f"the compiler fails, though nothing is compiled any more: {outcome}")
        run_without_compiler(run, memory, outcome)
    elif run.dist.world_size > 1 or not take_next_plan(run, memory):
        raise outcome
    return False


def try_pass(run: Run) -> str | torch.OutOfMemoryError | None:
    """Run a pass. Returns why it failed: the first line of a compiler's failure on any rank, or the out-of-memory error
    of this GPU, which other ranks do not get. None: it succeeded on all ranks."""
    reason = None
    try:
        probe_pass(run)
    except torch.OutOfMemoryError as error:
        return error
    except Exception as error:
        if not is_compile_failure(error):
            raise
        reason = f"rank {run.dist.rank}: {first_line(error)}"
    reasons = [told for told in gather(reason, run.dist.control_group) if told is not None]
    return reasons[0] if reasons else None


def _leaves_room(run: Run, memory: MemoryKeeper) -> bool:
    """Whether the pass's peak and the memory that the first step adds fit on every rank. Logs a line about it."""
    device = run.dist.device
    later = 0 if run.optimizer.state else run.backend.plan.optimizer_bytes
    needs = torch.cuda.max_memory_allocated(device) + later
    room = free_bytes(device) + torch.cuda.memory_allocated(device)
    fullest = max(gather((needs - room, needs, room), run.dist.control_group))
    run.log.note(render_probe(needs=fullest[1], room=fullest[2], later=later))
    return fullest[0] <= 0


def render_probe(*, needs: int, room: int, later: int) -> str:
    """`probe: peak 58.1 GiB of 79.1, 12.0 of them the optimizer's state, which the first step makes`."""
    text = f"probe: peak {needs / GIB:.1f} GiB of {room / GIB:.1f}"
    return text + (f", {later / GIB:.1f} of them the optimizer's state, which the first step makes" if later else "")


# --- the pass ---------------------------------------------------------------------------------------------------------


def probe_pass(run: Run) -> None:
    """Forward and backward of the largest micro-batch; twice if a step has several micro-batches."""
    batch = run.largest_batch(run.config).to(run.dist.device)
    several = micro_batches(run.config, run.dist.world_size) > 1
    run.module.train()
    with _same_random_numbers(run.dist), _no_gradients_left(run):
        for last in (False, True) if several else (True,):
            run.backend.sync(last)
            run.loss_fn(run.module, batch).total.backward()


@contextmanager
def _same_random_numbers(dist: Dist) -> Iterator[None]:
    with torch.random.fork_rng([dist.device] if dist.device.type == "cuda" else []):
        yield


@contextmanager
def _no_gradients_left(run: Run) -> Iterator[None]:
    """At the end deletes all gradients; after an exception also leaves no block gathered."""
    try:
        yield
    except Exception:
        run.backend.forget_failed_pass()
        raise
    finally:
        run.optimizer.zero_grad(set_to_none=True)


# --- another way ------------------------------------------------------------------------------------------------------


def run_without_compiler(run: Run, memory: MemoryKeeper, reason: str) -> None:
    """Continue without the compiler, on all ranks, with a plan that fits then. Logs a warning."""
    given = replace(memory.given.parallel, compile=False)
    if recompute_mode(given) == "budget":
        given = replace(given, activation_checkpointing="selective")
    run.log.note(f"warning: blocks cannot be compiled and run as plain torch, which is slower: {reason}")
    give_up_triton("the compiler has failed")
    _adopt(run, memory.choose_again(replace(memory.given, parallel=given)))
    run.graphed = None
    for line in memory.fit.lines:
        run.log.note(line)


def take_next_plan(run: Run, memory: MemoryKeeper) -> bool:
    """Change to the next plan within this process; False if there is none, or if it stores the model elsewhere."""
    following = memory.take_next()
    if following is None:
        return False
    _adopt(run, following)
    for line in memory.fit.lines:
        run.log.note(line)
    return True


def _adopt(run: Run, config: Config) -> None:
    run.config = config
    run.extra = {**run.extra, "config": config_to_dict(config)}
    run.backend.rearrange(config)
    gc.collect()
    if run.dist.device.type == "cuda":
        torch.cuda.empty_cache()
