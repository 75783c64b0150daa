"""The combined meaning of the keys of `parallel`, and values that contradict or cannot be honoured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.config.fsdp1 import STRATEGIES
from trainer.config.keys import Broken
from trainer.config.target import ANY_WORLD, World
from trainer.errors import ConfigError
from trainer.schema import Config, ParallelConfig

STRATEGY, RESHARD, REPLICAS = "parallel.sharding_strategy", "parallel.reshard_after_forward", "parallel.dp_replicate"

HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

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
    """The combined meaning of `sharding_strategy`, `reshard_after_forward` and `dp_replicate`, which must not
    contradict each other."""
    reshard = options.reshard_after_forward
    full, kept = ("FULL_SHARD", "SHARD_GRAD_OP") if (options.dp_replicate or 1) == 1 else HYBRIDS
    word = options.sharding_strategy or (kept if reshard is False else full)
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


def broken_rules(config: Config, world: World) -> Iterator[Broken]:
    """The rules of this section that the config breaks."""
    yield from _contradictions(config.parallel)
    if config.parallel.activation_checkpointing == "budget" and not is_compiled(config):
        why = "parallel.compile is false" if config.parallel.compile is False else "target.device is cpu"
        message = f"parallel.activation_checkpointing is budget, which the compiler keeps to, but {why}"
        hint = "set parallel.compile=true, or activation_checkpointing=selective"
        yield Broken("parallel.activation_checkpointing", message, hint, ("parallel.compile", "target.device"))
    if world == ANY_WORLD:
        return
    no_graphs = why_no_graphs(config, backend_of(config, world.ranks))
    if config.parallel.cuda_graphs and no_graphs:
        message = f"parallel.cuda_graphs is true, and {no_graphs}"
        yield Broken("parallel.cuda_graphs", message, "drop it: graphs are used by themselves where they help")
    if backend_of(config, world.ranks) == "fsdp":
        yield from _sizes(config.parallel, world)


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
    if options.dp_replicate is not None and word is not None and not sharding(options).hybrid:
        message = f"{REPLICAS} is {options.dp_replicate}, but {STRATEGY} is {word}"
        yield Broken(REPLICAS, message, f"set {STRATEGY}=HYBRID_SHARD, or drop dp_replicate", (STRATEGY,))
    if options.wrap_policy == "classes" and not options.wrap_classes:
        message = "parallel.wrap_policy is classes, but parallel.wrap_classes is empty"
        yield Broken(
            "parallel.wrap_policy", message, "name them: parallel.wrap_classes=Block", ("parallel.wrap_classes",)
        )


def _sizes(options: ParallelConfig, world: World) -> Iterator[Broken]:
    """How many ranks share parameters or replicas, against the number of ranks."""
    how, replicas, world_size = sharding(options), options.dp_replicate, world.ranks
    if how.hybrid and replicas is None and world.nodes > 1:
        return  # one replica on each node: `mesh_of` checks it, which knows the ranks on each
    if how.hybrid and replicas is None:
        message = f"{STRATEGY} is {how.word}, and {REPLICAS} does not say how many replicas {world_size} rank(s) make"
        yield Broken(REPLICAS, message, f"set {REPLICAS} to a divisor of {world_size}", (STRATEGY,))
    elif how.hybrid and replicas is not None and world_size % replicas:
        message = f"{REPLICAS} is {replicas}, which does not divide {world_size} ranks"
        yield Broken(REPLICAS, message, f"use one of {_divisors(world_size)}", ("target.gpu_ranks",))
    else:
        shards = world_size // (replicas or 1)
        yield from _smaller_group(how, shards)


@dataclass(frozen=True)
class Mesh:
    """How a run on several nodes spreads the model with FSDP. `replicas`: the value of `dp_replicate` to use."""

    replicas: int | None
    line: str


def mesh_of(config: Config, counts: Sequence[int], *, in_order: bool = True) -> Mesh | None:
    """The mesh of a run on several nodes: as the config says, else one replica on each node. None without FSDP.

    `counts`: the ranks on each node; `in_order`: whether the ranks of each node are adjacent. Raises ConfigError for
    replicas that cannot be made of these ranks.
    """
    ranks, options = sum(counts), config.parallel
    if len(counts) < 2 or backend_of(config, ranks) != "fsdp":
        return None
    how, given = sharding(options), options.dp_replicate
    uneven = f"the nodes have {', '.join(map(str, counts))} ranks" if len(set(counts)) > 1 else ""
    uneven = uneven or ("" if in_order else "the ranks of a node are not adjacent")
    if how.hybrid and uneven:
        asked = f"{STRATEGY} is {how.word}" if options.sharding_strategy else f"{REPLICAS} is {given}"
        message = f"{asked}, and replicas need as many ranks on each node: {uneven}"
        raise ConfigError(message, hint=f"use {STRATEGY}=FULL_SHARD or target.train_backend=ddp")
    if how.hybrid and given is not None and ranks % given:
        message = f"{REPLICAS} is {given}, which does not divide {ranks} ranks"
        raise ConfigError(message, hint=f"use one of {_divisors(ranks)}")
    is_whole = isinstance(options.reshard_after_forward, bool | None)  # a number is a part of one replica over all
    is_default = given is None and options.sharding_strategy is None and is_whole
    if is_default and uneven:
        return Mesh(None, f"mesh: 1 replica x {ranks} shards: {uneven}, so a replica on each node is not possible")
    replicas = len(counts) if given is None and (how.hybrid or is_default) else given
    for broken in _smaller_group(how, ranks // (replicas or 1)):
        raise ConfigError(broken.message, hint=broken.hint)
    return Mesh(replicas, _render_mesh(replicas or 1, ranks, counts))


def _render_mesh(replicas: int, ranks: int, counts: Sequence[int]) -> str:
    shape = f"mesh: {replicas} replica{'s' * (replicas > 1)} x {ranks // replicas} shard{'s' * (ranks > replicas)}"
    if replicas == 1:
        return f"{shape}, over {len(counts)} nodes"
    if replicas != len(counts):
        return f"{shape} ({REPLICAS}={replicas}) on {len(counts)} nodes"
    held = "each rank holds the whole model" if ranks == replicas else "each node holds a whole replica"
    return f"{shape}: {held}; {STRATEGY}=FULL_SHARD shards over all {ranks} ranks"


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
