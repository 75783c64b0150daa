"""One optimizer step on given rows, split in one way or another; and the same by a plain torch loop over the rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny import tiny_shape
from trainer.batch import Batch, LossSum
from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import build_batches
from trainer.data.loader import Data
from trainer.data.tokenize.chat import Encoded
from trainer.dist import Dist
from trainer.metrics.log import MetricsLog
from trainer.models import losses
from trainer.models.build import build_model
from trainer.models.families.decoder import Decoder
from trainer.models.hf import init_random, named_weights
from trainer.models.layers import logits_head
from trainer.parallel.backend import Backend
from trainer.parallel.choose import make_backend
from trainer.schema import Config, OptimConfig, ParallelConfig, TargetConfig, TrainConfig
from trainer.tensors import local_tensor
from trainer.train.run import LossFn, Run
from trainer.train.step import train_step

SEQ_LEN = 24
LENGTHS = [[24], [3, 4], [12, 12], [2], [5, 6, 7], [20], [9], [24], [8, 8], [17, 5], [2, 2, 2], [23], [1], [1, 1]]
"""Of the documents of each row."""

Row = list[Encoded]


def make_rows() -> list[Row]:
    """16 rows; the last four have no target, so that one of four ranks has none at all."""
    generator = np.random.RandomState(0)
    rows = [[_document(generator, length, targets=True) for length in row] for row in LENGTHS]
    return [*rows, *([_document(generator, length, targets=False)] for length in (11, 24))]


def _document(generator: np.random.RandomState, length: int, *, targets: bool) -> Encoded:
    ids = generator.randint(101, size=length).astype(np.int32)
    return Encoded("", ids, generator.rand(length) > 0.3 if targets else np.zeros(length, dtype=bool))


# --- the ways to split ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """How a step's rows are taken: over backends and micro-batches, in which order, and how many of them."""

    loss: str
    backend: str
    micro_batch_size: int = 16
    micro_batch_tokens: int | None = None
    packing: bool = True
    shuffled: bool = False
    count: int = 16
    """How many of the rows."""
    tied: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    """Of the config's section `parallel`."""

    def __str__(self) -> str:
        size = f"{self.micro_batch_tokens}-tokens" if self.micro_batch_tokens else f"{self.micro_batch_size}-rows"
        flags = {"shuffled": self.shuffled, "unpacked": not self.packing, "untied": not self.tied}
        words = [self.loss, self.backend, f"{self.count}-rows-by-{size}", *(word for word, on in flags.items() if on)]
        words += [str(value) for _, value in self.options]
        return "-".join(words)


OPTIONS: list[dict[str, Any]] = [
    {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2},
    {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": "full"},
    {"ignored_modules": ["model.embed_tokens"]},
    {"reduce_every_micro_batch": True},
    {"reduce_every_micro_batch": True, "ignored_modules": ["model.embed_tokens"]},
    {"reduce_every_micro_batch": True, "sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2},
]
"""Ways of FSDP that reduce gradients in another way."""


def splits_of(loss: str, backend: str, world_size: int) -> Iterator[Split]:
    """1, 2 and 4 micro-batches a rank in two orders; untied; a token budget; counts that nothing divides; options."""
    base = Split(loss, backend)
    for micro_batches in (1, 2, 4):
        size = -(-16 // world_size // micro_batches)
        for shuffled in (False, True):
            yield replace(base, micro_batch_size=size, shuffled=shuffled)
    yield replace(base, micro_batch_size=2, tied=False)
    for tokens in (24, 64):
        yield replace(base, micro_batch_tokens=tokens, packing=False)
    for count in (1, 2, 5, 7):
        yield replace(base, micro_batch_size=2, count=count)
    if backend == "fsdp" and world_size == 4:
        for options in OPTIONS:
            yield replace(base, micro_batch_size=2, tied=False, options=tuple(options.items()))


def rows_of(split: Split) -> list[Row]:
    rows = make_rows()[: split.count]
    return [rows[index] for index in np.random.RandomState(1).permutation(len(rows))] if split.shuffled else rows


# --- the losses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossCase:
    """A loss as the trainer runs it, and the same of one row by plain torch: (sum, number of targets)."""

    ours: LossFn
    plain: Callable[[Decoder, Batch], tuple[Tensor, int]]


def plain_cross_entropy(decoder: Decoder, batch: Batch) -> tuple[Tensor, int]:
    logits = decoder(batch.input_ids, batch.positions, batch.doc_ids, head=logits_head)
    total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return total, int((batch.labels != -100).sum())


LOSSES = {"sft_loss": LossCase(partial(losses.sft_loss, chunk=32), plain_cross_entropy)}


def shipped_losses() -> set[str]:
    """The names of all functions of trainer.models.losses that return a LossSum."""
    functions = inspect.getmembers(losses, inspect.isfunction)
    own = {name: function for name, function in functions if function.__module__ == losses.__name__}
    return {name for name, function in own.items() if get_type_hints(function).get("return") is LossSum}


def spread_weights(module: nn.Module) -> None:
    """First weights, five times as large: near zero the gradients of the keys' norms are what cancellation leaves."""
    init_random(module, 0)
    for _, parameter in named_weights(module):
        if parameter.ndim > 1:
            local_tensor(parameter).data.mul_(5.0)


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stepped:
    """What a step did: the logged loss, the whole gradients it would have applied, and its calls among the ranks."""

    loss: float
    targets: int
    grads: dict[str, Tensor]
    reductions: int
    """Reduce-scatters with FSDP, all-reduces else."""


@cache
def plain_step(loss: str, *, count: int, tied: bool) -> Stepped:
    """One row after another in one process; losses and gradients summed in float64 and divided once."""
    decoder = Decoder(tiny_shape(tie_embeddings=tied))
    spread_weights(decoder)
    grads = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in decoder.named_parameters()}
    total, targets = 0.0, 0
    for row in make_rows()[:count]:
        (batch,) = build_batches([row], ranks=Alone(), rules=BatchRules(SEQ_LEN, True, 1), pad_id=0)
        row_total, row_targets = LOSSES[loss].plain(decoder, batch)
        decoder.zero_grad()
        row_total.backward()
        total, targets = total + row_total.item(), targets + row_targets
        for name, parameter in decoder.named_parameters():
            grads[name] += parameter.grad
    return Stepped(total / targets, targets, {name: grad / targets for name, grad in grads.items()}, 0)


def steps_of_rank(dist: Dist, splits: Sequence[Split]) -> list[Stepped]:
    """Each split's step, by the trainer's own train_step; gradients only on rank 0."""
    made: dict[Any, tuple[Backend, nn.Module]] = {}
    results = []
    for split in splits:
        key = split.backend, split.tied, str(split.options)
        if key not in made:
            made[key] = _prepared(dist, split)
        results.append(_step(dist, split, *made[key]))
    return results


def _config(split: Split) -> Config:
    return Config(
        target=TargetConfig(train_backend=split.backend),
        train=TrainConfig(precision="fp32"),
        optim=OptimConfig(learning_rate=1e-3, max_grad_norm=0),
        parallel=ParallelConfig(**dict(split.options)),
    )


def _prepared(dist: Dist, split: Split) -> tuple[Backend, nn.Module]:
    backend = make_backend(_config(split), dist)
    module = backend.prepare(build_model(_config(split), tiny_shape(tie_embeddings=split.tied)))
    spread_weights(module)
    return backend, module


def _step(dist: Dist, split: Split, backend: Backend, module: nn.Module) -> Stepped:
    rules = BatchRules(SEQ_LEN, split.packing, split.micro_batch_size, split.micro_batch_tokens)
    batches = build_batches(rows_of(split), ranks=dist, rules=rules, pad_id=0)
    recorder = Recorder(module, counted="reduce_scatter" if split.backend == "fsdp" else "allreduce")
    run = Run(
        config=_config(split),
        run_dir=Path(),
        dist=dist,
        backend=backend,
        module=module,
        optimizer=recorder,
        data=Data(OneStep(batches), None, None),
        loss_fn=LOSSES[split.loss].ours,
        log=MetricsLog(Path(), total_steps=1, enabled=False),
    )
    with recorder.calls:
        total, targets = train_step(run, 0, lr=0.0).read()[:2]
    grads = recorder.grads if dist.is_main else {}
    return Stepped(total / max(targets, 1), int(targets), grads, recorder.reductions)


class Alone:
    rank, world_size = 0, 1


class OneStep:
    """In the place of a TrainLoader: these micro-batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def step_batches(self, step: int) -> list[Batch]:
        return self._batches


class CountCalls(TorchDispatchMode):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.count = word, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.word in str(func)
        return func(*args, **(kwargs or {}))


class Recorder(torch.optim.Optimizer):
    """In the place of an optimizer: keeps the gradients that it is to apply, and how often they were reduced."""

    def __init__(self, module: nn.Module, *, counted: str) -> None:
        super().__init__(module.parameters(), {"lr": 0.0})
        self.calls = CountCalls(counted)
        self.grads: dict[str, Tensor] = {}
        self.reductions = 0
        self._module = module

    def step(self, closure: Any = None) -> None:
        self.reductions = self.calls.count
        for name, parameter in named_weights(self._module):
            grad = parameter.grad
            self.grads[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
