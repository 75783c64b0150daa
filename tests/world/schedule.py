"""What happens in one schedule: jobs, clients' commands, faults. A seed gives one; a failure gives a shorter one."""

from __future__ import annotations

import random
from typing import NamedTuple

ROLES = ("supervisor", "agent", "rank", "launcher", "program", "client")
CALLS = ("write", "fsync", "rename", "open", "mkdir", "unlink", "flock", "spawn", "read", "link")
UIDS = (0, 1000, 1001)
"""The host's accounts; the first is root."""


class Job(NamedTuple):
    """A job that some client launches."""

    name: str
    program: tuple[str, ...]
    ranks: int = 1
    gpus: tuple[str, ...] = ()
    queue: bool = False
    max_restarts: int = 0
    uid: int = 0
    includes: bool = False
    """A data set beside its code."""


class Command(NamedTuple):
    """What a client does: `launch`, `detach` (a launch without following), `again` (the same launch once more), `stop`,
    `ps`, `logs`, `resume`, `gc`. `word`: how."""

    at_s: float
    kind: str
    job: str
    grace_s: float = 2.0
    word: str = ""


class Fault(NamedTuple):
    """What goes wrong. `count`: at which call of that role, or for which connection, from `at_s` on."""

    kind: str
    role: str = ""
    count: int = 0
    at_s: float = 0.0
    value: float = 0.0
    word: str = ""


class Schedule(NamedTuple):
    seed: int
    gpus: int
    jobs: tuple[Job, ...]
    commands: tuple[Command, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        lines = [f"{self.gpus} GPUs"]
        lines += [f"job      {_told(job)}" for job in self.jobs]
        lines += [f"command  {_told(command)}" for command in self.commands]
        lines += [f"fault    {_told(fault)}" for fault in self.faults]
        return "\n".join(lines)


def _told(item: NamedTuple) -> str:
    defaults = item._field_defaults
    return " ".join(f"{k}={v!r}" for k, v in item._asdict().items() if k not in defaults or defaults[k] != v)


def make_schedule(seed: int) -> Schedule:
    """Of a seed, which is also that of the kernel's chance."""
    from tests.world.wider import is_wider, make_wider

    if is_wider(seed):
        return make_wider(seed)
    chance = random.Random(f"schedule {seed}")
    crowded = chance.random() < 0.4
    gpus = chance.choice((1, 1, 2, 2)) if crowded else chance.choice((0, 0, 1, 2))
    count = chance.choice((2, 3, 3)) if crowded else chance.choice((1, 1, 1, 2))
    jobs = tuple(draw_job(chance, f"job-{number}", gpus, crowded=crowded) for number in range(count))
    commands = []
    for job in jobs:
        at_s = chance.choice((0.0, 0.0, chance.random() * 0.4, chance.random() * 1.5))
        commands.append(Command(at_s, chance.choice(("launch", "launch", "launch", "detach")), job.name))
        if chance.random() < 0.25:
            commands.append(Command(at_s + chance.choice((0.0, 0.05, 1.0)), "again", job.name))
        if chance.random() < 0.3:
            after_s = chance.choice((0.05, 0.2, 0.5, 2.0))
            commands.append(Command(at_s + after_s, "stop", job.name, chance.choice((0.0, 0.5, 2.0))))
        if chance.random() < 0.3:
            commands.append(Command(at_s + chance.random() * 1.5, chance.choice(("ps", "logs")), job.name))
    faults = tuple(draw_fault(chance, gpus) for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 4))))
    return Schedule(seed, gpus, jobs, tuple(sorted(commands)), faults + _slow_disk(random.Random(f"disk {seed}")))


def _slow_disk(chance: random.Random) -> tuple[Fault, ...]:
    """count: for so many ms each sync waits; value: for so long."""
    if chance.random() > 0.15:
        return ()
    return (Fault("slow", at_s=chance.random(), count=chance.choice((20, 200, 2000)), value=chance.choice((0.5, 5.0))),)


def draw_job(chance: random.Random, name: str, gpus: int, *, crowded: bool) -> Job:
    """crowded: all want GPUs, and most of them wait for their turn."""
    program = chance.choice(
        (
            ("exit", "0"),
            ("exit", "3"),
            ("exit", "0", "0.2"),
            ("exit", "7", "0.5"),
            ("talks", "4", "0.1"),
            ("orderly", "1"),
            ("stubborn", "1.5"),
            ("forks", "2", "1", "sleep"),
            ("forks", "1", "3", "lingers"),
            ("dies", "11"),
            ("differs",),
            ("uneven", "2"),
        )
    )
    ranks = chance.choice((2, 4)) if program[0] in ("differs", "uneven") else chance.choice((1, 1, 1, 1, 2, 4))
    if ranks > 1:
        program = ("launcher", str(ranks), *program)
    wanted: tuple[str, ...] = ()
    if gpus and (crowded or chance.random() < 0.5):
        wanted = chance.choice((("auto:1",), ("0",), (f"auto:{gpus}",)))
    restarts = chance.choice((0, 0, 0, 1))
    return Job(name, program, ranks, wanted, bool(wanted) and chance.random() < 0.8, restarts)


def draw_fault(chance: random.Random, gpus: int) -> Fault:
    at_s = chance.choice((chance.random() * 0.3, chance.random() * 1.5))
    kinds = ["cut", "cut", "kill", "kill", "kill", "halt", "error", "clock", "full", "reboot", "damage", "pids"]
    kind = chance.choice(kinds + ["stranger"] * bool(gpus))
    role = chance.choice(ROLES[:5])
    if kind == "cut":
        word = chance.choice(("sent", "received", "received", "silent"))
        return Fault(kind, count=chance.randrange(3), value=_bytes(chance), word=word)
    if kind == "kill":
        return Fault(kind, chance.choice(ROLES), count=_calls(chance))
    if kind == "halt":
        return Fault(kind, role, count=_calls(chance), value=chance.choice((0.2, 3.0, 20.0)))
    if kind == "error":
        word = chance.choice(CALLS)
        return Fault(kind, role, count=chance.randrange(1, 12), word=f"{word} {chance.choice(('EIO', 'ENOSPC'))}")
    if kind == "clock":
        return Fault(kind, at_s=at_s, value=chance.choice((-7200.0, -1.0, 5.0, 86400.0)))
    if kind == "full":
        return Fault(kind, at_s=at_s, value=chance.choice((0.5, 3.0, 15.0)))
    if kind == "damage":
        what = chance.choice(("status.json", "job.json", "control/stop.json", "ranks", "lease"))
        how = chance.choice(("cut", "zeros", "gone", "other", "ended"))
        return Fault(kind, at_s=at_s, word=f"{what} {how}")
    if kind == "stranger":
        return Fault(kind, at_s=at_s, count=chance.randrange(gpus), value=chance.choice((0.5, 3.0)))
    return Fault(kind, at_s=at_s)


def _bytes(chance: random.Random) -> float:
    return float(chance.choice((chance.randrange(1, 200), chance.randrange(1, 4000))))


def _calls(chance: random.Random) -> int:
    """Most of what matters happens early."""
    return chance.choice((chance.randrange(1, 60), chance.randrange(1, 300), chance.randrange(1, 1200)))
