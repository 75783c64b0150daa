"""The plan: all decisions of a launch. The client builds it, the host reads it from job.json.

A plan has roles; today one role on one node. A value that only the host knows (interpreter, folders, the GPUs that it
chooses) is a slot. Stdlib only, Python 3.8: both sides use it.
"""

from typing import Any, Dict, Iterator, List, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..gpus.view import GpuRequest, auto_count
from ..host.layout import GroupName
from ..host.typed import InvalidData, from_json
from ..python.spec import PythonSpec

PLAN_VERSION = 2

RoleName = Literal["trainer", "program"]
TRAINER: RoleName = "trainer"
PROGRAM: RoleName = "program"


class Slot(NamedTuple):
    """A value that only the host knows: python, job, agent, root, or the role's gpus."""

    slot: str


Text = Union[str, Tuple[Union[str, Slot], ...]]
"""A string, or parts with slots that are joined on the host."""


class Devices(NamedTuple):
    """The GPUs of one role on one node."""

    kind: Literal["cuda", "cpu", "any"]
    """"any": a program that names no GPU and sees them all."""
    gpus: Tuple[str, ...] = ()
    """As --gpus names them: indices, UUIDs, or one auto:N."""


class Role(NamedTuple):
    """Processes of one kind: their command, their devices on each node, and their number of restarts."""

    name: RoleName
    argv: Tuple[Text, ...]
    cwd: Text
    env: Dict[str, Text]
    nodes: Tuple[Devices, ...]
    nproc: int = 1
    """Processes on each node."""
    torchrun: bool = False
    readiness: Literal["ranks"] = "ranks"
    """When it counts as running. "ranks": each of its processes has started."""
    max_restarts: int = 0


class Include(NamedTuple):
    """A data set or model that is sent once, outside the code tree, and linked into it at `path`."""

    path: str
    tree: str
    file: bool
    """A single file, not a folder."""


class Policy(NamedTuple):
    """What the host does with the job without a client."""

    queue: bool = False
    max_runtime_s: Optional[float] = None
    stall_timeout_s: Optional[float] = None
    log_max_bytes: Optional[int] = None
    outputs: Tuple[str, ...] = ()
    """Paths of the project that the job writes; a pull of its results copies them too."""
    after: Tuple[str, ...] = ()
    """Jobs that must succeed first: each a whole ID, or its beginning or end."""
    idle_timeout_s: Optional[float] = None
    notify: Tuple[str, ...] = ()
    """The host names of the --notify URLs. The URLs themselves are secrets and are in no plan."""


class Setup(NamedTuple):
    """A command that runs on the host before the job, once for its key and the job's interpreter."""

    command: str
    """A shell command, as the user wrote it."""
    key: str
    """A hash of the command and of all files in the trees that it names."""
    timeout_s: float = 3600.0


class Request(NamedTuple):
    """The user's request; the next attempt's plan is made from it and, for a trainer, from its config.yaml."""

    command: Tuple[str, ...] = ()
    """The program's arguments as typed; empty for the trainer."""
    torchrun: bool = False
    """One process of the program for each GPU."""
    overrides: Tuple[str, ...] = ()
    """Settings, `KEY=JSON`, that are not the defaults: all of a program's; of a trainer's, those that the host carries
    out and that its config.yaml lacks."""
    own_trainer: bool = False
    """The project has its own trainer; otherwise the client's, in lib/."""
    given_alone: bool = False
    """config.yaml contains only keys that were given; otherwise every key that its trainer knows."""


class Plan(NamedTuple):
    """One launch on one host."""

    job_id: str
    name: str
    created: str
    roles: Tuple[Role, ...]
    python: PythonSpec
    tree: str
    request: Request
    includes: Tuple[Include, ...] = ()
    allow_busy: bool = False
    policy: Policy = Policy()
    env_names: Tuple[str, ...] = ()
    secret_names: Tuple[str, ...] = ()
    config_yaml: Optional[str] = None
    setup: Optional[Setup] = None
    version: int = PLAN_VERSION


class Group(NamedTuple):
    """A role's processes on one node: one torchrun, or one program."""

    role: Role
    node: int
    devices: Devices
    folder: str
    """The path below an attempt's log folder: "" for a job's only group, else `ROLE`, `nodeK`, or `ROLE/nodeK`."""


def groups_of(plan: Plan) -> Iterator[Group]:
    """All groups of processes, role by role, the main role's first. A plan is for one host, so all groups are there."""
    for role in plan.roles:
        for node, devices in enumerate(role.nodes):
            name = GroupName(role.name if len(plan.roles) > 1 else None, node if len(role.nodes) > 1 else None)
            yield Group(role, node, devices, name.folder)


def wanted_gpus(plan: Plan) -> Optional[GpuRequest]:
    """The GPUs that all its groups together claim on this host; None for a job without GPUs."""
    shares = [group.devices.gpus for group in groups_of(plan) if group.devices.kind == "cuda"]
    gpus = tuple(gpu for share in shares for gpu in share)
    if not gpus:
        return None
    if all(map(auto_count, shares)):
        gpus = ("auto:%d" % sum(map(auto_count, shares)),)
    on_cpu = "target.device=cpu" if is_trainer(plan) else "--device cpu"
    return GpuRequest(plan.job_id, gpus, plan.policy.queue, plan.allow_busy, on_cpu)


def visible_to(plan: Plan, group: Group, visible: str) -> str:
    """A group's CUDA_VISIBLE_DEVICES: its share of the job's claim, which lists the GPUs group by group."""
    left = visible.split(",")
    for other in groups_of(plan):
        if other.devices.kind == "cuda":
            count = auto_count(other.devices.gpus) or len(other.devices.gpus)
            share, left = left[:count], left[count:]
            if other.folder == group.folder:
                return ",".join(share)
    return ""


def trees_of(plan: Plan) -> List[str]:
    """The trees that the job needs on the host, the code first."""
    wheels = [plan.python.wheels] if plan.python.wheels else []
    return [plan.tree, *(include.tree for include in plan.includes), *wheels]


def main_role(plan: Plan) -> Role:
    """The role that decides the job's end: when it ends, the supervisor ends the other roles."""
    return plan.roles[0]


def of_main_role(names: Sequence[GroupName]) -> List[GroupName]:
    """The main role's groups among a job's groups in the plan's order."""
    return [name for name in names if name.role == names[0].role]


def is_trainer(plan: Plan) -> bool:
    return main_role(plan).name == TRAINER


def max_restarts(plan: Plan) -> int:
    """How often a failed job restarts, all its roles together: as often as its main role may."""
    return main_role(plan).max_restarts


def process_count(plan: Plan) -> int:
    return sum(group.role.nproc for group in groups_of(plan))


def is_alone(plan: Plan) -> bool:
    """Whether the job is one process, whose output needs no prefix."""
    return process_count(plan) == 1


def unreadable_plan(job_id: str) -> Plan:
    """A plan for a supervisor of a job without a readable plan: it watches and stops the processes in its status and in
    /proc, and starts nothing. The job counts as a program, on no node."""
    return Plan(job_id, "", "", (Role(PROGRAM, (), "", {}, nodes=()),), PythonSpec(), "", Request())


def parse_plan(raw: Mapping[str, Any]) -> Plan:
    """The plan from a request or job.json. Raises InvalidData if it is not a plan. Also if this version of Torchferry
    does not know a part of it; then the message names both versions."""
    version = raw.get("version", 1)
    if version == 1:
        from .plan_version_1 import upgrade  # of jobs that an earlier Torchferry launched

        return upgrade(raw)
    if version != PLAN_VERSION:
        raise InvalidData("the plan is of version %.20r, and %s" % (version, _KNOWN))
    try:
        plan = from_json(dict(raw), Plan, strict=True)
    except InvalidData as damage:
        raise InvalidData("the plan, of version %d, is not understood: %s; %s" % (version, damage, _KNOWN)) from None
    if len(plan.roles) != 1 or len(plan.roles[0].nodes) != 1:
        shape = ", ".join("%s on %d nodes" % (role.name, len(role.nodes)) for role in plan.roles) or "no role"
        raise InvalidData("the plan, of version %d, is for %s; %s" % (version, shape, _KNOWN))
    return plan


_KNOWN = "this Torchferry knows versions 1 and %d, and one role on one node" % PLAN_VERSION


def fill(text: Text, slots: Mapping[str, str]) -> str:
    """The text with every slot's value in its place. Raises KeyError for an unknown slot."""
    if isinstance(text, str):
        return text
    return "".join(part if isinstance(part, str) else slots[part.slot] for part in text)
