"""Writes the checkpoints of a run, one at a time: a process beside each rank does it while training goes on.

A thread of each rank talks with its saver process, and writes by itself where there is none. All collectives of a save
run in that thread, on a separate group, or among the savers, so that they never meet those of the training.
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
"""While a save waits for savers to come up, the ranks ask so often whether one of them was lost meanwhile."""
_numbers = count()


@dataclass(frozen=True)
class AsyncSave:
    """How saves beside the training are made; other values are for tests."""

    launch: Launch = launch_saver
    wait_from_bytes: int = 64 * 2**20
    """A save that comes before the savers are up waits for them (seconds) when a rank's state is at least so large. A
    smaller one is sooner written by the trainer itself."""
    available: int | None = None
    """Bytes of host memory that the copies may count on; None: what the host says."""


@dataclass(frozen=True)
class Written:
    path: Path
    seconds: float
    """From the copy to the last file deleted."""
    blocked_s: float = 0.0
    """How long the training stood still for it."""
    note: str = ""
    """What did not go well beside it; on rank 0."""


@dataclass(frozen=True)
class _Vote:
    """What one rank knows before a save."""

    lost: str
    is_ready: bool
    is_small: bool


class Writer:
    """`start` begins a save; `result` gives its outcome. One process needs no process group.

    Without `beside` every save is waited for. `on_stage` hears of the points of every save.
    """

    def __init__(self, dist: Dist, *, beside: AsyncSave | None, on_stage: StageHook = ignore_stage) -> None:
        self._dist = dist
        self._group = new_control_group(dist)
        self._on_stage = on_stage
        self._beside = beside
        # a second thread waits for the saver to come up, which a small save does not
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
        """The step of the save whose outcome has not been asked for."""

    @property
    def is_beside(self) -> bool:
        """Whether saves are made beside the training; no longer once a saver was lost.

        The same on all ranks only when no save is under way: a rank's thread ends this.
        """
        return self._beside is not None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Begin to start the saver and to make its memory; or why saves will be synchronous.

        As early as possible, in the main thread. Every rank calls this, and gets the same answer: the first rank's
        that cannot.
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
        """Whether saver and memory are there, or none will be: `start` then waits for nothing but an earlier save."""
        return self._beside is None or (self._ready is not None and self._ready.done())

    def reserve(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Take beforehand, `around` it, what memory of the GPU a copy is made in; between two steps, no other rank is
        waited for. Whether it was done now: once, when saves can be beside the training, and never where this rank's
        saver was lost before it was up."""
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
        """Begin to save; every rank calls this at the same step border, and no later step changes it.

        On CUDA nothing but the optimizer's step may change the state before a save that is beside the training has
        ended. The outcome of an earlier save must have been asked for. `info` is plain JSON, the same on all ranks.
        """
        began = time.perf_counter()
        self._note = self.prepare(model, optimizer) or ""
        dist = self._dist
        order = Order(folder, step, dist.rank, dist.world_size, random_state(), json.loads(json.dumps(info)), keep)
        state = sharded_state(model, optimizer)
        if self._is_async(local_bytes(state)):
            packed, wait = self._staging.copy(state)
            self._on_stage("staged")
            self._saving = self._threads.submit(self._have_written, order, packed, wait)
        else:
            self._on_stage("staged")
            self._saving = self._threads.submit(self._write, order, state)
            self._saving.exception()  # waits, and leaves it to be asked for
        self.saving_step = step
        self._blocked_s = time.perf_counter() - began

    def has_ended(self) -> bool:
        """Whether a save has ended whose outcome has not been asked for; other ranks may see it later."""
        return self._saving is not None and self._saving.done()

    def was_lost(self) -> bool:
        """Whether the save begun last was lost with a saver, waiting for it: the same save would now be synchronous."""
        return self._saving is not None and isinstance(self._saving.exception(), SaverLostError)

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most for the save that is under way; whether none is any more."""
        return self._saving is None or bool(wait_for([self._saving], seconds).done)

    def result(self) -> Written | None:
        """The outcome of the save begun last, waiting for it; None when it was asked for before.

        Raises CheckpointError, on every rank alike, when it failed; SaverLostError where the next one may not.
        """
        saving, self._saving, self.saving_step = self._saving, None, None
        if saving is None:
            return None
        written = saving.result()
        note = "; ".join(part for part in (written.note, self._note) if part)
        return replace(written, blocked_s=self._blocked_s, note=note)

    def close(self) -> None:
        """End the saver, once a save has ended, and give the memory back."""
        if self._saving is not None:
            self._saving.exception()
        self._give_up()
        self._threads.shutdown(wait=True)

    # --- in the main thread, while nothing is saved ---

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
        """Whether this save does; the same on all ranks."""
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
        """End the saver, which may not be up yet, and give the memory back, which may not be made yet."""
        saver, self._saver, self._beside = self._saver, None, None
        self._staging.cancel()
        if saver is not None:
            saver.kill()
        if self._ready is not None:
            self._ready.exception()  # a thread that waits for the saver has heard by now that it is gone
        if saver is not None:
            saver.end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._staging.close()

    # --- in a separate thread ---

    def _make_ready(self, size: int) -> str:
        """How the saver was lost before it was up; empty when it is."""
        saver = self._saver
        if saver is None:
            return self._failed
        try:
            self._staging.allocate(size)
        except OSError as error:
            return f"has no memory: {error}"
        return saver.wait_until_up()

    def _have_written(self, order: Order, packed: State, wait: Callable[[], None]) -> Written:
        """Let the savers write; the same outcome on all ranks."""
        began = time.perf_counter()
        wait()
        assert self._saver is not None
        mine = self._saver.save(order, packed, self._staging.region, self._on_stage)
        outcomes: list[Outcome] = gather(mine, self._group)
        lost = first_lost([outcome.lost for outcome in outcomes])
        if lost:
            self._give_up()
            gather(None, self._group)  # no saver is alive any more
            raise SaverLostError(f"{write_error(order.final, lost)}; saves stop the training from now on")
        if mine.error:
            raise CheckpointError(mine.error)
        return Written(order.final, time.perf_counter() - began, note=mine.note)

    def _write(self, order: Order, state: State) -> Written:
        began = time.perf_counter()
        note = write(order, state, self._group, self._on_stage)
        return Written(order.final, time.perf_counter() - began, note=note)


def first_lost(losses: list[str]) -> str:
    """What to tell of the ranks' lost savers, empty when none is: a signal explains the others' broken connections."""
    told = [(rank, loss) for rank, loss in enumerate(losses) if loss]
    if not told:
        return ""
    rank, loss = min(told, key=lambda one: "signal" not in one[1])
    return f"the saver process of rank {rank} {loss}"


def _on_device(device: torch.device) -> Callable[[], None]:
    """A thread's current device is the first one unless it says so."""
    return (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
