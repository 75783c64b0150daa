"""Every prefix of every write of a state file, with the crash after it: enumerated, not sampled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.world.run import Run, Write, carry_out
from tests.world.schedule import Command, Fault, Job, Schedule

STATE = re.compile(
    r".*/(job\.json|status\.json|stop\.json|rank_\d+\.json|resolved\.json|[^/]*new-[0-9a-f]{16})(\.\d+\.tmp)?\Z"
)
"""Files by which one process tells another what is so, under the names that they are written by."""

_FAILS = Job("job-0", ("exit", "3", "0.2"), gpus=("auto:1",), queue=True)
_STOPS = Job("job-0", ("launcher", "2", "orderly", "1"), ranks=2)
SCHEDULES = (
    Schedule(1, 1, (_FAILS,), (Command(0.0, "launch", "job-0"),), ()),
    Schedule(2, 0, (_STOPS,), (Command(0.0, "launch", "job-0"), Command(0.4, "stop", "job-0", 1.0)), ()),
)


def writes_of(schedule: Schedule) -> list[Write]:
    """Those of state files, as they come when nothing goes wrong."""
    run = Run(schedule)
    assert carry_out(schedule, run) is None
    return [write for write in run.written if write.role and STATE.match(write.path)]


def prefixes(stride: int = 1) -> Iterator[Schedule]:
    """Each schedule with one crash in it: after no byte, after each `stride` bytes, after all, of each write; the
    process is killed, or the host loses its power."""
    for schedule in SCHEDULES:
        for write in writes_of(schedule):
            for size in sorted({*range(0, write.size, stride), write.size}):
                for word in ("kill", "power"):
                    yield schedule._replace(faults=(Fault("prefix", write.role, write.number, value=size, word=word),))


def first_broken(stride: int) -> tuple[int, str]:
    """(how many crashes were tried, what does not hold after one of them; "" for nothing)."""
    count = 0
    for count, schedule in enumerate(prefixes(stride), 1):
        why = carry_out(schedule)
        if why is not None:
            return count, f"{why}\n{schedule}"
    return count, ""
