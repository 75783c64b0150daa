"""Carries out a saver process's orders: reads the state from shared memory, and writes it with the other savers."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch
import torch.distributed as torch_dist
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.errors import CheckpointError, first_cause
from trainer.checkpoint.write import StageHook, ignore_stage, write
from trainer.dist import Group
from trainer.saver.messages import Outcome, Ready, Save, Setup, StageReached, receive, send
from trainer.saver.region import Region, unpack


def serve_orders(connection: Connection, *, niceness: int = 0) -> None:
    """Join the other savers, and carry out orders until the trainer is gone.

    Also ends after an unexpected error: the other savers then notice that this one is gone, and stop waiting for it.
    """
    torch.set_num_threads(1)  # leave the cores to the training
    try:
        group = _joined(receive(connection), connection)
        os.nice(niceness)
        region: Region | None = None
        while True:
            order: Save = receive(connection)
            if order.region_bytes is not None:
                region = None
                gc.collect()  # frees the old region before the new one is mapped
                region = Region(recv_handle(connection), order.region_bytes)
            assert region is not None
            outcome = _carried_out(order, region, group, connection)
            send(connection, outcome)
            if outcome.lost:
                return
    except (EOFError, OSError):  # the trainer is gone
        return


def _joined(setup: Setup, connection: Connection) -> Group:
    """Wait for all savers, and return their group; None for a single saver."""
    try:
        store: torch_dist.Store = torch_dist.HashStore()
        if setup.world_size > 1:
            assert setup.rendezvous is not None, "the trainers have looked for one"
            store = setup.rendezvous.open(setup.timeout_s)
        timeout = timedelta(seconds=setup.timeout_s)
        # also for a single saver: sharded tensors need it
        torch_dist.init_process_group(
            "gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout
        )
    except Exception as error:
        send(connection, Outcome(lost=f"could not join the others: {first_cause(error)}"))
        raise EOFError from error
    send(connection, Ready())
    return None if setup.world_size == 1 else torch_dist.group.WORLD


def _carried_out(order: Save, region: Region, group: Group, connection: Connection) -> Outcome:
    """Write a checkpoint with the other savers. Returns how that ended."""
    on_stage: StageHook = _reporting(connection) if order.reports_stages else ignore_stage
    try:
        return Outcome(note=write(order.order, unpack(order.state, region), group, on_stage))
    except CheckpointError as error:
        return Outcome(error=str(error))
    except (Exception, CheckpointException) as error:
        return Outcome(lost=f"failed with {first_cause(error)}")


def _reporting(connection: Connection) -> StageHook:
    def on_stage(stage: str) -> None:
        try:
            send(connection, StageReached(stage))
            receive(connection)
        except (EOFError, OSError):
            os._exit(1)  # the trainer is gone: abort this save, as `main.end_with` does

    return on_stage
