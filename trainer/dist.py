"""This process's rank, and the few collectives that everything else is built from.

A single process without torchrun has world size 1 and needs neither environment variables nor a process group: no
collective here then communicates.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as torch_dist

from trainer.nodes import Nodes, Storages, are_several, nodes_of, read_claim
from trainer.progress import Progress
from trainer.startup import Startup
from trainer.store_holder import holds_store

T = TypeVar("T")

COMM_TIMEOUT_ENV = "TORCHFERRY_COMM_TIMEOUT_S"
"""Seconds until a collective on the devices counts as hung (default: a minute after train.hang_timeout_s, or
CONTROL_TIMEOUT_ENV where that is 0)."""
CONTROL_TIMEOUT_ENV = "TORCHFERRY_CONTROL_TIMEOUT_S"
"""Seconds that ranks wait for each other at a barrier, e.g. while rank 0 writes an export (default 1800)."""

CONTROL_MARGIN_S = 10
"""Added to the control timeout of gloo groups: by then the watchdog has reported which rank is late."""

Group = torch_dist.ProcessGroup | None
"""A gloo group of all ranks; None in a world of one."""


class DistError(Exception):
    """The ranks cannot work together: an incomplete environment, or another rank's failure."""


@dataclass(frozen=True)
class Dist:
    """This process among the ranks."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control_group: torch_dist.ProcessGroup | None = None
    """A gloo group on the CPU for flags, barriers and objects; None in a world of one."""
    store: torch_dist.Store | None = field(default=None, compare=False)
    """The key-value store of the rendezvous; clone it for another thread. None without torchrun."""
    progress: Progress = field(default_factory=Progress, compare=False)
    """This rank's current phase, for the watchdog."""
    startup: Startup = field(default_factory=Startup, compare=False)
    """Measures the time until the first step, by phase."""
    nodes: Nodes | None = None
    """The nodes of the ranks; None if there is one, or if nothing tells."""
    storages: Storages | None = None
    """The separate storages of the run folder; None if every rank sees the same one."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_keeper(self) -> bool:
        """Whether this is the first rank on its storage of the run folder: rank 0, where all see the same one."""
        return self.rank == (0 if self.storages is None else self.storages.keeper(self.rank))

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among those on the same storage, and how many they are."""
        if self.storages is None:
            return self.rank, self.world_size
        ranks = self.storages.ranks(self.storages.of_rank[self.rank])
        return ranks.index(self.rank), len(ranks)


def start_dist(
    device_kind: Literal["cuda", "cpu"], *, init_method: str = "env://", comm_timeout_s: float = 120
) -> Dist:
    """This process's Dist. If torchrun started the process, sets up the process groups.

    `comm_timeout_s`: seconds until a collective on the devices counts as hung, if the environment sets no value.
    Raises DistError if only some of torchrun's variables are set, or if this rank's GPU is missing.
    """
    rank, local_rank, world_size = read_ranks(os.environ)
    device = _pick_device(device_kind, local_rank)
    if "RANK" not in os.environ:
        return Dist(rank, local_rank, world_size, device)
    timeout = timedelta(seconds=float(os.environ.get(COMM_TIMEOUT_ENV, comm_timeout_s)))
    store, rank, world_size = next(torch_dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    torch_dist.init_process_group(
        _backend(device_kind),
        store=torch_dist.PrefixStore("default_group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device_kind == "cuda" else None,
    )
    dist = Dist(rank, local_rank, world_size, device, store=store)
    dist = replace(dist, control_group=new_control_group(dist))
    if not are_several(os.environ):
        return dist
    claim = read_claim(os.environ, holds_store=holds_store(os.environ))
    return replace(dist, nodes=nodes_of(gather(claim, dist.control_group)))


def new_control_group(dist: Dist) -> torch_dist.ProcessGroup | None:
    """A further gloo group of all ranks, for a separate thread; None in a world of one. Every rank must call this."""
    if dist.world_size == 1:
        return None
    timeout = timedelta(seconds=control_timeout_s() + CONTROL_MARGIN_S)
    group: torch_dist.ProcessGroup = torch_dist.new_group(backend="gloo", timeout=timeout)
    return group


def stop_dist() -> None:
    """Leave the process groups, if there are any."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def ensure_group(dist: Dist) -> None:
    """Create a default process group if there is none (a single process without torchrun): FSDP needs one."""
    if not torch_dist.is_initialized():
        store = torch_dist.HashStore()
        torch_dist.init_process_group(_backend(dist.device.type), store=store, rank=0, world_size=1)


def read_ranks(env: os._Environ[str] | dict[str, str]) -> tuple[int, int, int]:
    """(rank, local_rank, world_size) from torchrun's variables; (0, 0, 1) if none is set. Raises DistError if only some
    are set, or if they are not numbers."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in env]
    if len(missing) == len(names):
        return 0, 0, 1
    given = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    if missing:
        raise DistError(f"{', '.join(missing)} not set though {given}: start with torchrun, or unset all of them")
    try:
        rank, local_rank, world_size = (int(env[name]) for name in names)
    except ValueError:
        raise DistError(f"{given} are not three numbers: start with torchrun, or unset all of them") from None
    return rank, local_rank, world_size


def _backend(device_kind: str) -> str:
    return "cpu:gloo,cuda:nccl" if device_kind == "cuda" else "gloo"


def control_timeout_s() -> float:
    """Seconds that ranks wait for each other at a barrier."""
    return float(os.environ.get(CONTROL_TIMEOUT_ENV, 1800))


def _pick_device(device_kind: str, local_rank: int) -> torch.device:
    if device_kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = device_index(local_rank, count, os.environ)
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise DistError(
            f"local rank {local_rank} has no GPU: torch sees {count} (CUDA_VISIBLE_DEVICES={visible});"
            " name fewer GPUs, or use target.device=cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_index(local_rank: int, count: int, env: os._Environ[str] | dict[str, str]) -> int:
    """The GPU of a rank among the `count` that it sees: under srun Slurm may show each task only its own one."""
    by_srun = "SLURM_PROCID" in env and "TORCHELASTIC_RUN_ID" not in env
    return 0 if by_srun and count == 1 else local_rank


# --- collectives: every rank must call them in the same order ---------------------------------------------------------


def sum_over_ranks(tensor: torch.Tensor, dist: Dist) -> torch.Tensor:
    """The elementwise sum over all ranks, a new tensor on the same device."""
    result = tensor.detach().clone()
    if dist.world_size > 1:
        torch_dist.all_reduce(result)
    return result


def gather(value: T, group: Group) -> list[T]:
    """The ranks' values, in rank order; they must be picklable."""
    if group is None:
        return [value]
    values: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(values, value, group=group)
    return values


def from_rank0(value: T, group: Group) -> T:
    """Rank 0's value, which must be picklable. Unlike `gather` it needs no memory for a large value of every rank."""
    if group is None:
        return value
    values = [value]
    torch_dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def on_rank0(dist: Dist, function: Callable[[], T]) -> T:
    """Call `function` on rank 0, and return its result on every rank; the result must be picklable.

    If it raises an Exception, rank 0 raises that and every other rank a DistError with its message, so that no rank
    keeps waiting.
    """
    if dist.control_group is None:
        return function()
    answers: list[T] = []
    failed: str | None = None
    caught: Exception | None = None
    if dist.is_main:
        try:
            answers = [function()]
        except Exception as error:
            caught, failed = error, f"{type(error).__name__}: {error}"
    answers, failed = gather((answers, failed), dist.control_group)[0]
    if caught is not None:
        raise caught
    if failed is not None:
        raise DistError(f"rank 0 failed: {failed}")
    return answers[0]


def on_keepers(dist: Dist, function: Callable[[], T]) -> T:
    """Call `function` on the first rank of each storage of the run folder, and return its result to the ranks there.

    Raises as `on_rank0` does, on every rank. If all ranks see the same run folder, the two are the same.
    """
    if dist.storages is None:
        return on_rank0(dist, function)
    return on_ranks(dist, dist.storages.keepers, function)[dist.storages.keeper(dist.rank)]


def on_ranks(dist: Dist, chosen: Sequence[int], function: Callable[[], T]) -> dict[int, T]:
    """Call `function` on these ranks, and return their results by rank on every rank; they must be picklable.

    If it raises an Exception on some, they raise that and every other rank a DistError with the first one's message.
    """
    answer: list[T] = []
    failed: str | None = None
    caught: Exception | None = None
    if dist.rank in chosen:
        try:
            answer = [function()]
        except Exception as error:
            caught, failed = error, f"{type(error).__name__}: {error}"
    told = gather((answer, failed), dist.control_group)
    if caught is not None:
        raise caught
    for rank in chosen:
        if (why := told[rank][1]) is not None:
            raise DistError(f"rank {rank}{_on_node(dist, rank)} failed: {why}")
    return {rank: told[rank][0][0] for rank in chosen}


def _on_node(dist: Dist, rank: int) -> str:
    return "" if dist.nodes is None else f" on {dist.nodes.name_of(rank)}"


def rank0_first(dist: Dist, function: Callable[[], T]) -> T:
    """Call `function` on rank 0, then on the other ranks; return each rank's own result. For downloads and caches."""
    if dist.control_group is None:
        return function()
    mine: list[T] = []
    on_rank0(dist, lambda: mine.append(function()))
    return mine[0] if dist.is_main else function()


class FlagBoard:
    """Control flags that all ranks agree on. By default reading them waits neither for the newest post nor for a GPU.

    Each rank posts its flags after a step; the elementwise maximum over the ranks is read one post later. All ranks
    must call `post` and `read` at the same steps, so that they get the same result at the same step.
    """

    def __init__(self, dist: Dist, width: int) -> None:
        self._dist = dist
        self._width = width
        self._pending: deque[tuple[torch.Tensor, torch_dist.Work | None]] = deque()

    def post(self, flags: Sequence[int]) -> None:
        """Start sharing this rank's flags, `width` small non-negative integers; returns at once."""
        if len(flags) != self._width:
            raise ValueError(f"{len(flags)} flags posted on a board of {self._width}")
        values = torch.tensor(flags, dtype=torch.int32)
        work = None
        if self._dist.control_group is not None:
            work = torch_dist.all_reduce(
                values, op=torch_dist.ReduceOp.MAX, group=self._dist.control_group, async_op=True
            )
        self._pending.append((values, work))

    def read(self, *, keep: int = 1) -> tuple[int, ...]:
        """The maximum over all ranks and all unread posts except the newest `keep`; zeros if there are none.

        keep=0 waits for all posts.
        """
        seen = [0] * self._width
        while len(self._pending) > keep:
            values, work = self._pending.popleft()
            if work is not None:
                work.wait()
            seen = [max(pair) for pair in zip(seen, values.tolist(), strict=True)]
        return tuple(seen)
