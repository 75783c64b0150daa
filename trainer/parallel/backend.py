"""The interface of all backends, and the simplest one: a single process.

After the backward passes of a step's micro-batches, `.grad` holds the SUM over ranks and micro-batches of the local
losses' gradients. No backend averages; the loop divides once, by the tokens of all ranks.

Order: activation checkpointing, compile, shard. The model is built without storage (meta device) and sharded; then only
this rank's part gets storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.config.parallel import recompute_mode
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.kernels.support import why_no_triton
from trainer.models.figures import Micro
from trainer.models.protocol import Model
from trainer.parallel.blocks import compile_blocks, decide_compile, recompute_blocks, run_eagerly, set_budget
from trainer.parallel.float8_choice import choose_float8, leave_float8
from trainer.parallel.partition import partition_budget
from trainer.parallel.wrapping import plan_wrapping, replan
from trainer.tensors import DTYPES, local_tensor

if TYPE_CHECKING:
    from trainer.schema import Config


class Backend:
    """One process: nothing is sharded or reduced. The other backends override what differs."""

    name = "pytorch"

    def __init__(self, config: Config, dist: Dist) -> None:
        self.config = config
        self.dist = dist
        self.compute_dtype = DTYPES[config.train.precision]
        self.reduce_dtype = DTYPES[config.parallel.reduce_dtype]
        self.options = config.parallel
        self.module: nn.Module = nn.Identity()

    def prepare(self, model: Model) -> nn.Module:
        """The wrapped model on this rank's device, its parameters allocated but undefined; `model` is on meta.

        Fill them with `trainer.models.hf.load_pretrained` or `init_random`. Calls take a Model's arguments.
        Raises ConfigError if `parallel` requires something that this model does not have.
        """
        self.plan = plan_wrapping(model, self.config, self.dist.world_size)
        self._model = model
        gathered = self.plan.backend == "fsdp"
        self._float8 = choose_float8(model, self.config, self.dist, arrange=self._arrange, gathered=gathered)
        self._arrange(model)
        self.module = self._spread(model)
        return self.module

    def rearrange(self, config: Config) -> None:
        """Change to another plan for activations, gradients and gathered copies; parameters are not moved."""
        torch._dynamo.reset()  # else code that is compiled already would be used for any budget
        run_eagerly(self._model)
        self.config, self.options = config, config.parallel
        self.plan = replan(self.plan, config)
        self._arrange(self._model)
        if not self.compiled and self._float8:
            self._float8 = leave_float8(self._model)

    def forget_failed_pass(self) -> None:
        """Clear the state that a failed forward or backward left, so that the next one starts clean."""

    def _arrange(self, model: Model) -> None:
        """Set what the blocks recompute, and compile them if wanted."""
        mode = recompute_mode(self.options)
        recompute_blocks(model, mode, self.options.checkpoint_every)
        device = self.dist.device
        self.compiled, self._why_eager = decide_compile(self.options.compile, device, why_not=why_no_triton(device))
        model.choose_kernels(device)
        if mode == "budget" and not self.compiled:
            message = f"parallel.activation_checkpointing is budget, which needs a compiler{self._why_eager}"
            raise ConfigError(message, hint="set parallel.activation_checkpointing=selective")
        if self.compiled:
            set_budget(self._budget(model) if mode == "budget" else 1.0)
            compile_blocks(model, fixed_shapes=self.config.data.packing)

    def sync(self, last: bool) -> None:
        """Call before each micro-batch's forward. `last`: it is the step's last one, in which gradients are reduced."""

    def scale_grads(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar tensor on the device, without waiting for its value."""
        by_device: dict[torch.device, list[Tensor]] = {}  # two devices with offloaded and ignored parameters
        for grad in self._grads():
            by_device.setdefault(grad.device, []).append(local_tensor(grad))
        for device, grads in by_device.items():
            torch._foreach_mul_(grads, factor.to(device, grads[0].dtype))

    def grad_norm(self) -> Tensor:
        """The global L2 norm of the current gradients, a plain fp32 scalar, equal on all ranks; not finite if a
        gradient is not."""
        return self._sum_of_squares().sqrt().float()

    def describe(self) -> str:
        """The plan in a few lines: what is wrapped, in which dtypes, this rank's bytes and its traffic."""
        every = f" of every {self.options.checkpoint_every}th block" if self.options.checkpoint_every > 1 else ""
        lines = [
            *self.plan.render(),
            f"on {self.dist.device.type}; activation checkpointing {self._recompute_words()}{every},"
            f" compile {'on' if self.compiled else 'off' + self._why_eager}",
            *filter(None, [self._float8]),
        ]
        return "\n".join(lines)

    def _budget(self, model: Model) -> float:
        has_triton = why_no_triton(self.dist.device) is None
        gathered = self.plan.backend == "fsdp"
        micro = Micro.of(self.config, triton=has_triton, compiled=self.compiled, gathered=gathered)
        return partition_budget(model.block_memory(model.blocks[0], micro), self.options.activation_budget)

    def _recompute_words(self) -> str:
        mode = recompute_mode(self.options)
        return f"{mode} ({self.options.activation_budget:g})" if mode == "budget" else mode

    def _spread(self, model: Model) -> nn.Module:
        return self._allocate(model)

    def _allocate(self, model: Model) -> Model:
        model.to_empty(device=self.dist.device)
        model.reset_buffers(self.dist.device)
        return model

    def _sum_of_squares(self) -> Tensor:
        """The sum of squares of all gradients over all ranks, each entry once: float64 scalar on this rank's device."""
        return self._squares(self._grads())

    def _squares(self, grads: Iterable[Tensor]) -> Tensor:
        """The sum of squares of only this rank's entries."""
        local = [local_tensor(grad) for grad in grads]
        if not local:  # torch's norm of an empty list is on the host; moving it would wait for the device
            return torch.zeros((), device=self.dist.device, dtype=torch.float64)
        return torch.nn.utils.get_total_norm(local).to(self.dist.device, torch.float64).square()

    def _grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
