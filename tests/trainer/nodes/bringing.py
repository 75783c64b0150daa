"""What a person copies between nodes so that each has the files of a checkpoint that it needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.checkpoint.spread import ALWAYS, Spread


@dataclass(frozen=True)
class Folder:
    """A node's folder of one checkpoint: the names in it, and the `spread` of its `state.json`; None without one."""

    names: Collection[str]
    spread: Spread | None


def needed(spread: Spread, *, ranks: Sequence[int] | None = None) -> set[str]:
    """The files that a node with this `state.json` needs beside `state.json` and COMPLETE.

    `ranks`: the ranks that the node will run, if the mesh is that of the save; None for any other mesh.
    """
    own = set(spread.own)
    return own if ranks is not None and tuple(ranks) == spread.mine.ranks else own | set(spread.needs)


def to_bring(folders: Sequence[Folder], *, ranks: Sequence[Sequence[int]] | None = None) -> list[dict[str, int | None]]:
    """For each node, the files of one checkpoint that it lacks, and a node that has each of them; None: no node has it.

    `folders`: one for each node of the next start. `ranks`: the ranks of each, if the mesh is that of the save. A node
    without `state.json` takes the part of the first node that has one.
    """
    donor = next((number for number, folder in enumerate(folders) if folder.spread is not None), None)
    found: list[dict[str, int | None]] = []
    for number, folder in enumerate(folders):
        spread, lacks = folder.spread, dict[str, int | None]()
        if spread is None and donor is not None:
            spread = folders[donor].spread
            lacks = dict.fromkeys(ALWAYS, donor)
        if spread is not None:
            own = None if ranks is None or folder.spread is None else ranks[number]
            for name in sorted(needed(spread, ranks=own) - set(folder.names) - set(lacks)):
                lacks[name] = next((other for other, one in enumerate(folders) if name in one.names), None)
        found.append(lacks)
    return found
