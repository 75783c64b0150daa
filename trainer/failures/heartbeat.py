"""The heartbeats that ranks post once a second, and the decision which ranks are late, gone or silent. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from trainer.progress import SLOW_PHASES, Phase, render_place
from trainer.typed import from_json, parse_json

SILENT_S = 20.0
"""A rank that posts nothing for this time during its steps and saves is gone, or its node is."""
MUTE_PHASES = frozenset({"starting", "exporting"})
"""Phases in which a rank may be unable to post for longer: safetensors holds the interpreter while it writes a file."""
GONE_S = 2.0
"""Seconds after a process on this machine has ended in which its normal end or its own failure may still be read."""


@dataclass(frozen=True)
class Heartbeat:
    """One rank's identity and progress. `serial` rises with every heartbeat, `count` with the rank's progress."""

    rank: int
    host: str
    machine: str
    """Equal for processes that can see each other (`machine_id`); `host` is the name for messages."""
    pid: int
    serial: int
    step: int
    phase: Phase
    count: int
    waiting: bool
    """Whether it is inside a call of torch.distributed, and so may be waiting for another rank."""
    where: str
    """File, line and function of its main thread."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Heartbeat:
        return from_json(parse_json(text.encode()), Heartbeat)

    @property
    def place(self) -> str:
        return render_place(self.phase, self.step)


@dataclass(frozen=True)
class RankView:
    """A rank's last heartbeat as one observer sees it: seconds since the last new heartbeat, since the rank's last
    progress, and since its process was found ended (None: it is running, or is on another machine)."""

    beat: Heartbeat
    silent_s: float
    still_s: float
    ended_s: float | None = None
    alive_here: bool = False
    """Its process is on this machine and running, but may be unable to post because it holds the interpreter."""


@dataclass(frozen=True)
class Verdict:
    """Why the run must end, and because of which ranks."""

    kind: Literal["late", "gone", "silent"]
    ranks: list[int]
    message: str

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Verdict:
        return from_json(parse_json(text.encode()), Verdict)


def judge(seen: Sequence[RankView], *, timeout_s: float, slow_timeout_s: float) -> Verdict | None:
    """The verdict on all ranks; None while there is no failure.

    `timeout_s`: seconds without progress of any rank during steps; `slow_timeout_s`: while one saves, exports or
    prepares.
    """
    running = [one for one in seen if one.beat.phase != "done"]
    return _gone(running) or _silent(running, slow_timeout_s) or _late(running, timeout_s, slow_timeout_s)


def _gone(running: Sequence[RankView]) -> Verdict | None:
    gone = [one.beat for one in running if one.ended_s is not None and one.ended_s >= GONE_S]
    if not gone:
        return None
    told = "; ".join(
        f"rank {beat.rank} (pid {beat.pid} on {beat.host}) ended without a word, last heard of {beat.place}, "
        f"at {beat.where}"
        for beat in gone
    )
    return Verdict("gone", [beat.rank for beat in gone], told)


def _silent(running: Sequence[RankView], slow_timeout_s: float) -> Verdict | None:
    """Ranks on other machines that post nothing. Some libraries hold the interpreter while they read or write files."""

    def limit(one: RankView) -> float:
        return slow_timeout_s if one.beat.phase in MUTE_PHASES else SILENT_S

    silent = [one for one in running if not one.alive_here and one.silent_s > limit(one)]
    if not silent:
        return None
    told = "; ".join(
        f"rank {one.beat.rank} on {one.beat.host} has been silent for {one.silent_s:.0f} s, "
        f"last heard of {one.beat.place}"
        for one in silent
    )
    return Verdict("silent", [one.beat.rank for one in silent], f"{told}: its node or the network is gone")


def _late(running: Sequence[RankView], timeout_s: float, slow_timeout_s: float) -> Verdict | None:
    slow = any(one.beat.phase in SLOW_PHASES for one in running)
    limit = max(timeout_s, slow_timeout_s) if slow else timeout_s
    if not running or min(one.still_s for one in running) <= limit:
        return None
    late = late_ranks([one.beat for one in running])
    told = "; ".join(f"rank {beat.rank} is late, {beat.place}, at {beat.where}" for beat in late)
    others = sorted({one.beat.place for one in running if one.beat not in late})
    waiting = f"; the others wait for it {', '.join(others)}" if others else ""
    return Verdict("late", [beat.rank for beat in late], f"no rank has got on for {limit:.0f} s: {told}{waiting}")


def late_ranks(beats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """The ranks that the others wait for: those with the least progress, and of these the ones that do not wait
    themselves."""
    behind = [beat for beat in beats if beat.count == min(beat.count for beat in beats)]
    return [beat for beat in behind if not beat.waiting] or behind


class Observer:
    """Records when each rank's heartbeats last changed, by this process's clock."""

    def __init__(self, world_size: int, *, ended: Callable[[Heartbeat], bool | None]) -> None:
        """`ended`: whether a heartbeat's process has ended; returns None if it runs on another machine."""
        self._world_size = world_size
        self._ended = ended
        self._beats: dict[int, Heartbeat] = {}
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._gone: dict[int, float] = {}

    def update(self, beats: Sequence[Heartbeat], now: float) -> None:
        for beat in beats:
            before = self._beats.get(beat.rank)
            if before is None or before.serial != beat.serial:
                self._heard[beat.rank] = now
            if before is None or before.count != beat.count:
                self._moved[beat.rank] = now
            self._beats[beat.rank] = beat

    def extend_deadlines(self, seconds: float) -> None:
        """Extend every deadline by this time, because the observer itself was stopped for that long."""
        for times in (self._heard, self._moved, self._gone):
            times.update({rank: at + seconds for rank, at in times.items()})

    def seen(self, now: float) -> list[RankView]:
        """The views of all ranks; empty until every rank has posted once."""
        if len(self._beats) < self._world_size:
            return []
        return [self._see(beat, now) for _, beat in sorted(self._beats.items())]

    def _see(self, beat: Heartbeat, now: float) -> RankView:
        ended = self._ended(beat)
        gone = self._gone.setdefault(beat.rank, now) if ended else None
        return RankView(
            beat,
            silent_s=now - self._heard[beat.rank],
            still_s=now - self._moved[beat.rank],
            ended_s=None if gone is None else now - gone,
            alive_here=ended is False,
        )
