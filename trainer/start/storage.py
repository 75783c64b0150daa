"""Finds out at a start which nodes see the same run folder; nobody is asked.

The first rank of each node writes a file with a name that no earlier start has used, and looks for those of the
others. All of them are removed again.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.dist import Dist, gather, on_ranks
from trainer.files import write_synced
from trainer.nodes import storages_of

LOOKS, PAUSE_S = 5, 0.1
"""How often a node looks for the others' files: a network file system may show a new one with a delay."""


def find_storages(dist: Dist, run_dir: Path) -> Dist:
    """`dist` with the separate storages of the run folder, which may have another path on each node.

    Every rank must call this. Raises OSError or DistError if a node cannot write into its run folder.
    """
    nodes = dist.nodes
    if nodes is None:
        return dist
    token = gather(uuid.uuid4().hex, dist.control_group)[0]
    firsts = [nodes.first(node) for node in range(len(nodes.names))]
    files = [run_dir / "control" / f"node_{token}_{node}" for node in range(len(firsts))]
    mine = files[nodes.of_rank[dist.rank]]
    try:
        on_ranks(dist, firsts, lambda: _leave(mine, token))
        seen = on_ranks(dist, firsts, lambda: _look(files, token))
    finally:
        if dist.rank in firsts:
            with suppress(OSError):
                mine.unlink()
    return replace(dist, storages=storages_of(nodes, [seen[first] for first in firsts]))


def render_storage(dist: Dist) -> str:
    """One line on what was found."""
    if dist.storages is None:
        return "all nodes see the same run folder: each checkpoint is written once"
    each = "; ".join(dist.storages.names)
    return f"the run folder is not shared ({each}): each keeps its own part of a checkpoint"


def _leave(file: Path, token: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_synced(file, token.encode())


def _look(files: list[Path], token: str) -> list[int]:
    """The nodes whose file is here."""
    found: list[int] = []
    for number in range(LOOKS):
        found = [node for node, file in enumerate(files) if _has(file, token)]
        if len(found) == len(files):
            break
        if number + 1 < LOOKS:
            time.sleep(PAUSE_S)
    return found


def _has(file: Path, token: str) -> bool:
    with suppress(OSError):
        return file.read_bytes() == token.encode()
    return False
