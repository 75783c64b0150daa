"""Pretraining of a causal language model on plain text and token files."""

from __future__ import annotations

from pathlib import Path

from trainer.data.corpus import build_corpus
from trainer.data.tokenize.tokenizer import vocabulary_hash
from trainer.dist import Dist
from trainer.recipes.causal_lm import CausalLM, train
from trainer.schema import Config


def recipe() -> CausalLM:
    return CausalLM(build_corpus, vocabulary_hash)


def run(config: Config, run_dir: Path, dist: Dist) -> int:
    """Train as configured, write everything into `run_dir`, and return the exit code."""
    return train(recipe(), config, run_dir, dist)
