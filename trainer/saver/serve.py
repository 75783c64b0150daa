"""What a saver process does with an order: find the state in the shared memory, and write it with the other savers."""

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
    """Meet the other savers, and carry out orders until the trainer is gone.

    Ends after something unforeseen too: the other savers then hear that this one is gone, and wait for it no more.
    """
    torch.set_num_threads(1)  # the cores are the training's
    try:
        group = _joined(receive(connection), connection)
        os.nice(niceness)
        region: Region | None = None
        while True:
            order: Save = receive(connection)
            if order.region_bytes is not None:
                region = None
                gc.collect()  # its memory goes before that of the new one comes
                region = Region(recv_handle(connection), order.region_bytes)
            assert region is not None
            outcome = _carried_out(order, region, group, connection)
            send(connection, outcome)
            if outcome.lost:
                return
    except (EOFError, OSError):  # the trainer is gone
        return


def _joined(setup: Setup, connection: Connection) -> Group:
    """The group of all savers, once all are here; None for a saver that is alone."""
    try:
        store: torch_dist.Store = torch_dist.HashStore()
        if setup.world_size > 1:
            assert setup.rendezvous is not None, "the trainers have looked for one"
            store = setup.rendezvous.open(setup.timeout_s)
        timeout = timedelta(seconds=setup.timeout_s)
        # also for one: a sharded tensor needs it
        torch_dist.init_process_group(
            "gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout
        )
    except Exception as error:
        send(connection, Outcome(lost=f"could not join the others: {first_cause(error)}"))
        raise EOFError from error
    send(connection, Ready())
    return None if setup.world_size == 1 else torch_dist.group.WORLD


def _carried_out(order: Save, region: Region, group: Group, connection: Connection) -> Outcome:
    """Write a checkpoint with the other savers; how that ended."""
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
            os._exit(1)  # the trainer is gone: this save ends where it is, as with `main.end_with`

    return on_stage
