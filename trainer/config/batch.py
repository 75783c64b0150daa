"""The size of a micro-batch, and the rules of the keys that determine it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.keys import Broken
from trainer.config.target import ANY_WORLD, World
from trainer.schema import Config

BATCH_KEYS = ("train.grad_accum_steps", "train.micro_batch_size", "target.gpu_ranks")
KEY = "train.micro_batch_tokens"
MULTIPLE = 8
"""Unpacked rows are padded to a multiple of this: matrix products are slower with other sizes."""


@dataclass(frozen=True)
class BatchRules:
    """The values that determine the shape of a micro-batch.

    `packing`: every row is seq_len long; otherwise rows are as long as the longest row of their micro-batch.
    `micro_batch_tokens` limits rows x length of a micro-batch; without it each has micro_batch_size rows.
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
        """The padded length of rows if the longest row has `length` tokens."""
        return self.seq_len if self.packing else min(-(-max(length, 1) // MULTIPLE) * MULTIPLE, self.seq_len)

    @property
    def tokens(self) -> int:
        """The maximum number of positions in a micro-batch, with padding."""
        return self.micro_batch_tokens or self.micro_batch_size * self.seq_len

    @property
    def rows(self) -> int:
        """The number of rows of seq_len tokens in it, at least one."""
        return max(1, self.tokens // self.seq_len)


def batch_rules(config: Config, world: World) -> Iterator[Broken]:
    t, n = config.train, world.ranks
    total = t.global_batch_size
    if total is None or world == ANY_WORLD:
        return
    if total < n:
        message = f"train.global_batch_size is {total}, less than one row for each of {n} processes"
        yield Broken("train.global_batch_size", message, f"make it {n} or more", ("target.gpu_ranks",))
    accum = t.grad_accum_steps
    if accum is not None and t.micro_batch_tokens is None and total != t.micro_batch_size * accum * n:
        product = f"micro_batch_size {t.micro_batch_size} x grad_accum_steps {accum} x {_processes(n)}"
        message = f"train.global_batch_size is {total}, but {product} = {t.micro_batch_size * accum * n}"
        yield Broken(
            "train.global_batch_size", message, "set only one of global_batch_size and grad_accum_steps", BATCH_KEYS
        )


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"


def micro_batch_tokens_rules(config: Config) -> Iterator[Broken]:
    """The rules for a token budget and the keys beside it."""
    train, data = config.train, config.data
    budget = train.micro_batch_tokens
    if budget is None:
        return
    if data.packing:
        rows = BatchRules.of(config).rows
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
    """Keys that have no effect beside a token budget, and why."""
    if config.train.micro_batch_tokens is not None:
        yield ["train.micro_batch_size"], f", {KEY} decides how many rows a forward takes"
