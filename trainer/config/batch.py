"""How large a micro-batch is, and the rules of the keys that say so. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.broken import Broken
from trainer.schema import Config

KEY = "train.micro_batch_tokens"
MULTIPLE = 8
"""Unpacked rows are padded to a multiple of it: matrix products are slower on other sizes."""


@dataclass(frozen=True)
class BatchRules:
    """What decides the shape of a micro-batch.

    `packing`: every row is seq_len long; otherwise rows end with the longest of their micro-batch. `micro_batch_tokens`
    bounds rows x length of a micro-batch; without it each has micro_batch_size rows.
    """

    seq_len: int
    packing: bool
    micro_batch_size: int
    micro_batch_tokens: int | None = None

    @classmethod
    def of(cls, config: Config) -> BatchRules:
        train, data = config.train, config.data
        return cls(data.seq_len, data.packing, train.micro_batch_size, train.micro_batch_tokens)

    def padded(self, length: int) -> int:
        """The length of rows of which the longest holds `length` tokens."""
        return self.seq_len if self.packing else min(-(-max(length, 1) // MULTIPLE) * MULTIPLE, self.seq_len)

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch at most, padding counted."""
        return self.micro_batch_tokens or self.micro_batch_size * self.seq_len

    @property
    def rows(self) -> int:
        """Rows of seq_len tokens in it, one at least."""
        return max(1, self.tokens // self.seq_len)


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
