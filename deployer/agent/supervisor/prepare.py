"""Prepares an attempt before any process is started: creates the folders, finds the interpreter, fills the slots.

Stdlib only, Python 3.8, Linux.
"""

import os
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..guard import secure_root
from ..host.errors import AgentError
from ..host.files import remove
from ..host.layout import AGENT_DIR, Job, Root
from ..job.plan import Group, groups_of, visible_to
from ..job.status import slot_of
from .command import Command, Resolving, SetupInput, fill, job_command, job_env, marks
from .start import LaunchInput
from .turn import Turn

OF_SETUP = ("setup", "below")
"""Slots that a setup fills. The status contains them, so that `gc` keeps the environment below the job's."""


class Prepared(NamedTuple):
    """The prepared command of one group of processes."""

    folder: str
    command: Command
    argv: Tuple[str, ...]
    """The role's arguments, without the wrapper."""
    slots: Dict[str, str]


def prepare(turn: Turn, given: LaunchInput, number: int, *, restarted: bool, visible: str) -> List[Prepared]:
    """Prepares all groups. `visible`: the GPUs that the job has claimed. Raises Stopped if a stop is requested."""
    job, groups = turn.job, list(groups_of(given.plan))
    root = os.path.dirname(os.path.dirname(job.path))
    try:
        secure_root(root)  # since the last attempt a housekeeper of /tmp may have removed it, for others to make it
    except OSError as error:
        raise AgentError("host", "%s cannot be used any more: %s" % (error.filename or root, error.strerror))
    for group in groups:
        os.makedirs(job.logs(number, group.folder), mode=0o700, exist_ok=True)
        os.makedirs(job.ranks(number, group.folder), mode=0o700, exist_ok=True)
    remove(job.outcome)  # of an earlier attempt
    base = {"root": root, "job": job.path, "agent": AGENT_DIR}
    setup = _setup_input(job, given, number, groups[0], base, visible) if given.plan.setup is not None else None
    slots = {**_resolve_python(turn, given, number, Root(root), setup, restarted=restarted), **base}
    return [_prepare_group(job, given, number, group, slots, restarted=restarted, visible=visible) for group in groups]


def _prepare_group(
    job: Job, given: LaunchInput, number: int, group: Group, slots: Dict[str, str], *, restarted: bool, visible: str
) -> Prepared:
    share = visible_to(given.plan, group, visible)
    slots = {**slots, "gpus": share} if share else slots
    role = group.role
    env = job_env(job, role, given, slots, attempt=number, restarted=restarted, folder=group.folder)
    argv = tuple(fill(text, slots) for text in role.argv)
    return Prepared(group.folder, job_command(role, argv, env, slots), argv, slots)


def _setup_input(
    job: Job, given: LaunchInput, number: int, group: Group, slots: Dict[str, str], visible: str
) -> SetupInput:
    """The setup's input, with the environment of the job's main role."""
    share = visible_to(given.plan, group, visible)
    slots = {**slots, "gpus": share} if share else slots
    assert given.plan.setup is not None
    env = job_env(job, group.role, given, slots, attempt=number, restarted=False)
    return SetupInput(given.plan.setup, env, list(given.secrets.values()))


def _resolve_python(
    turn: Turn, given: LaunchInput, number: int, root: Root, setup: Optional[SetupInput], *, restarted: bool
) -> Dict[str, str]:
    """Paths of the interpreter and of the setup's environment, by slot."""
    turn.check()
    known = slot_of(turn.status.now, "python")
    if restarted and os.path.exists(known):
        # the former attempt's interpreter and setup
        return {"python": known, **{name: slot_of(turn.status.now, name) for name in (OF_SETUP if setup else ())}}
    env = {**given.base_env, **given.env, **given.secrets, **marks(turn.job, number)}
    log = os.path.join(turn.job.logs(number), "prepare.log")
    spec = given.plan.python._replace(wheels=given.wheels)
    resolving = Resolving(spec, turn.job, root, env, log, setup)
    turn.children.expect(resolving.pid)
    while turn.children.code(resolving.pid) is None:
        turn.check()  # the sweep ends the child and what it started
        turn.wait()
    turn.check()
    return resolving.result()
