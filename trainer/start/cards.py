"""What the nodes of a training tell each other before it starts, and whether they fit together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.load import config_to_dict, local_data_paths
from trainer.errors import UserError
from trainer.schema import Config
from trainer.typed import Count, Size
from trainer.words import first_few, shortened

OWN_SECTIONS = ("target", "run")
"""Sections that may differ between the nodes: they are about the machine."""
SAME_KEYS = ("target.device", "target.train_backend")
OWN_KEYS = ("train.resume",)


class MeetingError(UserError):
    """The nodes could not start together."""

    exit_code = 1


@dataclass(frozen=True)
class Card:
    """One node's part in a training."""

    node: Count
    nodes: Size
    ranks: Size
    host: str
    pid: Count
    torch: str
    config: dict[str, Any]
    """The values that all nodes must share, by dotted key."""
    run_dir: str = ""
    """Node 0's run folder. The others use the same path if they have been given none."""
    run_id: str = ""
    """A new ID; node 0's is that of this start."""

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


def shared_values(config: Config) -> dict[str, Any]:
    """The values of a config that must be the same on all nodes, by dotted key. Paths may differ."""
    paths = set(local_data_paths(config))
    values = _flat(config_to_dict(config))
    kept = {key: value for key, value in values.items() if key.partition(".")[0] not in OWN_SECTIONS}
    kept |= {key: values[key] for key in SAME_KEYS}
    return {key: value for key, value in kept.items() if key not in OWN_KEYS and not _has_path(value, paths)}


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _has_path(value: object, paths: set[str]) -> bool:
    return any(isinstance(part, str) and part in paths for part in (value if isinstance(value, list) else [value]))


def judge_cards(cards: Sequence[Card]) -> MeetingError | None:
    """Why these nodes cannot train together; None if they can. `cards`: of all nodes, node 0 first."""
    first = cards[0]
    for card in cards[1:]:
        if card.torch != first.torch:
            message = f"{first.name} has torch {first.torch}, and {card.name} has {card.torch}"
            return MeetingError(message, hint="install the same torch on all nodes")
        keys = [key for key in (*first.config, *card.config) if first.config.get(key) != card.config.get(key)]
        if keys:
            key = keys[0]
            shown = [shortened(one.config.get(key, "not known")) for one in (first, card)]
            more = [other for other in dict.fromkeys(keys) if other != key]
            also = f"; {first_few(more, 4)} too" if more else ""
            message = f"{key} is {shown[0]} on {first.name}, and {shown[1]} on {card.name}{also}"
            return MeetingError(message, hint="start every node with the same config and the same overrides")
    return None


def render_cards(cards: Sequence[Card]) -> str:
    """`2 nodes, 3 ranks: 2 on node 0 (gpu-a), 1 on node 1 (gpu-b)`."""
    parts = [f"{card.ranks} on {card.name}" for card in cards[:8]]
    more = [f"{len(cards) - 8} more nodes"] if len(cards) > 8 else []
    return f"{len(cards)} nodes, {sum(card.ranks for card in cards)} ranks: {', '.join([*parts, *more])}"


def render_nodes(numbers: Sequence[int]) -> str:
    """`node 1`, or `nodes 1, 2, 5`."""
    return f"node{'s' * (len(numbers) > 1)} {first_few([str(number) for number in numbers], 8)}"
