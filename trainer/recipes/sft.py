"""Supervised fine-tuning of a causal language model on conversations."""

from __future__ import annotations

from pathlib import Path

from trainer.data.loader import build_data
from trainer.data.tokenize.tokenizer import tokenizer_hash
from trainer.dist import Dist
from trainer.recipes.causal_lm import CausalLM, train
from trainer.schema import Config


def recipe() -> CausalLM:
    return CausalLM(build_data, tokenizer_hash)


def run(config: Config, run_dir: Path, dist: Dist) -> int:
    """Train as configured, write everything into `run_dir`, and return the exit code."""
    return train(recipe(), config, run_dir, dist)
