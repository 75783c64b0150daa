"""Checks that each rank finds the files of a spread checkpoint that it will read, and names those that it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint.reader import PlainReader
from trainer.checkpoint.spread import Spread
from trainer.checkpoint.states import State
from trainer.dist import Dist, gather
from trainer.errors import ConfigError
from trainer.words import first_few

BRING = "copy the missing files into the same folder of that node, and start again"


def check_reach(path: Path, spread: Spread | None, state: Callable[[], State], dist: Dist) -> None:
    """Raise ConfigError on every rank if one of them lacks files of a spread checkpoint. Every rank must call this.

    `state`: gives what will be filled from the checkpoint, sharded as in memory.
    """
    if spread is None:
        return
    lacking = sorted(name for name in files_to_read(path, state()) if not (path / name).exists())
    told = gather(lacking, dist.control_group)
    if any(told):
        names = [dist.nodes.name_of(rank) if dist.nodes else "this node" for rank in range(len(told))]
        raise ConfigError(
            f"{path.name} is not whole where it is needed: {render_lacking(told, names, spread)}", hint=BRING
        )


def files_to_read(path: Path, state: State) -> set[str]:
    """The files from which torch will read this rank's part of `state`."""
    from torch.distributed.checkpoint import DefaultLoadPlanner  # here: only a spread checkpoint needs it

    metadata, planner = PlainReader(path).read_metadata(), DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    stored = metadata.storage_data or {}
    return {stored[item.storage_index].relative_path for item in planner.create_local_plan().items}


def render_lacking(lacking: Sequence[Sequence[str]], names: Sequence[str], spread: Spread) -> str:
    """`node 1 (b) lacks __0_0.distcp, which node 0 (a) had`. `lacking`: for each rank; `names`: of the ranks' nodes."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node, files in zip(names, lacking, strict=True):
        for name in files:
            group = groups.setdefault((node, spread.holder(name)), [])
            if name not in group:
                group.append(name)
    return "; ".join(f"{node} lacks {first_few(files, 5)}, which {had} had" for (node, had), files in groups.items())
