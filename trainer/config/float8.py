"""What `train.float8` asks of the rest of a config. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.batch import BatchRules
from trainer.config.keys import Broken
from trainer.config.parallel import is_compiled
from trainer.schema import Config

MULTIPLE = 16
"""What the sizes of all three dimensions of a float8 product divide by (torch._scaled_mm)."""


def why_no_float8(config: Config) -> str | None:
    """What in a config float8 products cannot be had with; None when nothing is."""
    if config.train.precision == "fp32":
        return "products are in fp32 (train.precision)"
    if config.target.device == "cpu":
        return "target.device is cpu"
    if not is_compiled(config):
        return "parallel.compile is false, and casts to float8 that are not compiled take longer than they save"
    if not config.data.packing:
        return f"data.packing is false: rows are of any length, and float8 needs multiples of {MULTIPLE} tokens"
    tokens = BatchRules.of(config).tokens
    if tokens % MULTIPLE:
        return f"train.micro_batch_size x data.seq_len is {tokens}, not a multiple of {MULTIPLE}, which float8 needs"
    return None


def float8_rules(config: Config) -> Iterator[Broken]:
    """Where `train.float8` contradicts other keys; what `auto` cannot have, it does without."""
    key, wanted = "train.float8", config.train.float8
    if wanted == "off":
        return
    if config.train.precision == "fp32":
        message = f"{key} is {wanted}, but train.precision is fp32: float8 is less than bf16"
        yield Broken(key, message, f"drop {key}, or train.precision", ("train.precision",))
    elif wanted == "on" and (why := why_no_float8(config)):
        yield Broken(key, f"{key} is on, but {why}", f"set {key}=auto, which then stays with bf16, or change that")


def float8_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """`auto` where the config itself rules float8 out; what the device rules out is told by the run."""
    if config.train.float8 == "auto" and (why := why_no_float8(config)):
        yield ["train.float8"], f", {why}"
