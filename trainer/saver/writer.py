"""Writes a run's checkpoints, one at a time: each rank's saver process does it while training continues.

A thread of each rank communicates with its saver process, or writes itself if there is none. All collectives of a save
run in that thread, on a separate group, or among the savers, so that they never mix with those of the training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.errors import CheckpointError, SaverLostError, write_error
from trainer.checkpoint.retention import Keep
from trainer.checkpoint.shards import sharded_state
from trainer.checkpoint.states import State, local_bytes, random_state
from trainer.checkpoint.write import Order, StageHook, ignore_stage, write
from trainer.dist import Dist, control_timeout_s, gather, new_control_group
from trainer.saver.copy_memory import expected_bytes, why_no_room
from trainer.saver.messages import Outcome, Setup, rendezvous_at
from trainer.saver.process import Launch, SaverProcess, launch_saver
from trainer.saver.region import why_no_shared_memory
from trainer.saver.staging import Staging

ASK_AGAIN_S = 0.5
"""Seconds between two checks for a lost saver, while a save waits for savers to start up."""
_numbers = count()


@dataclass(frozen=True)
class AsyncSave:
    """Settings for saves in parallel with the training; other values are for tests."""

    launch: Launch = launch_saver
    wait_from_bytes: int = 64 * 2**20
    """If a save begins before the savers are up and a rank's state has at least this size, it waits for them (seconds).
    The trainer itself writes a smaller state sooner."""
    available: int | None = None
    """Bytes of host memory available for the copies; None: as the host reports."""


@dataclass(frozen=True)
class Written:
    path: Path
    seconds: float
    """From the copy to the deletion of the last old file."""
    blocked_s: float = 0.0
    """Seconds for which the training stopped."""
    note: str = ""
    """Problems that did not make the save fail; on rank 0."""


@dataclass(frozen=True)
class _Vote:
    """One rank's information before a save."""

    lost: str
    is_ready: bool
    is_small: bool


class Writer:
    """`start` begins a save; `result` returns its outcome. A single process needs no process group.

    Without `beside` every save is synchronous. `on_stage` is called at the stages of every save.
    """

    def __init__(self, dist: Dist, *, beside: AsyncSave | None, on_stage: StageHook = ignore_stage) -> None:
        self._dist = dist
        self._group = new_control_group(dist)
        self._on_stage = on_stage
        self._beside = beside
        # one of the threads waits for the saver to start up; a small save does not wait for it
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="checkpoint", initializer=_on_device(dist.device))
        self._staging = Staging(dist.device)
        self._saver: SaverProcess | None = None
        self._ready: Future[str] | None = None
        self._hook: Any = None
        self._to_reserve = 0
        self._failed = ""
        self._saving: Future[Written] | None = None
        self._blocked_s = 0.0
        self._note = ""
        self.saving_step: int | None = None
        """The step of the save whose `result` has not been called yet."""

    @property
    def is_beside(self) -> bool:
        """Whether saves run in parallel with the training; False once a saver was lost.

        The same on all ranks only while no save is in progress: a rank's save thread can set it to False.
        """
        return self._beside is not None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Begin to start the saver and to allocate its memory. Returns None, or why saves will be synchronous.

        Call it as early as possible, in the main thread and on every rank. All ranks get the same result: the reason
        of the first rank that has one.
        """
        if self._beside is None or self._ready is not None:
            return None
        needed = expected_bytes(model, optimizer)
        setup = self._setup()
        reasons = gather(self._why_not(needed, setup), self._group)
        reason = next((reason for reason in reasons if reason), None)
        if reason:
            self._beside = None
            return reason
        self._launch(setup)
        self._hook = optimizer.register_step_pre_hook(self._staging.when_settled)
        self._ready = self._threads.submit(self._make_ready, needed)
        self._to_reserve = needed
        return None

    def is_ready(self) -> bool:
        """Whether saver and memory are ready, or will not be used: `start` then waits only for an earlier save."""
        return self._beside is None or (self._ready is not None and self._ready.done())

    def reserve(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Allocate in advance, inside `around`, the GPU memory for a copy. Call it between two steps; it waits for no
        other rank. Returns whether it was done now: only once, when saves can run in parallel with the training, and
        never if this rank's saver was lost before it was up."""
        if self._to_reserve == 0 or self._beside is None or self._ready is None:
            return False
        if not self._ready.done() or self._ready.result():
            return False
        size, self._to_reserve = self._to_reserve, 0
        with around():
            self._staging.reserve(size)
        return True

    def start(
        self,
        folder: Path,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        info: dict[str, Any],
        *,
        keep: Keep,
    ) -> None:
        """Begin to save. Every rank must call this between the same two steps; later steps do not change the save.

        On CUDA, until a save in parallel with the training has ended, only the optimizer's step may change the state.
        `result` must have been called for an earlier save. `info` is plain JSON, the same on all ranks.
        """
        began = time.perf_counter()
        self._note = self.prepare(model, optimizer) or ""
        dist = self._dist
        own = json.loads(json.dumps(info))
        order = Order(folder, step, dist.rank, dist.world_size, random_state(), own, keep, dist.storages)
        state = sharded_state(model, optimizer)
        if self._is_async(local_bytes(state)):
            packed, wait = self._staging.copy(state)
            self._on_stage("staged")
            self._saving = self._threads.submit(self._have_written, order, packed, wait)
        else:
            self._on_stage("staged")
            self._saving = self._threads.submit(self._write, order, state)
            self._saving.exception()  # waits; the outcome stays for `result`
        self.saving_step = step
        self._blocked_s = time.perf_counter() - began

    def has_ended(self) -> bool:
        """Whether a save has ended and `result` was not called yet; other ranks may see its end later."""
        return self._saving is not None and self._saving.done()

    def was_lost(self) -> bool:
        """Wait for the last save. Whether it was lost with a saver: the same save would now be synchronous."""
        return self._saving is not None and isinstance(self._saving.exception(), SaverLostError)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the save in progress. Whether none is in progress any more."""
        return self._saving is None or bool(wait_for([self._saving], seconds).done)

    def result(self) -> Written | None:
        """Wait for the last save and return its outcome; None if it was returned before, or without a save.

        If the save failed, raises CheckpointError on every rank; SaverLostError if the next save may succeed.
        """
        saving, self._saving, self.saving_step = self._saving, None, None
        if saving is None:
            return None
        written = saving.result()
        note = "; ".join(part for part in (written.note, self._note) if part)
        return replace(written, blocked_s=self._blocked_s, note=note)

    def close(self) -> None:
        """Wait for a save in progress, end the saver, and free the memory."""
        if self._saving is not None:
            self._saving.exception()
        self._give_up()
        self._threads.shutdown(wait=True)

    # --- in the main thread, while no save is in progress ---

    def _setup(self) -> Setup:
        dist = self._dist
        name = f"savers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
        rendezvous = rendezvous_at(dist.store, name)
        return Setup(dist.rank, dist.world_size, rendezvous, control_timeout_s())

    def _why_not(self, needed: int, setup: Setup) -> str | None:
        if setup.world_size > 1 and setup.rendezvous is None:
            return f"savers cannot meet in a {type(self._dist.store).__name__}"
        assert self._beside is not None
        return why_no_shared_memory() or why_no_room(needed, available=self._beside.available)

    def _launch(self, setup: Setup) -> None:
        assert self._beside is not None
        try:
            self._saver = SaverProcess(self._beside.launch(), setup)
        except OSError as error:
            self._failed = f"could not be started: {error}"

    def _is_async(self, size: int) -> bool:
        """Whether this save runs in parallel with the training; the same on all ranks."""
        if self._beside is None or self._ready is None:
            return False
        while True:
            votes = gather(self._vote(size), self._group)
            lost = first_lost([vote.lost for vote in votes])
            if lost or all(vote.is_ready or vote.is_small for vote in votes):
                break
            wait_for([self._ready], timeout=ASK_AGAIN_S)
        if lost:
            self._note = f"{lost}: saves stop the training from now on"
            self._give_up()
        return not lost and all(vote.is_ready for vote in votes)

    def _vote(self, size: int) -> _Vote:
        assert self._beside is not None and self._ready is not None
        is_ready, lost = self._ready.done(), ""
        if is_ready:
            lost = self._ready.result()
            if not lost and self._saver is not None and self._saver.is_gone():
                lost = self._saver.end()
        return _Vote(lost, is_ready, size < self._beside.wait_from_bytes)

    def _give_up(self) -> None:
        """End the saver, which may not be up yet, and free the memory, which may not be allocated yet."""
        saver, self._saver, self._beside = self._saver, None, None
        self._staging.cancel()
        if saver is not None:
            saver.kill()
        if self._ready is not None:
            self._ready.exception()  # the thread that waits for the saver ends, because the saver is gone
        if saver is not None:
            saver.end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._staging.close()

    # --- in a separate thread ---

    def _make_ready(self, size: int) -> str:
        """Wait until the saver is up. Returns how it was lost before; empty if it is up."""
        saver = self._saver
        if saver is None:
            return self._failed
        try:
            self._staging.allocate(size)
        except OSError as error:
            return f"has no memory: {error}"
        return saver.wait_until_up()

    def _have_written(self, order: Order, packed: State, wait: Callable[[], None]) -> Written:
        """Have the savers write. The outcome is the same on all ranks."""
        began = time.perf_counter()
        wait()
        assert self._saver is not None
        mine = self._saver.save(order, packed, self._staging.region, self._on_stage)
        outcomes: list[Outcome] = gather(mine, self._group)
        lost = first_lost([outcome.lost for outcome in outcomes])
        if lost:
            self._give_up()
            gather(None, self._group)  # after this no saver is alive
            raise SaverLostError(f"{write_error(order.final, lost)}; saves stop the training from now on")
        if mine.error:
            raise CheckpointError(mine.error)
        return Written(order.final, time.perf_counter() - began, note=mine.note)

    def _write(self, order: Order, state: State) -> Written:
        began = time.perf_counter()
        note = write(order, state, self._group, self._on_stage)
        return Written(order.final, time.perf_counter() - began, note=note)


def first_lost(losses: list[str]) -> str:
    """The message about lost savers; empty if none is lost. A saver ended by a signal comes first: it explains the
    broken connections of the others."""
    told = [(rank, loss) for rank, loss in enumerate(losses) if loss]
    if not told:
        return ""
    rank, loss = min(told, key=lambda one: "signal" not in one[1])
    return f"the saver process of rank {rank} {loss}"


def _on_device(device: torch.device) -> Callable[[], None]:
    """A thread initializer that sets this device: a new thread's current device is the first GPU."""
    return (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
