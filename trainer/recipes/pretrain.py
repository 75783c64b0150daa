"""Pretraining of a causal language model on plain text, from token files to verified export."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trainer import loop
from trainer.building import build_run, check_length, pretrained_folder, seed_everything, tell_plan
from trainer.data.corpus import build_corpus
from trainer.data.tokenizer import load_tokenizer, quiet_transformers, vocab_size, vocabulary_hash
from trainer.dist import Dist
from trainer.finishing import finish
from trainer.losses import sft_loss
from trainer.models import hf
from trainer.oom import oom_advice
from trainer.schema import Config


def run(config: Config, run_dir: Path, dist: Dist) -> int:
    """Train as configured, write everything into `run_dir`, and return the exit code."""
    tokenizer = load_tokenizer(config)
    quiet_transformers()
    folder = pretrained_folder(config, dist)
    shape = hf.shape_from_config(config.model, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    seed_everything(config, dist)
    data = build_corpus(config, dist, tokenizer, run_dir=run_dir, vocab_size=shape.vocab_size)
    loss_fn = partial(sft_loss, packed=config.data.packing)
    hashes = {"tokenizer": vocabulary_hash(tokenizer)}
    with oom_advice(config, shape, dist):
        train = build_run(config, run_dir, dist, shape=shape, folder=folder, data=data, loss_fn=loss_fn, hashes=hashes)
        tell_plan(train)
        result = loop.train(train)
        return finish(train, result, shape=shape, tokenizer=tokenizer)
