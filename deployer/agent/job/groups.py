"""A job's groups of processes, from its plan and from the logs that have begun.

Stdlib only, Python 3.8: this package runs on the host.
"""

from typing import Dict, List, Tuple

from ..host.layout import ALONE, PREPARE_LOG, GroupName, Job
from ..logs.read import latest_attempt, log_names
from .plan import groups_of
from .record import known_plan
from .views import Processes

MOST_RANKS = 1024
"""Maximum ranks of one group: a damaged status may contain any number."""


def processes_of(job: Job, nproc: int) -> List[Processes]:
    """The groups by role and node. `nproc`: number of ranks if the job has only one group."""
    begun: Dict[GroupName, List[int]] = {}
    attempt = latest_attempt(job)
    for name in log_names(job, attempt) if attempt is not None else []:
        if name.file != PREPARE_LOG:
            begun.setdefault(name.group, []).extend([] if name.rank is None else [name.rank])
    found = {group: (group.role or "", group.node or 0) for group in begun or [ALONE]}
    found.update(_planned(job))
    if len(found) == 1:
        begun = {group: list(range(min(nproc, MOST_RANKS))) for group in found}
    places = sorted((place, group) for group, place in found.items())
    return [Processes(*place, ranks=tuple(begun.get(group, ()))) for place, group in places]


def _planned(job: Job) -> Dict[GroupName, Tuple[str, int]]:
    """Role and node of each group of the plan; empty if the plan cannot be read."""
    plan = known_plan(job)
    groups = groups_of(plan) if plan is not None else ()
    return {GroupName.parse(group.folder) or ALONE: (group.role.name, group.node) for group in groups}
