"""The simulated Linux, for the same cases."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable
from typing import Any

from tests.world.linux import process_calls
from tests.world.linux.calls import this
from tests.world.linux.modules import MODULES, open_
from tests.world.programs import JOBS
from tests.world.same.cases import Libraries, run_case
from tests.world.same.children import CHILDREN
from tests.world.same.sequences import run_sequence
from tests.world.world import World

HERE = "/srv/above/case"
NAMES = [
    "os",
    "time",
    "signal",
    "fcntl",
    "threading",
    "subprocess",
    "queue",
    "select",
    "shutil",
    "glob",
    "ctypes",
    "io",
    "sys",
]


def libraries() -> Libraries:
    return Libraries(
        **{name: MODULES[name] for name in NAMES},
        open=open_,
        here=HERE,
        fork=process_calls.fork_run,
        child=lambda *words: ["child", *words],
    )


def _child(words: list[str]) -> None:
    this().begin_python()
    CHILDREN[words[0]](libraries(), words[1:])


JOBS["child"] = _child


def _run(seed: int, body: Callable[[], Any]) -> Any:
    world = World(seed)
    world.folder(HERE, 0o755)
    answers: list[Any] = []
    process = world.start("case", lambda: answers.append(body()))
    process.cwd = HERE
    gc.disable()
    try:
        world.kernel.run(until=lambda: process.is_over, for_s=100)
    finally:
        gc.enable()
        told = answers[0] if answers else "the case was killed" if process.is_over else "the case does not end"
        world.end()
    return ast.literal_eval(repr(told))


def simulate(name: str, seed: int) -> Any:
    return _run(seed, lambda: run_case(libraries(), name))


def simulate_sequence(steps: Any, seed: int) -> Any:
    return _run(seed, lambda: run_sequence(libraries(), steps))
