"""Schedules beyond one launch of each job: attempts that a client asks for, and what else people do with jobs that have
ended. They are drawn from a chance of their own, so that the others stay what they are."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.world.schedule import UIDS, Command, Fault, Job, Schedule, draw_fault, draw_job

Chance = random.Random


def is_wider(seed: int) -> bool:
    return seed % 5 == 4


def make_wider(seed: int) -> Schedule:
    return theme_of(seed)(seed, random.Random(f"wider {seed}"))


def theme_of(seed: int) -> Callable[[int, Chance], Schedule]:
    return THEMES[seed // 5 % len(THEMES)]


def _jobs(chance: Chance, count: int, gpus: int) -> tuple[Job, ...]:
    return tuple(draw_job(chance, f"job-{number}", gpus, crowded=gpus > 0 and count > 1) for number in range(count))


def _faults(chance: Chance, gpus: int, at_s: float = 0.0) -> tuple[Fault, ...]:
    """at_s: when it becomes interesting."""
    drawn = (draw_fault(chance, gpus) for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3))))
    return tuple(fault._replace(at_s=fault.at_s + at_s * chance.choice((0, 1, 1))) for fault in drawn)


def attempts(seed: int, chance: Chance) -> Schedule:
    """Jobs that are resumed, by one client or by two at once, while others stop and start them."""
    gpus = chance.choice((0, 0, 1, 2))
    jobs = _jobs(chance, chance.choice((1, 1, 2)), gpus)
    commands, begins = [], []
    for job in jobs:
        at_s = chance.random() * 0.4
        commands.append(Command(at_s, chance.choice(("launch", "detach")), job.name))
        for _ in range(chance.choice((1, 1, 2, 3))):
            at_s += chance.choice((0.2, 1.0, 2.0, 4.0, chance.random() * 3))
            begins.append(at_s)
            commands.append(Command(at_s, "resume", job.name, word=chance.choice(("", "", "apart", "blind"))))
            if chance.random() < 0.35:  # somebody else has the same idea
                apart_s = chance.choice((0.0, 0.02, 0.3, 1.0))
                commands.append(Command(at_s + apart_s, "resume", job.name, word=chance.choice(("", "apart", "blind"))))
            if chance.random() < 0.25:
                apart_s = chance.choice((-0.3, -0.05, 0.05, 0.5, 1.5))
                commands.append(Command(max(0.0, at_s + apart_s), "stop", job.name, chance.choice((0.0, 0.5, 2.0))))
            if chance.random() < 0.25:
                kind = chance.choice(("ps", "logs", "again"))
                commands.append(Command(at_s + chance.random() * 1.5, kind, job.name))
    faults = _faults(chance, gpus, chance.choice(begins))
    if chance.random() < 0.4:  # the word that an attempt has begun is lost
        faults = (*faults, Fault("cut", "", 1, chance.choice(begins), chance.randrange(100, 900), "received"))
    return Schedule(seed, gpus, jobs, tuple(sorted(commands)), faults)


HOUR_S = 3600.0


def collections(seed: int, chance: Chance) -> Schedule:
    """Jobs that have ended long ago, and collections beside launches, resumes and jobs that run."""
    gpus = chance.choice((0, 0, 0, 1))
    jobs = tuple(job._replace(includes=chance.random() < 0.6) for job in _jobs(chance, chance.choice((1, 2, 2)), gpus))
    begins = chance.choice((2.0, *[1.1 * HOUR_S] * 3, 25 * HOUR_S, 8 * 24 * HOUR_S))
    commands, faults = [], list(_faults(chance, gpus, begins))
    for _ in range(chance.choice((1, 1, 2))):
        at_s = begins + chance.random()
        words = chance.choice(("jobs", "jobs", "jobs", "old", "", "", "dry"))
        commands.append(Command(at_s, "gc", jobs[0].name, word=words))
        if chance.random() < 0.4:
            faults.append(Fault("kill", "agent", chance.randrange(100, 1500), at_s))
    for job in jobs:
        near_s = at_s + chance.choice((chance.uniform(-0.02, 0.02), chance.uniform(-0.02, 0.02), chance.random()))
        is_late = chance.random() < 0.4
        first_s = near_s if is_late else chance.random() * 0.5
        commands.append(Command(first_s, chance.choice(("launch", "detach")), job.name))
        if not is_late and chance.random() < 0.8:
            kind = chance.choice(("resume", "resume", "resume", "again", "logs", "ps"))
            commands.append(Command(near_s, kind, job.name, word="blind" if chance.random() < 0.3 else ""))
    return Schedule(seed, gpus, jobs, tuple(sorted(commands)), tuple(faults))


def accounts(seed: int, chance: Chance) -> Schedule:
    """Jobs of several accounts, which share the GPUs and the folder of leases; most of them wait for their turn."""
    gpus = chance.choice((1, 1, 2))
    jobs = tuple(job._replace(uid=chance.choice(UIDS)) for job in _jobs(chance, chance.choice((2, 3, 3, 4)), gpus))
    commands = []
    for job in jobs:
        at_s = chance.choice((0.0, 0.0, chance.random() * 0.4, chance.random() * 2.5))
        commands.append(Command(at_s, chance.choice(("launch", "detach")), job.name))
        if chance.random() < 0.5:
            kind = chance.choice(("stop", "stop", "again", "resume", "ps"))
            commands.append(Command(at_s + chance.random() * 3, kind, job.name, chance.choice((0.0, 0.5, 2.0))))
    return Schedule(seed, gpus, jobs, tuple(sorted(commands)), _faults(chance, gpus))


def leftovers(seed: int, chance: Chance) -> Schedule:
    """What jobs leave behind outlasts what is asked of it, supervisors are killed, and everybody looks at once."""
    gpus = chance.choice((0, 0, 1))
    jobs, commands = [], []
    for number in range(chance.choice((1, 1, 2))):
        job = draw_job(chance, f"job-{number}", gpus, crowded=gpus > 0)
        if chance.random() < 0.7:
            what = (("forks", "2", "30", "lingers"), ("forks", "3", "20", "mixed"), ("exit", "0", "0.3"), ("dies", "9"))
            job = job._replace(program=chance.choice(what), ranks=1)
        jobs.append(job)
        at_s = chance.random() * 0.3
        commands.append(Command(at_s, "detach", job.name))
        for _ in range(chance.choice((1, 2, 4))):
            commands.append(Command(at_s + chance.random() * 4, "ps", job.name))
        if chance.random() < 0.4:
            commands.append(Command(at_s + chance.random() * 3, "stop", job.name, chance.choice((0.0, 1.0, 3.0))))
        if chance.random() < 0.3:
            commands.append(Command(at_s + chance.random() * 9, "resume", job.name))
    faults = [Fault("pids", at_s=at_s + chance.random() * 6) for _ in range(chance.choice((0, 1, 2)))]
    if chance.random() < 0.6:
        faults.append(Fault("kill", "supervisor", chance.randrange(60, 700)))
    if chance.random() < 0.3:
        faults.append(Fault("kill", chance.choice(("rank", "program")), chance.randrange(1, 60)))
    return Schedule(seed, gpus, tuple(jobs), tuple(sorted(commands)), tuple(faults))


THEMES: tuple[Callable[[int, Chance], Schedule], ...] = (attempts, collections, accounts, leftovers)
