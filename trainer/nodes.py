"""The nodes of a run: which rank is on which node, and which nodes see the same run folder. Pure; imports no torch.

torchrun tells each rank its place on its node. Ranks of one node are adjacent, but global rank 0 may be on any node.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainer.schema import NODE_ENV


@dataclass(frozen=True)
class Claim:
    """What one rank knows about its place. `group`: torchrun's number of its node; None without torchrun."""

    local_rank: int
    group: int | None
    host: str
    label: str = ""
    """The node's number in its job, where a job has several."""
    holds_store: bool = False
    """Whether torch's store is on this rank's node."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run with several of them, in the order of their first ranks."""

    of_rank: tuple[int, ...]
    """Each rank's node."""
    names: tuple[str, ...]
    """`node 1 (gpu-b)`: for messages."""
    store: int | None = None
    """The node that holds torch's store, if one is known to."""

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.of_rank) if other == node]

    def first(self, node: int) -> int:
        """The node's lowest rank."""
        return self.of_rank.index(node)

    def name_of(self, rank: int) -> str:
        return self.names[self.of_rank[rank]]

    @property
    def counts(self) -> list[int]:
        """The number of ranks on each node."""
        return [self.of_rank.count(node) for node in range(len(self.names))]


@dataclass(frozen=True)
class Storages:
    """The separate storages of the run folder: each is seen by one or more nodes."""

    of_rank: tuple[int, ...]
    """Each rank's storage, in the order of their first ranks."""
    names: tuple[str, ...]
    """The names of the nodes that see it: `node 0 (a) and node 2 (c)`."""

    def ranks(self, storage: int) -> list[int]:
        return [rank for rank, other in enumerate(self.of_rank) if other == storage]

    def keeper(self, rank: int) -> int:
        """The first rank on this rank's storage: it alone creates, renames and deletes what its ranks share."""
        return self.of_rank.index(self.of_rank[rank])

    @property
    def keepers(self) -> list[int]:
        return [self.of_rank.index(storage) for storage in range(len(self.names))]


def are_several(env: Mapping[str, str]) -> bool:
    """Whether the run has several nodes, by torchrun's variables; the same on every rank."""
    local, total = env.get("LOCAL_WORLD_SIZE", ""), env.get("WORLD_SIZE", "")
    return local.isdigit() and total.isdigit() and int(local) < int(total)


def read_claim(env: Mapping[str, str], *, holds_store: bool = False) -> Claim:
    group, local = env.get("GROUP_RANK", ""), env.get("LOCAL_RANK", "")
    return Claim(
        int(local) if local.isdigit() else 0,
        int(group) if group.isdigit() else None,
        socket.gethostname(),
        env.get(NODE_ENV, ""),
        holds_store,
    )


def nodes_of(claims: Sequence[Claim]) -> Nodes:
    """The nodes, from all ranks' claims in rank order. Without torchrun's numbers a local rank 0 begins a node."""
    begins, keys = 0, list[int]()
    for claim in claims:
        begins += claim.local_rank == 0
        keys.append(begins if claim.group is None else claim.group)
    order = list(dict.fromkeys(keys))
    first = [claims[keys.index(key)] for key in order]
    names = [f"node {claim.label or number} ({claim.host})" for number, claim in enumerate(first)]
    of_rank = tuple(order.index(key) for key in keys)
    holders = {node for node, claim in zip(of_rank, claims, strict=True) if claim.holds_store}
    return Nodes(of_rank, tuple(names), holders.pop() if len(holders) == 1 else None)


def storages_of(nodes: Nodes, seen: Sequence[Collection[int]]) -> Storages | None:
    """The separate storages; None if all nodes see one run folder. `seen`: for each node, the nodes whose token it
    found in its own run folder.

    One sighting proves that two nodes share the folder: only the other one can have written its token. That the other
    one found nothing may be a delay of the network file system.
    """
    root = list(range(len(nodes.names)))
    for node, others in enumerate(seen):
        for other in others:
            joined = {root[node], root[other]}
            root = [min(joined) if one in joined else one for one in root]
    order = sorted(set(root))
    if len(order) == 1:
        return None
    names = [" and ".join(name for name, one in zip(nodes.names, root, strict=True) if one == key) for key in order]
    return Storages(tuple(order.index(root[node]) for node in nodes.of_rank), tuple(names))
