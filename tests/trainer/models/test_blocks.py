"""Weights in blocks: the same whatever the blocks, the threads and the ranks."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.ranks import run_ranks
from trainer.dist import Dist
from trainer.errors import ModelError
from trainer.models.hf import BLOCK, Block, blocks_of, for_each_block, init_random, load_pretrained

ROWS, WIDTH = 2 * (BLOCK // 1024) + 5, 1024  # two whole blocks and a bit


class OneMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ROWS, WIDTH), float("nan")))
        self.bias = nn.Parameter(torch.full((WIDTH,), float("nan")))


def test_blocks_cover_every_row_once():
    found = list(blocks_of("w", torch.zeros(ROWS, WIDTH)))
    assert [block.shape for block in found] == [(4096, WIDTH), (4096, WIDTH), (5, WIDTH)]
    assert [block.rows[0] for block in found] == [slice(0, 4096), slice(4096, 8192), slice(8192, 8197)]
    assert [block.target.shape[0] for block in found] == [4096, 4096, 5]


def drawn(rows: int, word: str) -> torch.Tensor:
    """By torch's own generator."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big")
    return torch.empty(rows, WIDTH).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))


def test_random_weights_are_drawn_block_by_block_from_seed_and_name():
    module = OneMatrix()
    init_random(module, 3)
    expected = [drawn(4096, "3/weight"), drawn(4096, "3/weight/1"), drawn(5, "3/weight/2")]
    assert torch.equal(module.weight, torch.cat(expected))
    assert module.bias.abs().max() == 0


def test_many_threads_do_each_block_once():
    module, met, lock = OneMatrix(), [], threading.Lock()

    def work(block: Block) -> None:
        with lock:
            met.append((block.name, block.number))

    for_each_block(dict(module.named_parameters()), work, threads=8)
    assert sorted(met) == [("bias", 0), ("weight", 0), ("weight", 1), ("weight", 2)]


def shard_and_fill(dist: Dist, folder: str) -> bool:
    from torch.distributed.fsdp import fully_shard

    whole, sharded = OneMatrix(), OneMatrix()
    fully_shard(sharded)
    init_random(whole, 3)
    init_random(sharded, 3)
    drawn = torch.equal(sharded.weight.full_tensor(), whole.weight)
    load_pretrained(sharded, folder)
    stored = load_file(Path(folder) / "model.safetensors")
    return drawn and torch.equal(sharded.weight.full_tensor(), stored["weight"].float())


def test_three_ranks_draw_and_read_what_one_does(tmp_path):
    stored = {"weight": torch.randn(ROWS, WIDTH).bfloat16(), "bias": torch.zeros(WIDTH)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert run_ranks(shard_and_fill, 3, str(tmp_path)) == [True] * 3


def test_the_first_bad_block_is_told_though_threads_find_others(tmp_path):
    weight = torch.zeros(ROWS, WIDTH)
    weight[-1, -1] = torch.inf
    save_file({"weight": weight, "bias": torch.full((WIDTH,), torch.nan)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="weight has values that are not finite"):
        load_pretrained(OneMatrix(), tmp_path)


def test_work_in_threads_needs_no_gradients():
    module = OneMatrix()

    def work(block: Block) -> None:
        block.take(torch.zeros(block.target.shape, requires_grad=True) * 1.0)

    for_each_block({"weight": module.weight}, work)
    assert not module.weight.isnan().any()
    assert module.weight.grad_fn is None
