"""The messages between a trainer and its saver process, over a private socket.

The savers of a run find each other through the same key-value store as the trainers.
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
    """A key-value store that every saver can reach: the trainers' store, with another key prefix."""

    address: str
    """A host, or the path of a file."""
    port: int | None
    """None for a file."""
    name: str

    def open(self, timeout_s: float) -> torch_dist.Store:
        """A separate connection for this process."""
        if self.port is None:
            store: torch_dist.Store = torch_dist.FileStore(self.address, -1)  # -1: it does not count its users
        else:
            timeout = timedelta(seconds=timeout_s)
            store = torch_dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout)
        return torch_dist.PrefixStore(self.name, store)


def rendezvous_at(store: torch_dist.Store | None, name: str) -> Rendezvous | None:
    """How savers can reach the trainers' store; None if they cannot."""
    while isinstance(store, torch_dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch_dist.TCPStore):
        return Rendezvous(store.host, store.port, name)
    if isinstance(store, torch_dist.FileStore):
        return Rendezvous(store.path, None, name)  # type: ignore[attr-defined]  # torch's stub lacks it
    return None


@dataclass(frozen=True)
class Setup:
    """To the saver, first: its rank among the savers, and their rendezvous (None if it is the only one)."""

    rank: int
    world_size: int
    rendezvous: Rendezvous | None
    timeout_s: float


@dataclass(frozen=True)
class Ready:
    """From the saver, once: all savers have joined."""


@dataclass(frozen=True)
class Save:
    """To the saver: write this. `region_bytes`: if set, the descriptor of a new region of this size follows."""

    order: Order
    state: State
    region_bytes: int | None
    reports_stages: bool


@dataclass(frozen=True)
class StageReached:
    """From the saver, if the order asks for it: it has reached this stage and waits for any answer."""

    name: str


@dataclass(frozen=True)
class Outcome:
    """From the saver: how a save ended. `error` is the same on all ranks; after `lost` the saver ends."""

    note: str = ""
    error: str = ""
    lost: str = ""


def send(connection: Connection, message: Any) -> None:
    """Raises OSError if the other end is closed."""
    # not Connection.send: torch would pass tensors through its own shared memory
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError if the other end is closed."""
    return pickle.loads(connection.recv_bytes())
