"""What the trainer and its saver process say to each other, over a socket between the two alone."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from trainer.checkpoint.states import State
from trainer.checkpoint.writing import Order


@dataclass(frozen=True)
class Setup:
    """To the saver, first: its place among the savers, and where they meet (see `meeting`; None: it is alone)."""

    rank: int
    world_size: int
    meeting: Any
    timeout_s: float


@dataclass(frozen=True)
class Up:
    """From the saver, once: all savers have met."""


@dataclass(frozen=True)
class Save:
    """To the saver: write this. `region_bytes`: a descriptor of a new region of that size follows."""

    order: Order
    state: State
    region_bytes: int | None
    tells_points: bool


@dataclass(frozen=True)
class Point:
    """From the saver, where the order asks for it: it has passed this point, and waits for any answer."""

    name: str


@dataclass(frozen=True)
class Outcome:
    """From the saver: how a save ended. An error is the same on all ranks; a loss ends the saver."""

    note: str = ""
    error: str = ""
    lost: str = ""


def send(connection: Connection, message: Any) -> None:
    """Raises OSError when the other end is gone."""
    # not Connection.send: torch would pass tensors on through shared memory of its own
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())
