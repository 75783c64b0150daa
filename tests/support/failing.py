"""Runs whose first pass fails, and a keeper of plans for memory that needs no GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from tests.support.tiny import ALONE
from trainer.memory.activations import Kernels
from trainer.memory.fitting import MemoryKeeper, fit_into, read_failed
from trainer.models.families.decoder_shape import DecoderShape
from trainer.schema import Config, TrainConfig
from trainer.train.run import Run
from trainer.words import GIB


def fail_once(run: Run, error: Exception, *, backward: bool) -> None:
    """The second block fails the first time that it is called, or its backward pass is."""
    block = run.backend._model.blocks[1]

    def failing(*args: Any) -> Any:
        if not backward:
            raise error
        out = type(block).forward(block, *args)
        out.register_hook(partial(_raise, error))
        return out

    block.forward = failing


def _raise(error: Exception, _grad: torch.Tensor) -> None:
    raise error


def compile_failure() -> Exception:
    return BackendCompilerFailed(lambda: None, RuntimeError("no C compiler\nlong story"), None)


SMALL = DecoderShape("qwen2", 151936, 896, 4864, 24, 14, 2, 64)
CONFIG = Config(train=TrainConfig(precision="bf16"))


class Keeper(MemoryKeeper):
    """A keeper that finds a free GPU of 80 GiB without a compiler."""

    def __init__(self, folder: Path, config: Config = CONFIG) -> None:
        self.given, self._shape, self._run_dir, self._dist = config, SMALL, folder, ALONE
        kernels, failed = Kernels(triton=True, compiled=False), read_failed(folder, config, 1)
        self.fit = fit_into(config, SMALL, free=80 * GIB, world_size=1, kernels=kernels, failed=failed)
        self._note()

    @property
    def mode(self) -> str | None:
        return self.config.parallel.activation_checkpointing
