"""Decides whether a run's products are in float8: what rules it out; for `auto`, times a few blocks on this GPU."""

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
"""The minimum speed of float8 relative to bf16 to use it, because it is less exact."""

Arrange = Callable[[Model], None]
"""Applies the recomputation and compilation of the model's blocks to other blocks."""
BLOCKS = 3
WARM_UPS, TIMED = 2, 5


def choose_float8(model: Model, config: Config, dist: Dist, *, arrange: Arrange, gathered: bool) -> str | None:
    """Choose, switch the model to float8 if chosen, and return a line with the choice and its reason; None if float8
    was not asked for.

    `gathered`: FSDP gathers the blocks' parameters in the dtype of the products. All ranks make the same choice.
    Raises ConfigError for `on` if float8 is not possible.
    """
    wanted, device = config.train.float8, dist.device
    if wanted == "off":
        return None
    why_not = why_no_float8(config) or why_no_triton(device) or why_not_float8(model, device)
    why_not = next(filter(None, gather(why_not, dist.control_group)), None)  # one rank's reason counts for all
    gain = partial(float8_gain, model, config, dist, arrange=arrange, gathered=gathered)
    chosen, line = decide_float8(wanted, why_not=why_not, gain=gain)
    if chosen:
        use_float8(model)
    return line


def foresee_float8(model: Model, config: Config) -> str | None:
    """The line of `choose_float8`, as far as it is known without the run's GPUs. None: float8 was not asked for.

    Raises ConfigError for `on` if the model cannot use float8.
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
    """Return to bf16: casts that are not compiled cost more time than float8 saves. Returns a line for the log."""
    use_bf16(model)
    return "float8: off (blocks are not compiled)"


def decide_float8(wanted: Literal["auto", "on"], *, why_not: str | None, gain: Callable[[], float]) -> tuple[bool, str]:
    """Whether products are in float8, and a line for the log.

    `gain`: measures their speed relative to bf16; called only for `auto`. Raises ConfigError for `on` if float8 is not
    possible.
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
    """The speed of blocks in float8 relative to bf16, on the rank with the smallest gain; 0 if the compiler fails.

    The model itself is not changed: similar blocks are timed.
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
        gain = 0.0  # the model's own first pass reports it
    torch._dynamo.reset()  # the code compiled for these blocks is not for the model's blocks
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
    """The median time of a forward and backward pass of a few blocks like the model's, after `arrange(blocks)`.

    `rows` x `seq_len`: the tokens of a micro-batch. `stored`: the dtype of the blocks' parameters.
    """
    generator = torch.Generator(device).manual_seed(0)  # separate: leaves the training's random numbers unchanged
    few = _few_blocks(model, device, stored, generator)
    arrange(few)
    positions = torch.arange(seq_len, device=device).expand(rows, -1)
    same = torch.zeros_like(positions)  # one token, one document
    grad = torch.randn(rows, seq_len, few.shape.hidden_size, device=device, generator=generator).to(few.compute_dtype)
    times = [_pass_seconds(few, (same, positions, same), grad, device) for _ in range(WARM_UPS + TIMED)]
    return statistics.median(times[WARM_UPS:])


def _few_blocks(model: Model, device: torch.device, stored: torch.dtype, generator: torch.Generator) -> Model:
    with torch.device("meta"):  # on meta torch draws no initial weights
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
