"""The histories of leases and of the queue, held against a plain model: first in, first out."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.world.linux.kernel import S

if TYPE_CHECKING:
    from tests.world.linux.inodes import Inode
    from tests.world.world import World

FOLDER = "/tmp/.torchferry-leases/"
BESIDE = "/tmp/.torchferry-leases-"
"""Where a claim lies first of all when the folder is a foreign account's."""
SUPERVISES = "TORCHFERRY_SUPERVISES"
SEEN_S = 1.0
"""Whoever computes on a GPU for so long is seen by who claims it."""


class Claim(NamedTuple):
    kind: str
    job: str
    devices: tuple[str, ...]
    auto: int
    number: int


def names_of_claims(world: World) -> list[tuple[str, Inode]]:
    """Each name by which a claim may be found, with the file."""
    disk = world.kernel.disk
    inside, beside = disk.find(FOLDER), disk.find("/tmp")
    found = [(FOLDER + name, inode) for name, inode in (inside.names.items() if inside is not None else ())]
    tops = [(f"/tmp/{name}", inode) for name, inode in (beside.names.items() if beside is not None else ())]
    return found + [(path, inode) for path, inode in tops if path.startswith(BESIDE)]


class Ledger:
    """Every claim as it appears. `broken` is told what is not in order; `is_stopping`: of a job's folder, whether
    somebody has asked for a stop, after which it waits for nothing."""

    def __init__(self, world: World, broken: Any, is_stopping: Callable[[str], bool]) -> None:
        self.world = world
        self.broken = broken
        self.is_stopping = is_stopping
        self.tickets: dict[str, int] = {}
        """Job -> the number that it drew."""
        self.drawn: dict[str, Claim] = {}
        """The same, with what it waits for."""
        self.had: set[str] = set()
        """Jobs that have had their turn: a new supervisor shows their lease again."""
        self.damaged = False
        world.kernel.seen.append(self.hear)

    def hear(self, what: str, about: Any) -> None:
        if what == "named" and not self.damaged and about.path().startswith((f"{FOLDER}job-", f"{BESIDE}job-")):
            claim = self._read(about)
            if claim is not None and claim.kind == "ticket":
                self.tickets.setdefault(claim.job, claim.number)
                self.drawn.setdefault(claim.job, claim)
            elif claim is not None and claim.kind == "lease":
                self._check(about, claim)

    def _read(self, inode: Inode) -> Claim | None:
        try:
            found = json.loads(bytes(inode.data))
            return Claim(found["kind"], found["job"], tuple(found["devices"]), found["auto"], found["number"])
        except (ValueError, KeyError, TypeError):
            return None

    def _held(self) -> list[Claim]:
        files = dict.fromkeys(inode for _, inode in names_of_claims(self.world))
        found = [self._read(inode) for inode in files if fcntl.LOCK_EX in inode.locks.values()]
        return [claim for claim in found if claim is not None]

    def _without_ticket(self, others: list[Claim]) -> list[Claim]:
        """Those that wait, and have let go of what says so."""
        words = [p.env[SUPERVISES] for p in self.world.processes() if SUPERVISES in p.env]
        alive = {word.rpartition("/")[2] for word in words if not self.is_stopping(word)}
        shown = {claim.job for claim in others}
        return [claim for job, claim in self.drawn.items() if job in alive - shown - self.had]

    def _is_again(self, lease: Claim) -> bool:
        """Whether a supervisor shows what its job has had all the time: it has no ticket to give for it."""
        current = self.world.kernel.current
        by_supervisor = current is not None and SUPERVISES in current.process.env
        has_ticket = any(claim.kind == "ticket" and claim.job == lease.job for claim in self._held())
        return lease.job in self.had and by_supervisor and not has_ticket

    def _check(self, inode: Inode, lease: Claim) -> None:
        others = [claim for claim in self._held() if claim.job != lease.job]
        mine = 0 if lease.job in self.had else self.tickets.get(lease.job, 1 << 60)
        is_again = self._is_again(lease)
        self.had.add(lease.job)
        before = [other for other in others if other.kind == "ticket" and other.number < mine]
        before += [claim for claim in self._without_ticket(others) if claim.number < mine]
        for other in others:
            shared = set(other.devices) & set(lease.devices)
            if other.kind == "lease" and shared:
                self.broken(f"{lease.job} has a lease of {shared}, which {other.job} holds")
            if other in before and not other.auto and shared:
                self.broken(f"{lease.job} has got {shared} before {other.job}, which came first and waits")
        taken = {device for claim in (*others, lease) if claim.kind == "lease" for device in claim.devices}
        free = len(set(self.world.gpus.uuids) - taken)
        if sum(other.auto for other in before) > free:  # else there is enough for those before, too
            self.broken(
                f"{lease.job} has got {lease.devices} before {[b.job for b in before]}, which came first and wait"
            )
        gpus = self.world.gpus
        for index, since_ns in gpus.since_ns.items():
            is_old = self.world.kernel.now_ns - since_ns > SEEN_S * S
            if index in gpus.strangers and is_old and gpus.uuids[index] in lease.devices and not is_again:
                self.broken(f"{lease.job} has got GPU {index}, on which a stranger computes")
