"""Rules of the keys that determine where a job runs: its GPUs and its environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.fields import show
from trainer.config.keys import Broken
from trainer.schema import AUTO_GPUS, Config, gpu_count

GPU_UUID = re.compile(r"(GPU|MIG)-[0-9A-Fa-f]{4,}[0-9A-Fa-f-]*")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The launcher sets them for every process; a second source would silently win or lose.
LAUNCHER_NAMES = {
    "CUDA_VISIBLE_DEVICES": "target.gpu_ranks says which GPUs the job sees",
    "CUDA_DEVICE_ORDER": "it is PCI_BUS_ID always, so that target.gpu_ranks are nvidia-smi's indices",
} | dict.fromkeys(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "torchrun sets it for every process",
)


@dataclass(frozen=True)
class World:
    """How many ranks, on how many nodes, a config is checked for."""

    ranks: int
    nodes: int = 1

    @staticmethod
    def of(config: Config) -> World:
        """The ranks of a run on one node."""
        return World(num_processes(config))


ANY_WORLD = World(0, 0)
"""For a config whose ranks are not known, as in a checkpoint: rules that depend on them do not apply."""


def num_processes(config: Config) -> int:
    """The number of the job's processes on one node: one for each GPU in gpu_ranks, or one for a script without
    torchrun."""
    return 1 if config.script is not None and not config.torchrun else gpu_count(config.target.gpu_ranks)


def gpu_rules(config: Config) -> Iterator[Broken]:
    key, ranks = "target.gpu_ranks", config.target.gpu_ranks
    if not ranks:
        yield Broken(
            key, f"{key} is empty", "name one GPU index for each process; with target.device=cpu any index does"
        )
    autos = [rank for rank in ranks if str(rank).startswith("auto")]
    if autos and len(ranks) == 1 and not AUTO_GPUS.fullmatch(str(ranks[0])):
        yield Broken(key, f"{key} holds {ranks[0]!r}, not a number of GPUs", "write auto:2 for the two freest")
    if autos and len(ranks) > 1:
        yield Broken(key, f"{key} is {show(ranks)}, auto:N stands alone", "auto:2 for the two freest, or name each one")
    for rank in [] if autos else ranks:
        number = _index(rank)
        if number is not None and number < 0:
            yield Broken(key, f"{key} holds {rank}, a GPU index is 0 or more")
        if number is None and not GPU_UUID.fullmatch(str(rank)):
            yield Broken(key, f"{key} holds {rank!r}, expected an index such as 0 or a UUID such as GPU-8932f937-…")
    seen: set[str] = set()
    for rank in ranks:
        name = str(rank).upper() if _index(rank) is None else str(_index(rank))
        if name in seen:
            hint = "name each GPU once; each gets one process"
            yield Broken(key, f"{key} is {show(ranks)}: it names {rank} twice", hint)
        seen.add(name)
    if len({_index(rank) is None for rank in ranks}) > 1:
        yield Broken(key, f"{key} is {show(ranks)}, CUDA takes indices or UUIDs, not both")
    if config.target.train_backend == "pytorch" and num_processes(config) > 1:
        message = (
            f"target.train_backend is pytorch, one process, but {key} names {gpu_count(ranks)} GPUs: {show(ranks)}"
        )
        yield Broken("target.train_backend", message, "use ddp or fsdp, or name one GPU", (key,))


def _index(rank: int | str) -> int | None:
    """The GPU index in an entry, also if written as text; None for anything else."""
    if isinstance(rank, int):
        return rank
    return int(rank) if re.fullmatch(r"[-+]?[0-9]{1,9}", rank) else None


def environment_rules(config: Config) -> Iterator[Broken]:
    env, secrets = config.target.env, config.target.secrets
    named = [(f"target.env.{name}", name) for name in env]
    named += [(f"target.secrets[{i}]", name) for i, name in enumerate(secrets)]
    for key, name in named:
        section = key.partition("[")[0] if "[" in key else "target.env"
        if not ENV_NAME.fullmatch(name):
            hint = "a secret is given by its name; its value stays in your environment" if "[" in key else ""
            yield Broken(key, f"{section} holds {name!r}, not a name of an environment variable", hint)
        reason = "it is the launcher's own" if name.startswith("TORCHFERRY_") else LAUNCHER_NAMES.get(name)
        if reason:
            yield Broken(key, f"{section} may not set {name}: {reason}")
    for i, name in enumerate(secrets):
        if name in env:
            yield Broken(f"target.env.{name}", f"{name} is in both target.env and target.secrets", "keep one of them")
        if name in secrets[:i]:
            yield Broken(f"target.secrets[{i}]", f"target.secrets names {name} twice")
