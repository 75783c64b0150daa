"""Where the saver processes of a run find each other: in the key-value store in which their trainers did."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as torch_dist


@dataclass(frozen=True)
class Meeting:
    """A key-value store that every saver can reach: that of the trainers, under a name of its own."""

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


def meeting_at(store: torch_dist.Store | None, name: str) -> Meeting | None:
    """Where savers can meet that know the trainers' store only by this; None where they cannot."""
    while isinstance(store, torch_dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch_dist.TCPStore):
        return Meeting(store.host, store.port, name)
    if isinstance(store, torch_dist.FileStore):
        return Meeting(store.path, None, name)  # type: ignore[attr-defined]  # torch's stub lacks it
    return None
