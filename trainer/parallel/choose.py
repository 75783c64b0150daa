"""Chooses the backend for a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.parallel import backend_of
from trainer.dist import Dist, DistError
from trainer.parallel.backend import Backend
from trainer.parallel.ddp import DDPBackend
from trainer.parallel.fsdp import FSDPBackend

if TYPE_CHECKING:
    from trainer.schema import Config


def make_backend(config: Config, dist: Dist) -> Backend:
    """The backend that `target.train_backend` names; `auto` is pytorch in a world of one, else fsdp.

    fsdp with the sharding strategy NO_SHARD is ddp. Raises DistError for pytorch with several ranks.
    """
    name = backend_of(config, dist.world_size)
    if name == "pytorch" and dist.world_size > 1:
        raise DistError(
            f"target.train_backend=pytorch is for one process, and {dist.world_size} ranks are running;"
            " use ddp or fsdp, or name one GPU in target.gpu_ranks"
        )
    return {"pytorch": Backend, "ddp": DDPBackend, "fsdp": FSDPBackend}[name](config, dist)
