"""MFU of rows that hold several documents: attention grows with each document's length, not with the row's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.oracles.reference import hf_model
from tests.support.tiny import packed_batch, tiny_decoder, tiny_shape
from tests.support.trainings import build
from trainer.train import loop
from trainer.train.values import Window

LENGTHS = [[40, 20, 4], [57]]
SHAPE = tiny_shape(hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=1009)


def test_squared_lengths_are_those_of_the_documents_without_the_padding():
    batch = packed_batch(LENGTHS, length=70)
    assert int(batch.squared_lengths) == 40**2 + 20**2 + 4**2 + 57**2
    assert int(replace(batch, doc_ids=torch.full_like(batch.doc_ids, -1)).squared_lengths) == 0


def test_packed_rows_count_what_torch_counts_of_each_document_alone():
    model = hf_model(SHAPE)
    lengths = [length for row in LENGTHS for length in row]
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            ids = torch.randint(SHAPE.vocab_size, (1, length))
            model(ids, labels=ids).loss.backward()
    window = Window(tokens=sum(lengths), squares=float(packed_batch(LENGTHS, length=70).squared_lengths))
    ours = SHAPE.build().flops().per_token(window.mean_length) * window.tokens
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_full_rows_of_one_document_count_as_the_formula_of_fixed_rows():
    batch = packed_batch([[96], [96]], length=96)
    window = Window(tokens=float(batch.num_tokens), squares=float(batch.squared_lengths))
    flops = tiny_decoder().flops()
    assert flops.per_token(window.mean_length) == 6 * tiny_shape().num_params + 12 * 2 * 4 * 8 * 96


@pytest.mark.parametrize("log_every", [1, 2])
def test_records_reckon_mfu_with_the_lengths_of_their_steps_documents(rows, tmp_path, log_every):
    run = build(rows, tmp_path, steps=2, log_every=log_every)
    run.peak_flops = 1e12
    steps = [run.data.train.step_batches(step) for step in range(2)]
    loop.train(run)
    record = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-2]
    batches = [batch for step in steps[2 - log_every :] for batch in step]
    squares, tokens = (sum(int(getattr(b, name)) for b in batches) for name in ("squared_lengths", "num_tokens"))
    per_token = run.flops.products + run.flops.attention * squares / tokens
    assert record["mfu"] == pytest.approx(per_token * record["tokens_per_s_per_gpu"] / 1e12, rel=1e-2)
