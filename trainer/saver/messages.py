"""What the trainer and its saver process say to each other, over a socket between the two alone.

The savers of a run find each other where their trainers did: in the same key-value store.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as torch_dist

from trainer.checkpoint.states import State
from trainer.checkpoint.write import Order


@dataclass(frozen=True)
class Rendezvous:
    """A key-value store that every saver can reach: that of the trainers, under another name."""

    address: str
    """A host, or the path of a file."""
    port: int | None
    """None: of a file."""
    name: str

    def open(self, timeout_s: float) -> torch_dist.Store:
        """A connection of this process's own."""
        if self.port is None:
            store: torch_dist.Store = torch_dist.FileStore(self.address, -1)  # it does not count who uses it
        else:
            timeout = timedelta(seconds=timeout_s)
            store = torch_dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout)
        return torch_dist.PrefixStore(self.name, store)


def rendezvous_at(store: torch_dist.Store | None, name: str) -> Rendezvous | None:
    """Where savers can meet that know the trainers' store only by this; None where they cannot."""
    while isinstance(store, torch_dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch_dist.TCPStore):
        return Rendezvous(store.host, store.port, name)
    if isinstance(store, torch_dist.FileStore):
        return Rendezvous(store.path, None, name)  # type: ignore[attr-defined]  # torch's stub lacks it
    return None


@dataclass(frozen=True)
class Setup:
    """To the saver, first: its place among the savers, and where they meet (None: it is alone)."""

    rank: int
    world_size: int
    rendezvous: Rendezvous | None
    timeout_s: float


@dataclass(frozen=True)
class Ready:
    """From the saver, once: all savers have met."""


@dataclass(frozen=True)
class Save:
    """To the saver: write this. `region_bytes`: a descriptor of a new region of that size follows."""

    order: Order
    state: State
    region_bytes: int | None
    reports_stages: bool


@dataclass(frozen=True)
class StageReached:
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
    # not Connection.send: torch would pass tensors on through its own shared memory
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())
