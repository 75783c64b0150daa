"""The step of srun that started this process, read from Slurm's variables. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import UserError

MOST_STEPS = 0xFFFF_FF00
"""Higher step numbers are Slurm's special steps: the batch script, and the shell of salloc."""
LOWEST_PORT, PORTS = 15_000, 16_000
"""Below the ports that Linux gives to outgoing connections."""


@dataclass(frozen=True)
class Step:
    """This process is one of several tasks of srun."""

    task: int
    tasks: int
    local_task: int
    """Its number among the tasks of its node."""
    local_tasks: int
    node: int
    nodes: int
    first_host: str
    port: int
    """Where the tasks may meet, different for each job and step."""

    @property
    def is_one_a_node(self) -> bool:
        return self.tasks == self.nodes


def read_step(environ: Mapping[str, str]) -> Step | None:
    """The step whose task this process is; None outside of srun, and for a single task.

    In a batch script and in the shell of salloc SLURM_PROCID is 0 too, though nothing starts further tasks: so the
    number of the step and its count of tasks decide. Raises UserError if Slurm's variables do not fit together.
    """
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    number = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not number.isdigit() or int(number) >= MOST_STEPS or any(name not in environ for name in names):
        return None
    if environ["SLURM_STEP_NUM_TASKS"] == "1":
        return None
    counts = _tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "")))
    task, local_task, node, tasks, nodes = (int(environ[name]) if environ[name].isdigit() else -1 for name in names)
    fits = 0 <= task < tasks == sum(counts) and len(counts) == nodes and 0 <= node < nodes
    if not fits or not 0 <= local_task < counts[node]:
        shown = " ".join(f"{name}={environ[name]}" for name in names)
        raise UserError(
            f"Slurm's variables do not fit together: {shown}",
            hint="start train.py with srun itself; variables of an earlier step may be left over",
        )
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", ""))
    job = environ.get("SLURM_JOB_ID", "0")
    port = LOWEST_PORT + (int(job if job.isdigit() else 0) + int(number)) % PORTS
    return Step(task, tasks, local_task, counts[node], node, nodes, first_host(hosts), port)


def first_host(nodes: str) -> str:
    """`gpu01` of `gpu[01-04,07],big1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # not at a comma inside brackets
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _tasks_of_nodes(text: str) -> list[int]:
    """[2, 2, 1] of `2(x2),1`; empty for any other text."""
    parts = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
