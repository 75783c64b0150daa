"""Writes the checkpoints of a run in a thread of each rank, one at a time, while training goes on.

All collectives of a save run in that thread, on a group of its own, so that they never meet those of the training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.random_state import random_state
from trainer.checkpoint.retention import Keep
from trainer.checkpoint.shards import sharded_state
from trainer.checkpoint.staging import Staging, sizes_of, why_no_room
from trainer.checkpoint.states import State, local_bytes
from trainer.checkpoint.writing import AtPoint, Order, nothing, write
from trainer.dist import Dist, gather, new_control_group


@dataclass(frozen=True)
class Written:
    """A save that has ended well."""

    path: Path
    seconds: float
    """From the copy to the last file deleted."""
    blocked_s: float = 0.0
    """How long the training stood still for it."""
    note: str = ""
    """What did not go well beside it; on rank 0."""


class Writer:
    """`start` begins a save; `result` gives its outcome. One process needs no process group.

    `available`: bytes of host memory that the copies may count on; None: what the host says.
    """

    def __init__(self, dist: Dist, *, asynchronous: bool, at: AtPoint = nothing, available: int | None = None) -> None:
        self._dist = dist
        self._group = new_control_group(dist)
        self._at = at
        self._available = available
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_on_device(dist.device))
        self._staging = Staging(dist.device) if asynchronous else None
        self._allocated: Future[None] | None = None
        self._saving: Future[Written] | None = None
        self._blocked_s = 0.0
        self.saving_step: int | None = None
        """The step of the save whose outcome has not been asked for."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Begin to make the buffers, once the optimizer has its state; or why saves will be synchronous.

        Every rank calls this at the same step, and gets the same answer: the first rank's that has no room.
        """
        if self._staging is None or self._allocated is not None:
            return None
        state = sharded_state(model, optimizer)
        reasons = gather(why_no_room(local_bytes(state), available=self._available), self._group)
        reason = next((reason for reason in reasons if reason), None)
        if reason:
            self._staging = None
        else:
            self._allocated = self._thread.submit(self._staging.allocate, sizes_of(state))
        return reason

    def is_ready(self) -> bool:
        """Whether the buffers are made, or none will be: `start` then waits for nothing but an earlier save."""
        return self._staging is None or (self._allocated is not None and self._allocated.done())

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
        """Begin to save; every rank calls this at the same step border, and what comes later does not change it.

        Waits where there are no buffers, and for their making. The outcome of an earlier save must have been asked
        for. `info` is plain JSON, the same on all ranks.
        """
        began = time.perf_counter()
        dist = self._dist
        order = Order(folder, step, dist.rank, dist.world_size, random_state(), json.loads(json.dumps(info)), keep)
        state, ready = self._staged(sharded_state(model, optimizer))
        self._at("staged")
        self._saving, self.saving_step = self._thread.submit(self._write, order, state, ready), step
        if self._staging is None:
            self._saving.exception()  # waits, and leaves it to be asked for
        self._blocked_s = time.perf_counter() - began

    def has_ended(self) -> bool:
        """Whether a save has ended whose outcome has not been asked for; other ranks may see it later."""
        return self._saving is not None and self._saving.done()

    def result(self) -> Written | None:
        """The outcome of the save begun last, waiting for it; None when it was asked for before.

        Raises CheckpointError, on every rank alike, when it failed.
        """
        saving, self._saving, self.saving_step = self._saving, None, None
        return None if saving is None else replace(saving.result(), blocked_s=self._blocked_s)

    def close(self) -> None:
        """End the thread once it has finished, and give the buffers back."""
        self._thread.shutdown(wait=True)
        if self._staging is not None:
            self._staging.close()

    def _staged(self, state: State) -> tuple[State, Callable[[], None]]:
        if self._staging is None:
            return state, lambda: None
        if self._allocated is not None:
            self._allocated.result()
        return self._staging.copy(state)

    def _write(self, order: Order, state: State, ready: Callable[[], None]) -> Written:
        began = time.perf_counter()
        ready()
        note = write(order, state, self._group, self._at)
        return Written(order.final, time.perf_counter() - began, note=note)


def _on_device(device: torch.device) -> Callable[[], None]:
    """A thread's current device is the first one unless it says so."""
    return (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
