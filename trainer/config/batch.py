"""Rules of the keys that say how large a micro-batch is. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.broken import Broken
from trainer.schema import Config

KEY = "train.micro_batch_tokens"


def micro_batch_tokens_rules(config: Config) -> Iterator[Broken]:
    """What a token budget needs beside it."""
    train, data = config.train, config.data
    budget = train.micro_batch_tokens
    if budget is None:
        return
    if data.packing:
        rows = max(1, budget // data.seq_len)
        message = f"{KEY} is {budget}, but with data.packing every row has data.seq_len tokens, {data.seq_len}"
        yield Broken(
            KEY, message, f"set train.micro_batch_size={rows} instead, or data.packing=false", ("data.packing",)
        )
    elif budget < data.seq_len:
        message = f"{KEY} is {budget}, less than one row of data.seq_len tokens, {data.seq_len}"
        yield Broken(KEY, message, f"make it {data.seq_len} or more", ("data.seq_len",))
    if train.global_batch_size is None:
        message = f"{KEY} is {budget}, but train.global_batch_size is null: nothing says how many rows a step has"
        yield Broken(KEY, message, "set train.global_batch_size")
    if train.grad_accum_steps is not None:
        message = f"train.grad_accum_steps is {train.grad_accum_steps}, but with {KEY} the tokens decide that"
        yield Broken(
            "train.grad_accum_steps", message, "drop it; train.global_batch_size says how many rows a step has"
        )


def micro_batch_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that do nothing beside a token budget, and why."""
    if config.train.micro_batch_tokens is not None:
        yield ["train.micro_batch_size"], f", {KEY} decides how many rows a forward takes"
