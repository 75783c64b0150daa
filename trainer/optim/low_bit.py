"""torchao's AdamW with 8-bit state (arXiv 2110.02861), able to divide gradients and to skip a step on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import ConfigError
from trainer.kernels.adamw8bit import BLOCK, adamw8bit_
from trainer.tensors import local_tensor

SMALLEST = 4096  # the same as in bitsandbytes: smaller tensors gain nothing

_Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Columns = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def torchao_adamw8bit() -> type[torch.optim.Optimizer]:
    """torchao's class; after this import torch.load knows its state's tensors. Raises ConfigError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optim.optimizer is adamw8bit, which needs torchao: {error}",
            hint="pip install torchao (the extra `lowbit`), or set optim.optimizer=adamw",
        ) from error
    theirs: type[torch.optim.Optimizer] = AdamW8bit
    return theirs


def build_adamw8bit(
    groups: list[dict[str, Any]], *, in_fp32: frozenset[int] = frozenset(), **settings: Any
) -> torch.optim.Optimizer:
    """torchao's AdamW8bit over parameter groups, its step in one kernel per parameter (`trainer.kernels.adamw8bit`).

    The state of a matrix is quantised in blocks of 128 values, if 128 divides its rows and it has at least 4096 values.
    Other state stays fp32, also that of the parameters whose ids are in `in_fp32`. The whole tensor decides this, so
    any number of ranks shards, saves and loads the same state.
    Raises ConfigError if torchao is not installed.
    """
    base: Any = torchao_adamw8bit()

    class OneKernelAdamW8bit(base):  # type: ignore[misc]  # torchao has no types
        """Honours `found_inf` and `grad_scale` as torch's fused optimizers do: only the device reads them.

        If `found_inf` is 1, a step changes no bit of parameters and state.
        """

        _step_supports_amp_scaling = True
        found_inf: Tensor | None = None
        grad_scale: Tensor | None = None
        kept_in_fp32 = in_fp32

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            assert closure is None
            for group in self.param_groups:
                by_device: dict[torch.device, list[Tensor]] = {}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        by_device.setdefault(parameter.device, []).append(parameter)
                for device, parameters in by_device.items():
                    self._step_on(device, parameters, group)

        def _step_on(self, device: torch.device, parameters: list[Tensor], group: dict[str, Any]) -> None:
            found_inf = torch.zeros((), device=device) if self.found_inf is None else self.found_inf.to(device)
            grad_scale = None if self.grad_scale is None else self.grad_scale.to(device)
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(self._new_state(parameter))
            states = [self.state[parameter] for parameter in parameters]
            counted = [1.0 - found_inf] * len(states)  # one tensor instead of a list would make the host wait
            torch._foreach_add_([state["step"] for state in states], counted)
            rows = [_local(parameter, state) for parameter, state in zip(parameters, states, strict=True)]
            _step_rows_(rows, group, device, found_inf=found_inf, grad_scale=grad_scale)

        def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
            # the count is on the device; torchao keeps it on the host, where a step could not be skipped
            moments = {name: self._new_buffer(parameter, name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.zeros((), device=parameter.device), **moments}

        def _new_buffer(self, parameter: Tensor, signed: bool) -> Tensor:
            local = local_tensor(parameter.detach())
            if id(parameter) in in_fp32 or not (is_quantised(parameter) and local.numel()):
                return torch.zeros_like(parameter.detach())
            state: Tensor = self._subclass_zeros(local, signed, self.block_size)
            return _sharded_as(parameter, state) if isinstance(parameter, DTensor) else state

    optimizer: torch.optim.Optimizer = OneKernelAdamW8bit(groups, **settings, block_size=BLOCK)
    return optimizer


def is_quantised(parameter: Tensor) -> bool:
    """Whether the state of a parameter is kept in 8 bits; its whole shape decides."""
    return parameter.ndim >= 2 and parameter.numel() >= SMALLEST and parameter.shape[1:].numel() % BLOCK == 0


def _sharded_as(parameter: DTensor, state: Tensor) -> Tensor:
    """This rank's part of a parameter's state, as a DTensor sharded as the parameter is."""
    sharded = DTensor.from_local(
        state,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded.to(parameter.device)


def _step_rows_(
    rows: list[_Row], group: dict[str, Any], device: torch.device, *, found_inf: Tensor, grad_scale: Tensor | None
) -> None:
    """Update parameters of one group and device: first those with 8-bit moments, then those with fp32 moments."""
    large = _columns([row for row in rows if hasattr(row[2], "codes")])
    small = _columns([row for row in rows if not hasattr(row[2], "codes")])
    small_step = _in_one_kernel_ if device.type == "cuda" else adamw8bit_
    for step, columns in ((adamw8bit_, large), (small_step, small)):
        step(
            *columns,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            found_inf=found_inf,
            grad_scale=grad_scale,
        )


def _in_one_kernel_(
    parameters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    found_inf: Tensor,
    grad_scale: Tensor | None,
) -> None:
    """`adamw8bit_` for moments in fp32: torch's kernel, once for all parameters."""
    if not parameters:
        return
    torch._fused_adamw_(
        *(parameters, grads, exp_avgs, exp_avg_sqs, [], steps),
        lr=lr.item(),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def _local(parameter: Tensor, state: dict[str, Tensor]) -> _Row:
    """This rank's part of a parameter, of its gradient and of both moments, and the count of its steps."""
    assert parameter.grad is not None
    grad, exp_avg, exp_avg_sq = map(local_tensor, (parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
    return local_tensor(parameter), grad, exp_avg, exp_avg_sq, state["step"]


def _columns(rows: list[_Row]) -> _Columns:
    """One list for each kind of tensor that `_local` returns."""
    columns: _Columns = ([], [], [], [], [])
    for row in rows:
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)
    return columns
