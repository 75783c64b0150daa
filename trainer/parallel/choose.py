"""Which backend a config means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.dist import Dist, DistError
from trainer.parallel.backend import Backend
from trainer.parallel.ddp import DDPBackend
from trainer.parallel.fsdp import FSDPBackend

if TYPE_CHECKING:
    from trainer.schema import Config


def make_backend(config: Config, dist: Dist) -> Backend:
    """The backend that `target.train_backend` names; `auto` is pytorch in a world of one, else fsdp."""
    name = config.target.train_backend
    if name == "auto":
        name = "pytorch" if dist.world_size == 1 else "fsdp"
    if name == "pytorch" and dist.world_size > 1:
        raise DistError(
            f"target.train_backend=pytorch is for one process, and {dist.world_size} ranks are running;"
            " use ddp or fsdp, or name one GPU in target.gpu_ranks"
        )
    return {"pytorch": Backend, "ddp": DDPBackend, "fsdp": FSDPBackend}[name](config, dist)
