"""How long a few blocks of a model take on this card: what is only known once it has been tried."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trainer.models.decoder import Decoder

BLOCKS = 3
WARM_UPS, TIMED = 2, 5


def seconds_of(
    decoder: Decoder,
    arrange: Callable[[Decoder], None],
    *,
    rows: int,
    seq_len: int,
    device: torch.device,
    stored: torch.dtype,
) -> float:
    """The median time of a forward and a backward pass of a few blocks like the decoder's, after `arrange(them)`.

    `rows` x `seq_len`: the tokens of a micro-batch. `stored`: the dtype in which a block finds its parameters.
    """
    generator = torch.Generator(device).manual_seed(0)  # of its own: training draws the same numbers with and without
    few = _few_blocks(decoder, device, stored, generator)
    arrange(few)
    positions = torch.arange(seq_len, device=device).expand(rows, -1)
    same = torch.zeros_like(positions)  # one token, one document
    grad = torch.randn(rows, seq_len, few.shape.hidden_size, device=device, generator=generator).to(few.compute_dtype)
    times = [_pass_seconds(few, (same, positions, same), grad, device) for _ in range(WARM_UPS + TIMED)]
    return statistics.median(times[WARM_UPS:])


def _few_blocks(decoder: Decoder, device: torch.device, stored: torch.dtype, generator: torch.Generator) -> Decoder:
    shape = replace(decoder.shape, num_layers=min(BLOCKS, decoder.shape.num_layers), vocab_size=16)
    with torch.device("meta"):  # where torch draws no first weights
        few = Decoder(shape, compute_dtype=decoder.compute_dtype).to(stored)
    few.to_empty(device=device)
    few.reset_buffers(device)
    few.model.layers.requires_grad_(decoder.blocks[0].self_attn.q_proj.weight.requires_grad)
    for parameter in few.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    return few


def _pass_seconds(few: Decoder, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, device: torch.device) -> float:
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
