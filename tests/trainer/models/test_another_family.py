"""A second kind of model and a recipe of its own, written here: all that the house asks of either goes through the two
protocols, so both train, plan, save, resume and adapt as the decoder does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.configs import config_of
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, packed_batch, saved_bytes
from tests.support.trainings import losses
from trainer.batch import Batch, LossSum
from trainer.data.batches.micro_batches import Ranks
from trainer.data.batches.steps import largest_batch
from trainer.data.loader import Data, build_data
from trainer.data.tokenize.tokenizer import tokenizer_hash
from trainer.dist import Dist
from trainer.errors import ConfigError, ModelError
from trainer.inspection.inspect_run import inspect_run
from trainer.memory.activations import Kernels
from trainer.memory.estimate import estimate_memory
from trainer.memory.fitting import fit_into
from trainer.models.build import build_model
from trainer.models.figures import FP32, BlockMemory, Flops, Micro, OuterMemory, Value
from trainer.models.layers import Head, Linear
from trainer.models.losses import CHUNK_TOKENS_IN_TORCH, sft_loss
from trainer.models.protocol import Model, Units
from trainer.parallel.wrapping import plan_wrapping
from trainer.recipes.causal_lm import train
from trainer.recipes.sft import recipe as sft_recipe
from trainer.schema import Config
from trainer.train.evaluate import held_out_loss
from trainer.train.recipe import Basis
from trainer.train.run import Evaluated, LossFn, Run

# --- the family -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixerShape:
    """No attention: each token is mixed with the one before it, in the same document."""

    vocab_size: int
    hidden_size: int = 24
    num_layers: int = 2
    max_position_embeddings: int = 4096
    hf_class: str | None = None

    @property
    def num_params(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())

    def build(self, compute_dtype: torch.dtype = torch.float32) -> Model:
        return Mixer(self, compute_dtype)

    def few_blocks(self, most: int) -> MixerShape:
        return replace(self, num_layers=min(most, self.num_layers), vocab_size=16)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def hf_config(self) -> Any:
        raise NotImplementedError

    def hf_fields(self) -> dict[str, Any]:
        raise NotImplementedError


class MixerFamily:
    def folder(self, config: Config, dist: Dist, *, weights: bool = True) -> Path | None:
        return None

    def shape(self, config: Config, vocab_size: int, *, folder: Path | None) -> MixerShape:
        return MixerShape(vocab_size, config.model.hidden_size, config.model.num_layers)

    def read_shape(self, values: Mapping[str, Any]) -> MixerShape:
        return MixerShape(**values)


class MixerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = Linear(width, width, bias=False)
        self.out = Linear(width, width, bias=False)

    def forward(self, x_btd: Tensor, follows_bt1: Tensor) -> Tensor:
        shifted = F.pad(x_btd[:, :-1], (0, 0, 1, 0)) * follows_bt1
        out: Tensor = x_btd + self.out(torch.tanh(self.before(shifted)))
        return out


class Mixer(Model):
    def __init__(self, shape: MixerShape, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.compute_dtype = shape, compute_dtype
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.stack = nn.ModuleList(MixerBlock(shape.hidden_size) for _ in range(shape.num_layers))
        self.lm_head = Head(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        doc_ids: Tensor,
        *,
        packed: bool = True,
        head: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        x_btd = self.embed(input_ids).to(self.compute_dtype)
        follows_bt1 = (positions > 0).unsqueeze(-1).to(self.compute_dtype)
        for block in self.stack:
            x_btd = block(x_btd, follows_bt1)
        return x_btd if head is None else self.lm_head(x_btd, head)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.stack)

    @property
    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    def units(self) -> Units:
        blocks = tuple(self.stack)
        return Units(sharded=(self.embed, *blocks, self.lm_head), inseparable=(self.stack,), compiled=blocks)

    def hf_classes(self) -> dict[str, str]:
        return {"MixerLayer": "MixerBlock"}

    def flops(self) -> Flops:
        head = 6.0 * self.lm_head.weight.numel()
        return Flops(6.0 * sum(p.numel() for p in self.stack.parameters()) + head, head, attention=0.0)

    def block_memory(self, block: nn.Module, micro: Micro) -> BlockMemory:
        wide = micro.n * micro.c * self.shape.hidden_size
        casts = 0 if micro.gathered else micro.c * sum(p.numel() for p in block.parameters() if micro.c != FP32)
        product = Value("product", wide, 2.0 * micro.n * self.shape.hidden_size**2)
        return BlockMemory(
            entry=wide,
            saved=2 * wide,  # the shifted input, and tanh's output, which `out` reads too
            selected=3 * wide,
            values=(Value("cheap", wide), product, product),
            casts=(0, casts),
            freed=(FP32 - micro.c) * casts // micro.c,
            gradients=2 * wide,
        )

    def outer_memory(self, micro: Micro) -> OuterMemory:
        weight, n = self.lm_head.weight, micro.n
        logits = min(CHUNK_TOKENS_IN_TORCH, n) * self.shape.vocab_size * (micro.c + FP32)
        end = n * micro.c * self.shape.hidden_size  # the gradient of what the last block gives: the loss makes it
        return OuterMemory(end + n * micro.c, FP32 * weight.numel() + logits, FP32 * weight.numel())


# --- the recipe -------------------------------------------------------------------------------------------------------


class Mixing:
    """Next tokens of conversations, judged by perplexity too; it remembers how often it was judged."""

    family = MixerFamily()

    def __init__(self) -> None:
        self.judged = 0

    @property
    def state(self) -> Mixing:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"judged": self.judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.judged = state["judged"]

    def hashes(self, basis: Basis) -> dict[str, str]:
        return {"tokenizer": tokenizer_hash(basis.tokenizer)}

    def data(self, config: Config, ranks: Ranks, basis: Basis, *, run_dir: Path | None) -> Data:
        return build_data(config, ranks, basis.tokenizer, run_dir=run_dir, model_vocab=basis.shape.vocab_size)

    def loss(self, config: Config) -> LossFn:
        return partial(loss_in_bits, packed=config.data.packing)

    def largest_batch(self, config: Config) -> Batch:
        return largest_batch(config)

    def evaluate(self, run: Run, is_stop_requested: Callable[[], bool]) -> Evaluated | None:
        found = held_out_loss(run, is_stop_requested)
        if found is None:
            return None
        self.judged += 1
        return replace(found, metrics={**found.metrics, "perplexity": math.exp(found.loss), "judged": self.judged})


def loss_in_bits(model: nn.Module, batch: Batch, *, packed: bool) -> LossSum:
    """The loss with a term beside it."""
    loss = sft_loss(model, batch, packed=packed)
    return replace(loss, terms={"bits": loss.total / math.log(2)})


def mixing_on(rows: str, *, backend: str = "pytorch", export: bool = False, **sections: Any) -> Config:
    train = {"steps": 4, "micro_batch_size": 2, "global_batch_size": 6, "eval_every": 2, "save_every": 2}
    return config_of(
        target={"train_backend": backend, "gpu_ranks": [0] if backend == "pytorch" else [0, 1]},
        model={"hidden_size": 32, "num_layers": 2},
        data={"train": [rows], "eval_fraction": 0.2, "seq_len": 96},
        optim={"learning_rate": 0.1, "warmup_steps": 0},
        **{**sections, "train": {**train, **sections.get("train", {})}},
        run={"export": export},
    )


def train_rank(dist: Dist, run_dir: str, rows: str, backend: str, sections: dict[str, Any]) -> int:
    Path(run_dir).mkdir(exist_ok=True)
    return train(Mixing(), mixing_on(rows, backend=backend, **sections), Path(run_dir), dist)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in records(run_dir) if "eval_loss" in record]


@pytest.fixture(scope="module")
def trained(rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps in one process."""
    run_dir = tmp_path_factory.mktemp("mixer") / "run"
    assert train_rank(ALONE, str(run_dir), rows, "pytorch", {}) == 0
    return run_dir


# --- what the two protocols carry -------------------------------------------------------------------------------------


def test_another_family_trains_and_its_recipe_judges(trained):
    found = evaluations(trained)
    assert [record["judged"] for record in found] == [1, 2, 3]
    assert found[-1]["perplexity"] == pytest.approx(math.exp(found[-1]["eval_loss"]))
    assert found[-1]["eval_loss"] < found[0]["eval_loss"] - 0.5
    assert json.loads((trained / "outcome.json").read_text())["state"] == "succeeded"


def check_bits(run_dir: Path) -> None:
    told = records(run_dir)
    assert [r["bits"] for r in told if "loss" in r] == pytest.approx([n / math.log(2) for n in losses(told)])
    evals = evaluations(run_dir)
    assert [r["eval_bits"] for r in evals] == pytest.approx([r["eval_loss"] / math.log(2) for r in evals])


def test_terms_of_a_loss_are_recorded_beside_it(trained):
    check_bits(trained)


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_another_family_spread_over_ranks_has_the_losses_of_one(rows, trained, tmp_path, backend):
    assert run_ranks(train_rank, 2, str(tmp_path / "run"), rows, backend, {}) == [0, 0]
    assert losses(records(tmp_path / "run")) == pytest.approx(losses(records(trained)), rel=1e-5)
    check_bits(tmp_path / "run")


@pytest.mark.soak
def test_blocks_of_another_family_are_compiled(rows, trained, tmp_path, capsys):
    assert train_rank(ALONE, str(tmp_path / "run"), rows, "pytorch", {"parallel": {"compile": True}}) == 0
    assert "compile on" in capsys.readouterr().out
    assert losses(records(tmp_path / "run")) == pytest.approx(losses(records(trained)), rel=1e-5)


def test_state_of_a_recipe_goes_through_checkpoints(rows, trained, tmp_path):
    run_dir = tmp_path / "run"
    for _ in range(2):
        train_rank(ALONE, str(run_dir), rows, "pytorch", {"train": {"stop_after_steps": 2}})
    saved = json.loads((run_dir / "checkpoints/step_000002/state.json").read_text())
    assert (saved["recipe"], saved["shape"]["hf_class"]) == ({"judged": 1}, None)
    assert losses(records(run_dir)) == losses(records(trained))
    assert [record["judged"] for record in evaluations(run_dir)][-1] == 2


@pytest.mark.parametrize("remembers", [True, False])
def test_checkpoint_with_and_without_state_are_not_taken_for_each_other(rows, tmp_path, remembers):
    recipes = [Mixing(), replace(sft_recipe(), family=MixerFamily())]
    first, second = recipes if remembers else recipes[::-1]
    config = mixing_on(rows, train={"stop_after_steps": 2})
    train(first, config, tmp_path, ALONE)
    assert ("recipe" in json.loads((tmp_path / "checkpoints/step_000002/state.json").read_text())) == remembers
    with pytest.raises(ModelError, match="the state of another recipe" if remembers else "no state of its recipe"):
        train(second, config, tmp_path, ALONE)


def test_another_family_takes_adapters_beside_its_products(rows, tmp_path):
    assert train_rank(ALONE, str(tmp_path / "run"), rows, "pytorch", {"lora": {"rank": 2, "targets": ["out"]}}) == 0
    first, *_, last = evaluations(tmp_path / "run")
    assert last["eval_loss"] < first["eval_loss"]


def test_export_of_a_family_that_transformers_lacks_is_refused_at_the_start(rows, tmp_path):
    with pytest.raises(ConfigError) as caught:
        train(Mixing(), mixing_on(rows, export=True), tmp_path, ALONE)
    assert "hint: set run.export=false" in caught.value.render()


# --- plans ------------------------------------------------------------------------------------------------------------


def planning(**sections: Any) -> Config:
    return config_of(data={"seq_len": 64, "packing": True}, train={"micro_batch_size": 3}, **sections)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_bytes_of_another_family_are_what_autograd_saves(mode):
    shape, config = MixerShape(101, 48, 6), planning(parallel={"activation_checkpointing": mode})
    said = estimate_memory(shape, config, world_size=1).activations
    batch = packed_batch([[40, 20], [64], [30]], length=64)
    assert said == pytest.approx(saved_bytes(config, shape, batch), rel=0.1)


def test_plan_for_a_small_card_computes_blocks_of_another_family_again():
    shape, config = MixerShape(101, 64, 24), planning(target={"device": "cuda"})
    kernels = Kernels(triton=False, compiled=False)
    needs = estimate_memory(shape, config, world_size=1, kernels=kernels).total
    fit = fit_into(config, shape, free=needs, world_size=1, kernels=kernels)
    assert fit.choice is not None and fit.choice.fits
    assert fit.config.parallel.activation_checkpointing in ("selective", "full")


@pytest.mark.parametrize(
    ("parallel", "groups"),
    [
        ({}, ["stack.0", "stack.1", "embed", "lm_head", ""]),
        ({"wrap_policy": "classes", "wrap_classes": ["MixerLayer"]}, ["stack.0", "stack.1", ""]),
    ],
)
def test_groups_are_the_units_of_another_family(parallel, groups):
    config = planning(target={"train_backend": "fsdp", "gpu_ranks": [0, 1]}, parallel=parallel)
    plan = plan_wrapping(build_model(config, MixerShape(101)), config, 2)
    assert [group.name for group in plan.groups] == groups
    assert plan.params == MixerShape(101).num_params == 2 * 101 * 24 + 4 * 24 * 24


def test_inspection_shows_another_family(rows):
    shown = inspect_run(mixing_on(rows), samples=1, recipe=Mixing())
    assert shown.parameters.total == shown.plan.params == 2 * 260 * 32 + 4 * 32 * 32
    assert shown.memory.parameters == 4 * shown.parameters.total
