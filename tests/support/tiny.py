"""Small models, and batches for them, that several test files use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.batch import IGNORE, Batch
from trainer.config.parallel import recompute_mode
from trainer.data.batches.packing import PackedRow, build_row, plan_rows
from trainer.data.tokenize.chat import Encoded
from trainer.dist import Dist
from trainer.export.model import export_tensors
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import gather_full, init_random
from trainer.models.losses import sft_loss
from trainer.models.protocol import Shape
from trainer.parallel.blocks import recompute_blocks
from trainer.schema import Config

ALONE = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def tiny_shape(**changes: Any) -> DecoderShape:
    fields: dict[str, Any] = {
        "family": "qwen3",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    return DecoderShape(**(fields | changes))


def tiny_decoder(*, seed: int = 0, **changes: Any) -> Decoder:
    decoder = Decoder(tiny_shape(**changes))
    init_random(decoder, seed)
    return decoder


def packed_batch(rows: list[list[int]], *, length: int, seed: int = 0, vocab_size: int = 101) -> Batch:
    """Rows of random documents of the given lengths, padded to `length`; about a third of the labels are no targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), length)
    input_ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
    positions, doc_ids = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    for row, lengths in enumerate(rows):
        start = 0
        for number, size in enumerate(lengths):
            end = start + size
            input_ids[row, start:end] = torch.randint(vocab_size, (size,), generator=generator)
            kept = torch.rand(size - 1, generator=generator) > 0.35
            labels[row, start : end - 1] = input_ids[row, start + 1 : end].where(kept, torch.tensor(IGNORE))
            positions[row, start:end] = torch.arange(size)
            doc_ids[row, start:end] = number
            start = end
    return Batch(input_ids, labels, positions, doc_ids)


def rows_of(batch: Batch, start: int, end: int) -> Batch:
    return Batch(*(x[start:end] for x in (batch.input_ids, batch.labels, batch.positions, batch.doc_ids)))


def pack(encoded: Sequence[Encoded], seq_len: int, *, pad_id: int = 0, packing: bool = True) -> list[PackedRow]:
    """All documents, none longer than `seq_len`, in rows."""
    lengths = [len(document.ids) for document in encoded]
    plan = plan_rows(lengths, range(len(encoded)), seq_len=seq_len, packing=packing)
    return [build_row([encoded[i] for i in row], seq_len=seq_len, pad_id=pad_id) for row in plan]


def saved_bytes(config: Config, shape: Shape, batch: Batch) -> int:
    """Bytes that autograd holds between forward and backward, each storage once, without the parameters' casts."""
    model = build_model(config, shape)
    recompute_blocks(model, recompute_mode(config.parallel), config.parallel.checkpoint_every)
    model.to_empty(device="cpu")
    model.reset_buffers(torch.device("cpu"))
    fill_weights(config, model, None)
    weights = {tuple(p.shape) for p in model.parameters()}
    weights |= {tuple(reversed(size)) for size in weights}
    held: dict[int, torch.Tensor] = {p.data_ptr(): torch.empty(0) for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in weights:
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sft_loss(model, batch, packed=config.data.packing)
    assert loss.count > 0
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def export_model(
    folder: Path, module: nn.Module, *, rows: list[list[int]], shape: DecoderShape, dist: Dist
) -> list[list[int]]:
    """Export a model without a tokenizer, however it is spread; every rank calls this."""
    tensors = gather_full(module, dist)
    return export_tensors(folder, tensors, shape=shape, tokenizer=None, rows=rows, dist=dist)
