"""This process's place among nodes and ranks, decided from its environment. Pure; imports no torch.

Many images and clouds set RANK and WORLD_SIZE for a node, and shells keep variables of earlier runs. So a process is a
rank only if a launcher has left its mark: torchrun's TORCHELASTIC_RUN_ID, a step of srun with several tasks, or all
four of RANK, LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE, as accelerate sets them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from trainer.errors import UserError
from trainer.start.slurm import Step, read_step

TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
NODE_RANK_NAMES = ("NODE_RANK", "PET_NODE_RANK")
"""Names with PET_ are those that torchrun itself reads; Kubeflow sets them."""
NODES_NAMES = ("NNODES", "NUM_NODES", "PET_NNODES")
ADDRESS_NAMES, PORT_NAMES = ("MASTER_ADDR", "PET_MASTER_ADDR"), ("MASTER_PORT", "PET_MASTER_PORT")
DEFAULT_PORT = 29500
"""The default of torchrun."""
PROGRAM = "python train.py"
ALONE_COMMAND = f"{PROGRAM} CONFIG"
NO_LAUNCHER = "no launcher started this process"


@dataclass(frozen=True)
class Alone:
    """No launcher started this process, and no other node takes part."""


@dataclass(frozen=True)
class Rank:
    """A launcher started this process as one rank of several."""

    launcher: str
    rank: int
    env: Mapping[str, str] = field(default_factory=dict)
    """torchrun's variables, if the launcher itself does not set them."""


@dataclass(frozen=True)
class Node:
    """This process starts the ranks of one node; others do the same on the other nodes."""

    rank: int
    nodes: int
    address: str
    """Of node 0."""
    port: int
    read_from: str = ""
    """The variables that say so, for the log."""

    @property
    def endpoint(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


Place = Alone | Rank | Node


def read_place(environ: Mapping[str, str]) -> Place:
    """The place that the environment describes. Empty variables count as not set.

    Raises UserError with the right command if variables contradict each other, are incomplete or are left over.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    if TORCHRUN_MARK in given:
        return _rank_of_torchrun(given)
    step = read_step(given)
    if step is not None and not step.is_one_a_node:
        return _rank_of_srun(given, step)
    if all(name in given for name in RANK_NAMES):
        return _rank_of_another(given)
    local = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in given]
    if local and (step is None or given.get("LOCAL_RANK", "0") != "0"):
        _refuse_local(given, local)
    return _node(given, step)


def is_other_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank above 0. False if the environment does not fit together."""
    try:
        place = read_place(environ)
    except UserError:
        return False
    return isinstance(place, Rank) and place.rank > 0


def changes(place: Place) -> dict[str, str | None]:
    """The variables to set, or to remove (None), so that RANK is set exactly in a rank."""
    return dict(place.env) if isinstance(place, Rank) else dict.fromkeys(RANK_NAMES)


def without_torchruns(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a torchrun of ours: without PET_*, which torchrun takes for options that are not given."""
    return {name: value for name, value in environ.items() if not name.startswith("PET_")}


def render_place(place: Place) -> str | None:
    """One line for the log; None if there is nothing to say."""
    if isinstance(place, Node):
        return f"node {place.rank} of {place.nodes}, meeting at {place.endpoint} ({place.read_from})"
    if isinstance(place, Rank) and place.rank == 0 and place.env:
        where = f"{place.env['MASTER_ADDR']}:{place.env['MASTER_PORT']}"
        return f"{place.env['WORLD_SIZE']} ranks, one for each task of {place.launcher}, meeting at {where}"
    return None


def note_on_processes(environ: Mapping[str, str], processes: int) -> str | None:
    """A note if the environment names another number of processes a node than the config."""
    names = ("NPROC_PER_NODE", "PET_NPROC_PER_NODE")
    other = next((name for name in names if environ.get(name, "") not in ("", "auto", "gpu", str(processes))), None)
    if other is None:
        return None
    return f"{other}={environ[other]} has no effect: target.gpu_ranks starts {processes} rank(s) on this node"


def node_command(nodes: int | str, rank: int | str, address: str = "", port: int = DEFAULT_PORT) -> str:
    """The command that starts one node by hand."""
    told = f" MASTER_PORT={port}" if port != DEFAULT_PORT else ""
    return f"NNODES={nodes} NODE_RANK={rank} MASTER_ADDR={address or 'ADDRESS'}{told} {ALONE_COMMAND}"


# --- ranks -----------------------------------------------------------------------------------------------------------


def _rank_of_torchrun(given: Mapping[str, str]) -> Rank:
    missing = [name for name in RANK_NAMES[:3] if name not in given]
    if missing:
        raise UserError(
            f"{TORCHRUN_MARK} is set, but not {_and(missing)}: no torchrun started this process",
            hint=f"the variables are left over: `unset {TORCHRUN_MARK}`, then `{ALONE_COMMAND}`",
        )
    numbers = {name: _number(given, name) for name in RANK_NAMES if name in given}
    _check_within(given, "RANK", numbers["RANK"], "WORLD_SIZE", numbers["WORLD_SIZE"])
    return Rank("torchrun", numbers["RANK"])


def _rank_of_srun(given: Mapping[str, str], step: Step) -> Rank:
    """One task of srun is one rank. Its own variables decide; torchrun's must agree if somebody has set them."""
    wanted = dict(zip(RANK_NAMES, (step.task, step.local_task, step.tasks, step.local_tasks), strict=True))
    wrong = [name for name, number in wanted.items() if given.get(name, str(number)) != str(number)]
    if wrong:
        raise UserError(
            f"{_show(given, wrong[:1])} is set, but for this task of srun it would be {wanted[wrong[0]]} "
            f"(SLURM_PROCID={step.task}, {step.tasks} tasks)",
            hint=f"`unset {' '.join(wrong)}` before srun: train.py reads Slurm's own variables",
        )
    address, port = _endpoint(given, step)
    env = {name: str(number) for name, number in wanted.items()}
    env |= {"GROUP_RANK": str(step.node), "GROUP_WORLD_SIZE": str(step.nodes)}
    return Rank("srun", step.task, {**env, "MASTER_ADDR": address, "MASTER_PORT": str(port)})


def _rank_of_another(given: Mapping[str, str]) -> Rank:
    rank, local_rank, world, local_world = (_number(given, name) for name in RANK_NAMES)
    on_one_node = world == local_world
    fits = local_rank < local_world <= world and local_rank <= rank < world
    if not fits or (on_one_node and rank != local_rank):
        raise UserError(
            f"{_show(given, RANK_NAMES)} contradict each other, so no launcher set them for this process",
            hint=_unset(given, RANK_NAMES),
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]
    if missing:
        raise UserError(
            f"{_show(given, RANK_NAMES)} are set, but not {_and(missing)}, where the ranks meet",
            hint=f"{_unset(given, RANK_NAMES)}; a launcher must set {_and(missing)} too",
        )
    return Rank("another launcher", rank)


def _refuse_local(given: Mapping[str, str], local: Sequence[str]) -> NoReturn:
    """Raise the error for variables of a rank without a launcher."""
    if all(name in given for name in (*RANK_NAMES[:3], "MASTER_ADDR")):
        more = "if a launcher set them, it must set LOCAL_WORLD_SIZE too"
    else:
        more = f"or start `{node_command('N', 'K')}` on each of N nodes"
    verb = "is" if len(local) == 1 else "are"
    message = f"{_show(given, local)} {verb} set, but {NO_LAUNCHER}"
    raise UserError(message, hint=f"{_unset(given, RANK_NAMES)}; {more}")


# --- nodes -----------------------------------------------------------------------------------------------------------


def _node(given: Mapping[str, str], step: Step | None) -> Alone | Node:
    """This node among those that the variables count; RANK and WORLD_SIZE count nodes too, as no launcher set them."""
    if step is not None:
        given = {**given, "SLURM_PROCID": str(step.task), "SLURM_STEP_NUM_NODES": str(step.nodes)}
    slurm = step is not None
    of_node = [name for name in (*NODE_RANK_NAMES, *(["SLURM_PROCID"] if slurm else []), "RANK") if name in given]
    of_nodes = [name for name in (*NODES_NAMES, *(["SLURM_STEP_NUM_NODES"] if slurm else [])) if name in given]
    rank, nodes = _agreed(given, of_node), _agreed(given, of_nodes)
    if nodes is None and "WORLD_SIZE" in given:
        nodes, of_nodes = _number(given, "WORLD_SIZE"), ["WORLD_SIZE"]
    elif nodes and "WORLD_SIZE" in given and _number(given, "WORLD_SIZE") % nodes:
        _contradict(given, [of_nodes[0], "WORLD_SIZE"])
    if rank is None and nodes is None:
        return Alone()
    if nodes == 0:
        raise UserError(f"{_show(given, of_nodes[:1])}: a training has 1 node or more", hint=_unset(given, of_nodes))
    if rank is None and nodes is not None and nodes > 1:
        _refuse_without_rank(given, of_nodes[0], nodes)
    if nodes is None:
        _refuse_without_nodes(given, of_node)
    if rank is not None:
        _check_within(given, of_node[0], rank, of_nodes[0], nodes)
    if nodes == 1:
        return Alone()
    assert rank is not None
    _check_address(given, step, _show(given, [of_node[0], of_nodes[0]]), nodes, rank)
    return Node(rank, nodes, *_endpoint(given, step), read_from=_read_from(given, of_node[0], of_nodes[0]))


def _read_from(given: Mapping[str, str], of_node: str, of_nodes: str) -> str:
    """`NODE_RANK=1 and NNODES=2`; where RANK or WORLD_SIZE counts nodes, that too."""
    told = [name for name in (of_node, of_nodes) if name in RANK_NAMES]
    if not told:
        return _show(given, [of_node, of_nodes])
    other = [name for name in (of_node, of_nodes) if name not in told]
    count = "count" if len(told) > 1 else "counts"
    more = f"; {_show(given, other)}" if other else ""
    return f"{_show(given, told)} {count} nodes here, as {NO_LAUNCHER}{more}"


def _refuse_without_rank(given: Mapping[str, str], name: str, nodes: int) -> NoReturn:
    if name == "WORLD_SIZE":
        raise UserError(
            f"{_show(given, [name])} is set, but {NO_LAUNCHER}",
            hint=f"{_unset(given, RANK_NAMES)}; or start `{node_command(nodes, 'K')}` on each of {nodes} nodes",
        )
    hint = f"start `{node_command(nodes, 'K')}` on each, K from 0 to {nodes - 1}; or `unset {name}`"
    raise UserError(f"{_show(given, [name])}, but NODE_RANK does not say which node this is", hint=hint)


def _refuse_without_nodes(given: Mapping[str, str], of_node: Sequence[str]) -> NoReturn:
    name = of_node[0]
    read = ", read as this node's number as no launcher started this process" if name == "RANK" else ""
    command = node_command("N", given[name], given.get("MASTER_ADDR", ""))
    hint = f"`{command}`; for this node alone {_unset(given, of_node)}"
    raise UserError(f"{_show(given, [name])}{read}: NNODES does not say how many nodes there are", hint=hint)


def _check_address(given: Mapping[str, str], step: Step | None, told: str, nodes: int, rank: int) -> None:
    if step is None and not any(name in given for name in ADDRESS_NAMES):
        hint = f"`{node_command(nodes, rank)}`, where ADDRESS is that of node 0"
        raise UserError(f"{told}, but MASTER_ADDR does not say where node 0 is", hint=hint)


def _endpoint(given: Mapping[str, str], step: Step | None) -> tuple[str, int]:
    """Address and port where the ranks meet; under srun its first node, if nobody names another."""
    name = next((name for name in ADDRESS_NAMES if name in given), None)
    address = given[name] if name else step.first_host if step else ""
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*:\w*", bare):
        raise UserError(
            f"{name or 'MASTER_ADDR'}={address} is not a host name or an address",
            hint="write the address of node 0 alone, such as 10.0.0.1; MASTER_PORT names the port",
        )
    port_name = next((name for name in PORT_NAMES if name in given), None)
    if port_name is None:
        return bare, step.port if step else DEFAULT_PORT
    port = _number(given, port_name)
    if not 0 < port < 1 << 16:
        raise UserError(f"{port_name}={port} is not a port", hint="name one from 1024 to 65535, the same on all nodes")
    return bare, port


# --- numbers ---------------------------------------------------------------------------------------------------------


def _number(given: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", given[name]):
        why = "write one number; a range is for torchrun" if ":" in given[name] else "set it right, or unset it"
        raise UserError(f"{name}={given[name]} is not a whole number of 0 or more", hint=why)
    return int(given[name])


def _agreed(given: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The number that all these variables hold; None if there are none."""
    numbers = [_number(given, name) for name in names]
    for name, number in zip(names, numbers, strict=True):
        if number != numbers[0]:
            _contradict(given, [names[0], name])
    return numbers[0] if numbers else None


def _contradict(given: Mapping[str, str], names: Sequence[str]) -> NoReturn:
    hint = f"unset what is left over, or start `{node_command('N', 'K')}` on each of N nodes"
    raise UserError(f"{_show(given, names)} contradict each other", hint=hint)


def _check_within(given: Mapping[str, str], name: str, rank: int, of: str, count: int) -> None:
    if rank >= count:
        one = "only 0 is possible" if count == 1 else f"possible are 0 to {count - 1}"
        raise UserError(
            f"{_show(given, [name])}, but {one} with {_show(given, [of])}", hint=f"set {name} or {of} right"
        )


def _show(given: Mapping[str, str], names: Sequence[str]) -> str:
    """`RANK=1 and WORLD_SIZE=2`."""
    return _and([f"{name}={given[name]}" for name in names])


def _and(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _unset(given: Mapping[str, str], names: Sequence[str]) -> str:
    here = [name for name in names if name in given]
    return f"if {'it is' if len(here) == 1 else 'they are'} left over: `unset {' '.join(here)}`, then `{ALONE_COMMAND}`"
