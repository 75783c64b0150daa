"""What happens in one schedule of the trainer: a run, its starts, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.world.schedule import Fault, _told

ROLES = ("rank", "rank", "saver", "saver", "launcher")
CALLS = ("write", "fsync", "rename", "open", "mkdir", "unlink", "listdir", "read", "stat", "flock", "spawn", "lseek")
KINDS = (
    *("kill", "kill", "killall", "killall", "halt", "slow", "slow", "error", "error", "full", "stop"),
    *("power", "power", "prefix", "prefix", "damage", "damage", "late"),
)
FILES = ("shard", "metadata", "state", "marker", "random")
HOWS = ("cut", "zeros", "gone", "other", "other", "other", "longer")


class Start(NamedTuple):
    """Somebody starts the run, in the same folder."""

    at_s: float
    ranks: int


class Schedule(NamedTuple):
    """A run of `steps` steps, and what happens to it."""

    seed: int
    steps: int
    starts: tuple[Start, ...]
    faults: tuple[Fault, ...]
    beside: bool = True
    save_every: int = 2
    keep_last: int = 0
    keep_best: int = 0
    keep_every: int = 0
    step_s: float = 0.1
    import_s: float = 0.2
    wait_from_bytes: int = 0
    hang_timeout_s: float = 8.0

    def __str__(self) -> str:
        run = self._replace(starts=(), faults=())
        kept = [word for word in _told(run).split() if word not in ("starts=()", "faults=()")]
        lines = [f"run      {' '.join(kept)}"]
        lines += [f"start    {_told(start)}" for start in self.starts]
        lines += [f"fault    {_told(fault)}" for fault in self.faults]
        return "\n".join(lines)


def make_schedule(seed: int) -> Schedule:
    """Of a seed, which is also that of the kernel's chance."""
    if seed % 7 in (2, 6):
        return _one_loss(seed) if seed % 7 == 6 else _one_damage(seed)
    chance = random.Random(f"trainer {seed}")
    ranks = chance.choice((1, 1, 2, 2, 2, 3, 4))
    starts = [Start(0.0, ranks)]
    for _ in range(chance.choice((0, 1, 1, 2))):
        at_s = chance.choice((chance.random() * 0.002, chance.random() * 1.5, chance.random() * 4))
        starts.append(Start(at_s, ranks if chance.random() < 0.7 else chance.choice((1, 2, 4))))
    keep_last = chance.choice((0, 1, 1, 1, 2))
    faults = tuple(_fault(chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3))))
    return Schedule(
        seed,
        chance.choice((3, 3, 4, 6)),
        tuple(sorted(starts)),
        faults,
        beside=chance.random() < 0.65,
        save_every=chance.choice((1, 1, 2, 3)),
        keep_last=keep_last,
        keep_best=chance.choice((0, 0, 1)) if keep_last else 0,
        keep_every=chance.choice((0, 0, 3)) if keep_last else 0,
        step_s=chance.choice((0.01, 0.05, 0.3)),
        import_s=chance.choice((0.02, 0.2, 1.0)),
        wait_from_bytes=chance.choice((0, 0, 1 << 20)),
    )


def _one_loss(seed: int) -> Schedule:
    """One start, and one process of it that is lost: what is told of that is known."""
    chance = random.Random(f"one loss {seed}")
    count, role = chance.randrange(20, 500), chance.choice(("rank", "rank", "saver"))
    kind = chance.choice(("kill", "halt")) if role == "rank" else "kill"
    return Schedule(
        seed,
        6,
        (Start(0.0, chance.choice((2, 3, 4))),),
        (Fault(kind, role, count=count, value=90.0 if kind == "halt" else 0.0),),
        beside=chance.random() < 0.7,
        save_every=chance.choice((1, 2, 3)),
        step_s=chance.choice((0.05, 0.3)),
    )


def _one_damage(seed: int) -> Schedule:
    """A file is damaged once the run has ended, and the run is started again."""
    chance = random.Random(f"one damage {seed}")
    word = f"{chance.choice(FILES)} {chance.choice(HOWS)}"
    start, later = Start(0.0, chance.choice((1, 2, 3, 4))), Start(2.5, chance.choice((1, 2, 3, 4)))
    faults = (Fault("damage", at_s=2.0, word=word),)
    return Schedule(seed, 3, (start, later), faults, save_every=chance.choice((1, 2, 3)), step_s=0.05)


def _fault(chance: random.Random) -> Fault:
    at_s = chance.choice((chance.random() * 0.5, chance.random() * 1.5, chance.random() * 4))
    kind = chance.choice(KINDS)
    role = chance.choice(ROLES)
    count = chance.choice((chance.randrange(1, 60), chance.randrange(1, 200), chance.randrange(1, 900)))
    if kind in ("kill", "killall"):
        return Fault(kind, role, count=count)
    if kind == "power":
        return Fault(kind, role, count=count) if chance.random() < 0.7 else Fault(kind, at_s=at_s)
    if kind == "halt":
        return Fault(kind, role, count=count, value=chance.choice((0.3, 3.0, 20.0, 90.0)))
    if kind == "slow":
        word, value = chance.choice(("", "kill", "kill")), chance.choice((0.1, 0.3, 3.0, 20.0))
        return Fault(kind, chance.choice(("rank", "saver", "saver")), count=count, value=value, word=word)
    if kind == "error":
        word = f"{chance.choice(CALLS)} {chance.choice(('EIO', 'ENOSPC'))}"
        return Fault(kind, role, count=chance.choice((chance.randrange(1, 12), chance.randrange(1, 60))), word=word)
    if kind == "full":
        return Fault(kind, at_s=at_s, value=chance.choice((0.2, 1.0, 5.0)))
    if kind == "damage":
        return Fault(
            kind, at_s=at_s, word=f"{chance.choice(FILES)} {chance.choice(HOWS)}", count=chance.choice((0, 0, 1))
        )
    if kind == "prefix":
        word = chance.choice(("kill", "power"))
        size = float(chance.choice((0, chance.randrange(1, 400))))
        return Fault(kind, role, count=chance.randrange(1, 80), value=size, word=word)
    return Fault(kind, at_s=at_s if kind == "stop" else 0.0)


def shorter(schedule: Schedule) -> Iterator[Schedule]:
    """With a little less in it."""
    for name in ("faults", "starts"):
        items = getattr(schedule, name)
        for number in range(len(items) if name == "faults" or len(items) > 1 else 0):
            yield schedule._replace(**{name: items[:number] + items[number + 1 :]})
    most = max(start.ranks for start in schedule.starts)
    for ranks in range(1, most):
        yield schedule._replace(
            starts=tuple(start._replace(ranks=min(ranks, start.ranks)) for start in schedule.starts)
        )
    for simpler in ({"keep_best": 0}, {"keep_every": 0}, {"keep_last": 0, "keep_best": 0, "keep_every": 0}):
        if any(getattr(schedule, name) for name in simpler):
            yield schedule._replace(**simpler)
    if schedule.beside:
        yield schedule._replace(beside=False)
    if schedule.steps > 3:
        yield schedule._replace(steps=schedule.steps - 1)
