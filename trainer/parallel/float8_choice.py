"""Whether a run's products are in float8: what rules it out, and for `auto` a few blocks timed in both on this card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from trainer.config.train import why_no_float8
from trainer.dist import Dist, gather
from trainer.errors import ConfigError
from trainer.kernels.support import why_no_triton
from trainer.models.float8 import NEEDED, odd_size, use_bf16, use_float8, why_not_float8
from trainer.models.lora import linear_modules
from trainer.models.protocol import Model
from trainer.parallel.blocks import is_compile_failure

if TYPE_CHECKING:
    from trainer.schema import Config

WORTH = 1.05
"""How many times as fast as bf16 float8 must be, for it is less exact."""

Arrange = Callable[[Model], None]
"""Gives blocks the recomputation and the compiler that the model's will have."""
BLOCKS = 3
WARM_UPS, TIMED = 2, 5


def choose_float8(model: Model, config: Config, dist: Dist, *, arrange: Arrange, gathered: bool) -> str | None:
    """A line that tells what was chosen, and why; the model is in float8 where that was. None: it was not asked for.

    `gathered`: blocks find their parameters in the dtype of products, as FSDP gathers them. All ranks choose alike.
    Raises ConfigError for `on` where it cannot be.
    """
    wanted, device = config.train.float8, dist.device
    if wanted == "off":
        return None
    why_not = why_no_float8(config) or why_no_triton(device) or why_not_float8(model, device)
    why_not = next(filter(None, gather(why_not, dist.control_group)), None)  # one rank's is everyone's
    gain = partial(float8_gain, model, config, dist, arrange=arrange, gathered=gathered)
    chosen, line = decide_float8(wanted, why_not=why_not, gain=gain)
    if chosen:
        use_float8(model)
    return line


def foresee_float8(model: Model, config: Config) -> str | None:
    """The line as far as it is known without the GPUs of the run. None: float8 was not asked for.

    Raises ConfigError for `on` where the model cannot have it.
    """
    wanted = config.train.float8
    if wanted == "off":
        return None
    why_not = why_no_float8(config) or odd_size(model)
    if why_not is not None:
        return decide_float8(wanted, why_not=why_not, gain=lambda: 0.0)[1]
    needed = f"needs compute capability {NEEDED[0]}.{NEEDED[1]} and torchao"
    if wanted == "on":
        return f"float8: on ({needed})"
    return f"float8: decided on the GPU: on where a few blocks, timed at the start, are {WORTH} x of bf16 ({needed})"


def leave_float8(model: Model) -> str:
    """Go back to bf16, for casts that are not compiled take longer than they save; a line that tells so."""
    use_bf16(model)
    return "float8: off (blocks are not compiled)"


def decide_float8(wanted: Literal["auto", "on"], *, why_not: str | None, gain: Callable[[], float]) -> tuple[bool, str]:
    """Whether products are in float8, and a line that tells so.

    `gain`: measures how many times as fast as in bf16 they are; called for `auto` alone. Raises ConfigError for `on`
    where they cannot be.
    """
    if why_not is not None:
        if wanted == "on":
            hint = "set train.float8=auto, which then stays with bf16"
            raise ConfigError(f"train.float8 is on, and there is none: {why_not}", hint=hint)
        return False, f"float8: off ({why_not})"
    if wanted == "on":
        return True, "float8: on"
    measured = gain()
    chosen = measured >= WORTH
    return chosen, f"float8: {measured:.2f} x of bf16 over a few blocks: {'on' if chosen else 'off'}"


def float8_gain(model: Model, config: Config, dist: Dist, *, arrange: Arrange, gathered: bool) -> float:
    """How many times as fast as in bf16 blocks are in float8, on the rank that gains least; 0 where the compiler fails.

    The model itself stays as it is: blocks like its own are timed.
    """

    def in_float8(blocks: Model) -> None:
        use_float8(blocks)
        arrange(blocks)

    stored = model.compute_dtype if gathered else _first_weight(model).dtype
    rows, seq_len = config.train.micro_batch_size, config.data.seq_len
    seconds = partial(seconds_of, model, rows=rows, seq_len=seq_len, device=dist.device, stored=stored)
    try:
        gain = seconds(arrange) / seconds(in_float8)
    except Exception as error:
        if not is_compile_failure(error):
            raise
        gain = 0.0  # the model's own first pass tells of it
    torch._dynamo.reset()  # what was compiled for these blocks is not for those of the model
    if dist.device.type == "cuda":
        torch.cuda.empty_cache()
    return min(gather(gain, dist.control_group))


# --- blocks timed ----------------------------------------------------------------------------------------------------


def seconds_of(
    model: Model,
    arrange: Callable[[Model], None],
    *,
    rows: int,
    seq_len: int,
    device: torch.device,
    stored: torch.dtype,
) -> float:
    """The median time of a forward and a backward pass of a few blocks like the model's, after `arrange(them)`.

    `rows` x `seq_len`: the tokens of a micro-batch. `stored`: the dtype in which a block finds its parameters.
    """
    generator = torch.Generator(device).manual_seed(0)  # separate: training draws the same numbers with and without
    few = _few_blocks(model, device, stored, generator)
    arrange(few)
    positions = torch.arange(seq_len, device=device).expand(rows, -1)
    same = torch.zeros_like(positions)  # one token, one document
    grad = torch.randn(rows, seq_len, few.shape.hidden_size, device=device, generator=generator).to(few.compute_dtype)
    times = [_pass_seconds(few, (same, positions, same), grad, device) for _ in range(WARM_UPS + TIMED)]
    return statistics.median(times[WARM_UPS:])


def _few_blocks(model: Model, device: torch.device, stored: torch.dtype, generator: torch.Generator) -> Model:
    with torch.device("meta"):  # where torch draws no first weights
        few = model.shape.few_blocks(BLOCKS).build(model.compute_dtype).to(stored)
    few.to_empty(device=device)
    few.reset_buffers(device)
    for block in few.blocks:
        block.requires_grad_(_first_weight(model).requires_grad)
    for parameter in few.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    return few


def _first_weight(model: Model) -> Tensor:
    return next(linear_modules(model))[1].weight


def _pass_seconds(few: Model, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    few(*inputs).backward(grad)
    _wait(device)
    took = time.perf_counter() - began
    few.zero_grad(set_to_none=True)
    return took


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
