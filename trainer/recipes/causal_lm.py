"""Training of a causal language model, from tokenizer to verified export: the common part of its recipes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.batch import Batch
from trainer.checkpoint.states import ExtraState
from trainer.data.batches.micro_batches import Ranks
from trainer.data.batches.steps import largest_batch
from trainer.data.loader import Data, check_same_rows
from trainer.dist import Dist
from trainer.export.finish import finish
from trainer.failures.oom import oom_advice
from trainer.memory.fitting import MemoryKeeper
from trainer.models.attention import fastest_kernels
from trainer.models.families.decoder_shape import DECODERS
from trainer.models.losses import sft_loss
from trainer.models.protocol import Family
from trainer.profile.trace import step_watchers
from trainer.schema import Config
from trainer.train import loop
from trainer.train.build import build_run, seed_everything
from trainer.train.evaluate import held_out_loss
from trainer.train.plan_log import log_plan
from trainer.train.probe import probe
from trainer.train.recipe import Basis, Recipe, read_basis
from trainer.train.resolve_defaults import resolve_defaults
from trainer.train.run import Evaluated, LossFn, Run
from trainer.train.samples import read_prompts, sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def train(recipe: Recipe, config: Config, run_dir: Path, dist: Dist) -> int:
    """Train as configured, write everything into `run_dir`, and return the exit code."""
    dist.startup.enter("data")
    resolved = resolve_defaults(config, dist, run_dir)
    config = resolved.config
    basis = read_basis(recipe, config, dist)
    seed_everything(config, dist)
    prompts = read_prompts(config, basis.tokenizer, basis.shape)
    data = recipe.data(config, dist, basis, run_dir=run_dir)
    check_same_rows(data, dist)
    memory = MemoryKeeper(config, basis.shape, run_dir, dist)
    advice = oom_advice(lambda: memory.config, basis.shape, dist, on_failure=memory.record_failure)
    with closing(data), advice, fastest_kernels():
        run = build_run(recipe, memory.config, run_dir, dist, basis=basis, data=data)
        run.sample = sampler(run, prompts) if prompts else None
        log_plan(run, [*resolved.lines, *memory.fit.lines])
        probe(run, memory)
        result = loop.train(run, watchers=step_watchers)
        return finish(run, result, shape=basis.shape, tokenizer=basis.tokenizer)


@dataclass(frozen=True)
class CausalLM:
    """The recipe of a language model that predicts the next token: `trainer.train.recipe.Recipe`."""

    build_data: Callable[..., Data]
    """Called as build_data(config, ranks, tokenizer, run_dir=…, model_vocab=…)."""
    hash_of: Callable[[PreTrainedTokenizerFast], str]
    """A hash of the tokenizer that changes if the tokenized data would change."""
    family: Family = DECODERS
    state: ExtraState | None = None

    def hashes(self, basis: Basis) -> dict[str, str]:
        return {"tokenizer": self.hash_of(basis.tokenizer)}

    def data(self, config: Config, ranks: Ranks, basis: Basis, *, run_dir: Path | None) -> Data:
        return self.build_data(config, ranks, basis.tokenizer, run_dir=run_dir, model_vocab=basis.shape.vocab_size)

    def loss(self, config: Config) -> LossFn:
        return partial(sft_loss, packed=config.data.packing)

    def largest_batch(self, config: Config) -> Batch:
        return largest_batch(config)

    def evaluate(self, run: Run, is_stop_requested: Callable[[], bool]) -> Evaluated | None:
        return held_out_loss(run, is_stop_requested)
