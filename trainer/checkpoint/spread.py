"""A checkpoint whose files are spread over several storages: what each holds, which one is whole, who needs what.

Pure, and imports no torch: the deployer can do the same with the names in each folder and one `state.json`.

Each storage has a folder `step_N` with the shards of its own ranks, the random states of all ranks, and its own
`.metadata`, which prefers the shards beside it. A rank on the same mesh reads nothing else. So:

* a node of the same mesh needs the files of its own part (`Spread.own`);
* any other node needs all files that its `.metadata` refers to (`Spread.needs`); a node without a folder takes
  `state.json`, COMPLETE and the part of another node, and then what that part needs;
* all folders in one, with `state.json`, COMPLETE and `.metadata` of any of them, are one whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.typed import Count

ALWAYS = ("COMPLETE", "state.json", ".metadata")
"""Files that each part has with a content of its own."""
Entry = tuple[Count, Count]


@dataclass(frozen=True)
class Part:
    """What one storage holds of a checkpoint."""

    node: str
    """The nodes that see this storage, for messages: `node 1 (gpu-b)`."""
    ranks: tuple[int, ...]
    files: dict[str, Entry]
    """{file name: [bytes, CRC-32]} of its shards and of its `.metadata`."""


@dataclass(frozen=True)
class Spread:
    """In `state.json`: all parts of the checkpoint. The same on every storage, but for `storage` and `needs`."""

    save: str
    """Identifies the save: the parts of two saves of the same step do not fit each other."""
    storage: int
    """The number of this part."""
    parts: tuple[Part, ...]
    common: dict[str, Entry]
    """The random states of all ranks, which every storage has."""
    needs: tuple[str, ...] = ()
    """The shards that this part's `.metadata` refers to, wherever they are."""

    @property
    def mine(self) -> Part:
        return self.parts[self.storage]

    @property
    def own(self) -> dict[str, Entry]:
        """The files of this part, without `state.json` and COMPLETE."""
        return {**self.mine.files, **self.common}

    @property
    def entries(self) -> dict[str, Entry]:
        """The shards and random states of all parts."""
        named = {name: entry for part in self.parts for name, entry in part.files.items()}
        return {
            name: entry for name, entry in {**named, **self.common}.items() if name not in ALWAYS and "/" not in name
        }

    def holder(self, name: str) -> str:
        """The node that had a file at the save."""
        return next((part.node for part in self.parts if name in part.files), "no node")


# --- which checkpoint is whole on all storages ------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """What a storage has of one checkpoint."""

    step: int
    save: str
    """`Spread.save`, or the checksum of `state.json` if the checkpoint is in one piece. Empty: it cannot be read."""
    is_sealed: bool
    """Whether it has its marker and its name. A part that is only prepared may follow one that is sealed: parts are
    sealed only after all of them have been prepared."""
    problem: str = ""
    """Why it cannot be used."""


@dataclass(frozen=True)
class Agreement:
    """The checkpoints of all storages together."""

    whole: tuple[tuple[int, str], ...]
    """(step, save), the newest first: every storage has its part."""
    lacking: Mapping[int, str]
    """Steps that are not whole, and why, among those after the newest whole one."""


def agree(holdings: Sequence[Sequence[Holding]], names: Sequence[str]) -> Agreement:
    """What the storages have together. `holdings`: for each storage; `names`: those of their nodes."""
    usable = [{(one.step, one.save): one for one in storage if one.save and not one.problem} for storage in holdings]
    saves = {key for storage in usable for key in storage}
    whole = [
        key
        for key in saves
        if all(key in storage for storage in usable) and any(storage[key].is_sealed for storage in usable)
    ]
    whole.sort(reverse=True)
    newest = whole[0][0] if whole else -1
    later = sorted({one.step for storage in holdings for one in storage if one.step > newest and _counts(one)})
    return Agreement(tuple(whole), {step: _why(step, holdings, names) for step in later})


def _counts(one: Holding) -> bool:
    """Whether somebody may expect this one: a part that was never sealed anywhere is what an ended save left."""
    return one.is_sealed or bool(one.problem)


def _why(step: int, holdings: Sequence[Sequence[Holding]], names: Sequence[str]) -> str:
    """Why a step is not whole."""
    mine = [next((one for one in storage if one.step == step), None) for storage in holdings]
    lacks = [name for name, one in zip(names, mine, strict=True) if one is None]
    told = [f"{name}: {one.problem}" for name, one in zip(names, mine, strict=True) if one is not None and one.problem]
    if lacks:
        told.append(f"{' and '.join(lacks)} {'has' if len(lacks) == 1 else 'have'} no part of it")
    return "; ".join(told) or "its parts are of different saves"
