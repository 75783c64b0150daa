"""Ranks that are but numbers, and which conversations the steps of a loader hold, for tests of their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainer.data.batches.steps import Loader


def documents_of(loader: Loader, steps: Iterable[int], *, world_size: int = 1) -> list[str]:
    """Their ids, all ranks together, in the order of the data."""
    places = ((step, rank) for step in steps for rank in range(world_size))
    return [name for step, rank in places for name in loader.rank_documents(step, rank)]


@dataclass(frozen=True)
class Rank:
    """What data ask of a rank."""

    rank: int = 0
    world_size: int = 1


ONE = Rank()
