"""The combined meaning of the keys of `parallel`, and values that contradict or cannot be honoured. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainer.config.fsdp1 import STRATEGIES
from trainer.config.keys import Broken
from trainer.schema import Config, ParallelConfig, gpu_count

STRATEGY, RESHARD, REPLICAS = "parallel.sharding_strategy", "parallel.reshard_after_forward", "parallel.dp_replicate"

FSDP_KEYS = [
    f"parallel.{name}"
    for name in (
        "reshard_after_forward",
        "dp_replicate",
        "wrap_policy",
        "min_num_params",
        "wrap_classes",
        "ignored_modules",
        "forward_prefetch",
        "backward_prefetch_depth",
        "cpu_offload",
        "reduce_every_micro_batch",
    )
]


@dataclass(frozen=True)
class Sharding:
    """A sharding strategy in terms of FSDP2."""

    word: str
    replicated: bool
    """NO_SHARD, as in DDP."""
    hybrid: bool
    reshard: bool | int
    """Parameters after a group's forward: freed, kept, or kept sharded over this many ranks."""


def sharding(options: ParallelConfig) -> Sharding:
    """The combined meaning of `sharding_strategy` and `reshard_after_forward`, which must not contradict each other."""
    reshard = options.reshard_after_forward
    word = options.sharding_strategy or ("SHARD_GRAD_OP" if reshard is False else "FULL_SHARD")
    how = STRATEGIES[word]
    return Sharding(word, how.replicated, how.hybrid, not how.keeps if reshard is None else reshard)


def backend_of(config: Config, world_size: int) -> str:
    """The backend for this many ranks; also `pytorch` if it is requested for several, which is a separate error."""
    name = config.target.train_backend
    if name == "auto":
        name = "pytorch" if world_size == 1 else "fsdp"
    return "ddp" if name == "fsdp" and sharding(config.parallel).replicated else name


def recompute_mode(options: ParallelConfig) -> Literal["none", "budget", "selective", "full"]:
    """The effective `activation_checkpointing`; `none` if the key is not set."""
    return options.activation_checkpointing or "none"


def is_compiled(config: Config) -> bool:
    """Whether blocks are compiled on the machine that the config is for; on a GPU without Triton the run reports it."""
    wanted = config.parallel.compile
    return config.target.device != "cpu" if wanted is None else wanted


def why_no_graphs(config: Config, backend: str) -> str | None:
    """The setting that rules out CUDA graphs; None if there is none."""
    if config.target.device == "cpu":
        return "target.device is cpu"
    if backend != "pytorch":
        return f"the backend is {backend}, whose collectives are in no graph here"
    if config.parallel.compile is False:
        return "parallel.compile is false"
    if not config.data.packing:
        return "data.packing is false: rows are of different lengths"
    return "lora.dropout is not 0" if config.lora.dropout else None


def broken_rules(config: Config) -> Iterator[Broken]:
    """The rules of this section that the config breaks."""
    yield from _contradictions(config.parallel)
    if config.parallel.activation_checkpointing == "budget" and not is_compiled(config):
        why = "parallel.compile is false" if config.parallel.compile is False else "target.device is cpu"
        message = f"parallel.activation_checkpointing is budget, which the compiler keeps to, but {why}"
        hint = "set parallel.compile=true, or activation_checkpointing=selective"
        yield Broken("parallel.activation_checkpointing", message, hint, ("parallel.compile", "target.device"))
    world_size = gpu_count(config.target.gpu_ranks) if config.target.gpu_ranks else 1
    no_graphs = why_no_graphs(config, backend_of(config, world_size))
    if config.parallel.cuda_graphs and no_graphs:
        message = f"parallel.cuda_graphs is true, and {no_graphs}"
        yield Broken("parallel.cuda_graphs", message, "drop it: graphs are used by themselves where they help")
    if backend_of(config, world_size) == "fsdp":
        yield from _sizes(config.parallel, world_size)


def _contradictions(options: ParallelConfig) -> Iterator[Broken]:
    word, reshard = options.sharding_strategy, options.reshard_after_forward
    if word is not None and reshard is not None:
        shown = str(reshard).lower()
        both = f"{STRATEGY} is {word}, but {RESHARD} is {shown}"
        how = STRATEGIES[word]
        if how.replicated:
            yield Broken(RESHARD, f"{both}: nothing is sharded", f"drop {RESHARD}", (STRATEGY,))
        elif how.keeps != (reshard is False):
            meant = "keeps gathered parameters until the backward" if how.keeps else "frees them after the forward"
            yield Broken(RESHARD, f"{both}: {word} {meant}", "keep one of the two", (STRATEGY,))
    if options.dp_replicate is not None and not sharding(options).hybrid:
        message = f"{REPLICAS} is {options.dp_replicate}, but {STRATEGY} is {word or 'not given'}"
        yield Broken(REPLICAS, message, f"set {STRATEGY}=HYBRID_SHARD, or drop dp_replicate", (STRATEGY,))
    if options.wrap_policy == "classes" and not options.wrap_classes:
        message = "parallel.wrap_policy is classes, but parallel.wrap_classes is empty"
        yield Broken(
            "parallel.wrap_policy", message, "name them: parallel.wrap_classes=Block", ("parallel.wrap_classes",)
        )


def _sizes(options: ParallelConfig, world_size: int) -> Iterator[Broken]:
    """How many ranks share parameters or replicas, against the number of ranks."""
    how, replicas = sharding(options), options.dp_replicate
    if how.hybrid and replicas is None:
        message = f"{STRATEGY} is {how.word}, and {REPLICAS} does not say how many replicas {world_size} rank(s) make"
        yield Broken(REPLICAS, message, f"set {REPLICAS} to a divisor of {world_size}", (STRATEGY,))
    elif how.hybrid and replicas is not None and world_size % replicas:
        message = f"{REPLICAS} is {replicas}, which does not divide {world_size} ranks"
        yield Broken(REPLICAS, message, f"use one of {_divisors(world_size)}", ("target.gpu_ranks",))
    else:
        shards = world_size // (replicas or 1)
        yield from _smaller_group(how, shards)


def _smaller_group(how: Sharding, shards: int) -> Iterator[Broken]:
    if isinstance(how.reshard, bool):
        return
    possible = [size for size in _divisors(shards) if 1 < size < shards]
    if how.reshard not in possible:
        message = f"{RESHARD} is {how.reshard}, not a part of the {shards} rank(s) that share the parameters"
        hint = f"use true, false or one of {possible}" if possible else "use true or false"
        yield Broken(RESHARD, message, hint, ("target.gpu_ranks",))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def without_effect(config: Config, backend: str) -> Iterator[tuple[list[str], str]]:
    """Keys of the section that have no effect here with any value, and why. `backend`: the one in use."""
    options = config.parallel
    if backend == "pytorch":
        yield [STRATEGY, *FSDP_KEYS, "parallel.reduce_dtype", "parallel.sync_module_states"], " with pytorch"
    elif backend == "ddp":
        yield [*([] if sharding(options).replicated else [STRATEGY]), *FSDP_KEYS], " with ddp"
    else:
        if options.wrap_policy != "size":
            yield ["parallel.min_num_params"], f", parallel.wrap_policy is {options.wrap_policy}"
        if options.wrap_policy != "classes":
            yield ["parallel.wrap_classes"], f", parallel.wrap_policy is {options.wrap_policy}"
    train = config.train
    if backend == "fsdp" and train.grad_accum_steps in (None, 1) and train.global_batch_size is None:
        yield ["parallel.reduce_every_micro_batch"], ", a step has one micro-batch"
    mode = options.activation_checkpointing
    if mode in ("none", "budget", None):
        yield ["parallel.checkpoint_every"], f", parallel.activation_checkpointing is {mode or 'not given'}"
    if mode != "budget":
        yield ["parallel.activation_budget"], f", parallel.activation_checkpointing is {mode or 'not given'}"
    if config.target.device == "cpu":
        yield ["parallel.memory"], " on the CPU: it is about a GPU's memory"
    if config.model.init == "random" or config.model.name is None:
        yield ["parallel.sync_module_states"], ", random weights follow from the seed on every rank"
