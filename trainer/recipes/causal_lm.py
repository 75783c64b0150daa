"""Training of a causal language model, from tokenizer to verified export: what its recipes have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.loader import Data
from trainer.data.tokenize.tokenizer import load_tokenizer, quiet_transformers, settle_offline, vocab_size
from trainer.dist import Dist
from trainer.export.finish import finish
from trainer.failures.oom import oom_advice
from trainer.memory.fitting import MemoryKeeper
from trainer.models.attention import fastest_kernels
from trainer.models.build import check_length, pretrained_folder
from trainer.models.losses import sft_loss
from trainer.models.shapes import shape_from_config
from trainer.profile.trace import step_watchers
from trainer.schema import Config
from trainer.train import loop
from trainer.train.build import build_run, seed_everything
from trainer.train.plan_log import tell_plan
from trainer.train.precision import settle_precision
from trainer.train.probe import probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class CausalLM:
    """What sets one recipe apart from another."""

    build_data: Callable[..., Data]
    """Called as build_data(config, dist, tokenizer, run_dir=…, model_vocab=…)."""
    hash_of: Callable[[PreTrainedTokenizerFast], str]
    """Changes with whatever of the tokenizer the data depends on."""


def train_causal_lm(config: Config, run_dir: Path, dist: Dist, recipe: CausalLM) -> int:
    """Train as configured, write everything into `run_dir`, and return the exit code."""
    dist.startup.enter("data")
    precision = settle_precision(config, dist, run_dir)
    config = precision.config
    settle_offline(config)
    folder = pretrained_folder(config, dist)
    tokenizer = load_tokenizer(config)
    quiet_transformers()
    shape = shape_from_config(config.model, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    seed_everything(config, dist)
    data = recipe.build_data(config, dist, tokenizer, run_dir=run_dir, model_vocab=shape.vocab_size)
    loss_fn = partial(sft_loss, packed=config.data.packing)
    hashes = {"tokenizer": recipe.hash_of(tokenizer)}
    memory = MemoryKeeper(config, shape, run_dir, dist)
    advice = oom_advice(lambda: memory.config, shape, dist, on_failure=memory.record_failure)
    with closing(data), advice, fastest_kernels():
        train = build_run(
            memory.config, run_dir, dist, shape=shape, folder=folder, data=data, loss_fn=loss_fn, hashes=hashes
        )
        tell_plan(train, [*precision.lines, *memory.fit.lines])
        probe(train, memory)
        result = loop.train(train, watchers=step_watchers)
        return finish(train, result, shape=shape, tokenizer=tokenizer)
