"""torchao's AdamW with 8-bit state (arXiv 2110.02861), able to skip a step on the device as torch's fused one is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import ConfigError
from trainer.parallel.tensors import local_tensor

BLOCK = 128
SMALLEST = 4096  # as bitsandbytes has it: smaller tensors gain nothing


def torchao_adamw8bit() -> type[torch.optim.Optimizer]:
    """torchao's class; with the import torch.load knows the tensors of its state. ConfigError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optim.optimizer is adamw8bit, which needs torchao: {error}",
            hint="pip install torchao (the extra `lowbit`), or set optim.optimizer=adamw",
        ) from error
    return AdamW8bit


def build_adamw8bit(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """torchao's AdamW8bit over parameter groups. Raises ConfigError when torchao is not installed.

    Quantised in blocks of 128 values is the state of matrices whose rows 128 divides, of 4096 values and more. Other
    state stays fp32. This is judged by the whole tensor, so any number of ranks shards, saves and loads the same state.
    """
    base: Any = torchao_adamw8bit()

    class SkippingAdamW8bit(base):
        """Honours `found_inf`: where it is 1, a step leaves parameters and state bit for bit as they were.

        torchao knows no such flag and the host must not wait for it, so each parameter's step is taken and then, by a
        select on the device, taken back or kept. One parameter at a time: no more than one is held twice.
        """

        found_inf: Tensor | None = None

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            assert closure is None
            all_groups = self.param_groups
            try:
                for group in all_groups:
                    for parameter in (p for p in group["params"] if p.grad is not None):
                        self.param_groups = [{**group, "params": [parameter]}]
                        self._step_one(parameter, super().step)
            finally:
                self.param_groups = all_groups

        def _new_buffer(self, parameter: Tensor, signed: bool) -> Tensor:
            local = local_tensor(parameter.detach())
            if not (is_quantised(parameter) and local.numel()):
                return torch.zeros_like(parameter.detach())
            state = self._subclass_zeros(local, signed, self.block_size)
            if not isinstance(parameter, DTensor):
                return state
            mesh, whole = parameter.device_mesh, {"shape": parameter.shape, "stride": parameter.stride()}
            return DTensor.from_local(state, mesh, parameter.placements, run_check=False, **whole).to(parameter.device)

        def _step_one(self, parameter: Tensor, step: Callable[[], Any]) -> None:
            state = self.state[parameter]
            if not state:
                # on the device, where torchao would have it on the host: there it could not be taken back
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)
            values = [part for tensor in (parameter, *state.values()) for part in _stored(tensor)]
            before = [value.clone() for value in values]
            with _compiled_on(parameter.device):
                step()
            if self.found_inf is not None:
                skipped = self.found_inf.bool().to(parameter.device)
                for value, old in zip(values, before, strict=True):
                    value.copy_(torch.where(skipped, old, value))

    return SkippingAdamW8bit(groups, **settings, block_size=BLOCK)


def is_quantised(parameter: Tensor) -> bool:
    """Whether the state of a parameter, of its whole shape, is kept in 8 bits."""
    return parameter.ndim >= 2 and parameter.numel() >= SMALLEST and parameter.shape[1:].numel() % BLOCK == 0


def _stored(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of this rank that hold a parameter or a state, which may be quantised."""
    local = local_tensor(tensor.detach())
    return [local.codes, local.scale] if hasattr(local, "codes") else [local]


def _compiled_on(device: torch.device) -> AbstractContextManager[Any]:
    """torchao compiles its step; on a CPU that takes a minute, a C++ compiler, and gains nothing worth it."""
    return nullcontext() if device.type == "cuda" else torch.compiler.set_stance("force_eager")
