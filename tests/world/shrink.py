"""A schedule that fails, without what it does not need to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tests.world.schedule import Schedule

T = TypeVar("T")


def shrink(schedule: T, fails: Callable[[T], str | None], shorter_ones: Callable[[T], Iterable[T]]) -> tuple[T, str]:
    """The shortest schedule found that still fails, and what does not hold in it. The seed stays: it is the kernel's
    chance. `shorter_ones`: those with a little less in them."""
    why = fails(schedule)
    assert why is not None
    while True:
        for shorter in shorter_ones(schedule):
            found = fails(shorter)
            if found is not None:
                schedule, why = shorter, found
                break
        else:
            return schedule, why


def shorter(schedule: Schedule) -> list[Schedule]:
    found = []
    for number in range(len(schedule.faults)):
        found.append(schedule._replace(faults=schedule.faults[:number] + schedule.faults[number + 1 :]))
    for job in schedule.jobs:
        if len(schedule.jobs) > 1:
            jobs = tuple(other for other in schedule.jobs if other != job)
            commands = tuple(command for command in schedule.commands if command.job != job.name)
            found.append(schedule._replace(jobs=jobs, commands=commands))
    for number, command in enumerate(schedule.commands):
        if len([other for other in schedule.commands if other.job == command.job]) > 1:
            found.append(schedule._replace(commands=schedule.commands[:number] + schedule.commands[number + 1 :]))
    for number, job in enumerate(schedule.jobs):
        for simpler in (job._replace(max_restarts=0), job._replace(gpus=(), queue=False)):
            if simpler != job:
                found.append(schedule._replace(jobs=(*schedule.jobs[:number], simpler, *schedule.jobs[number + 1 :])))
    return found
