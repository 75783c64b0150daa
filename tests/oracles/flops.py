"""The floating point operations that MFU is reckoned with, compared with torch's count of a real step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.oracles.measure import Oracle
from tests.oracles.reference import hf_model
from tests.support.tiny import tiny_shape
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape

ROWS, SEQ_LEN = 2, 64
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}


def flops_difference(folder: Path, *, shape: DecoderShape) -> float:
    """Relative; eager attention multiplies the whole square, as the formula assumes."""
    model = hf_model(shape)
    ids = torch.randint(shape.vocab_size, (ROWS, SEQ_LEN))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    with torch.device("meta"):
        decoder = Decoder(shape)
    ours = decoder.flops().per_token(SEQ_LEN) * ROWS * SEQ_LEN
    return abs(ours / counter.get_total_flops() - 1)


ORACLES = [
    Oracle(
        "floating point operations of a step, relative",
        "torch FlopCounterMode over transformers, eager",
        f"Qwen3, {'tied' if tied else 'untied'}, forward and backward of {ROWS} x {SEQ_LEN} tokens",
        0.01,
        partial(flops_difference, shape=tiny_shape(**SHAPE, vocab_size=1009, tie_embeddings=tied)),
    )
    for tied in (True, False)
]
