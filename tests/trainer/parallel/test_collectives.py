"""No collective stands where only some of the ranks would reach it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.ferry import REPO

TRAINER = REPO / "trainer"
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "reduce",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "scatter_object_list",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "new_group",
    "full_tensor",
    "sum_over_ranks",
    "on_rank0",
    "on_all",
    "on_each_storage",
    "on_keepers",
    "on_ranks",
    "settle",
    "from_rank0",
    "rank0_first",
    "train_step",
    "evaluate",
    "clip",
}
"""torch's own, and our functions that call them."""
RANK_NAMES = {"rank", "local_rank", "is_main", "is_keeper"}


def collectives_under_a_rank(source: str) -> Iterator[tuple[int, str]]:
    """(line, call) of every collective in a branch that asks which rank this is, or behind a return from one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and asks_for_rank(node.test):
            yield from calls(branches(node))
        for body in bodies(node):
            for place, statement in enumerate(body):
                if isinstance(statement, ast.If) and asks_for_rank(statement.test) and leaves(statement):
                    yield from calls(body[place + 1 :])


def asks_for_rank(test: ast.expr) -> bool:
    named = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    named |= {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return bool(named & RANK_NAMES)


def branches(node: ast.If | ast.IfExp | ast.While) -> list[ast.AST]:
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return [*node.body, *node.orelse]


def bodies(node: ast.AST) -> list[list[ast.stmt]]:
    return [body for name in ("body", "orelse", "finalbody") if isinstance(body := getattr(node, name, None), list)]


def leaves(statement: ast.If) -> bool:
    return isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def calls(nodes: list) -> Iterator[tuple[int, str]]:
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in COLLECTIVES:
                yield node.lineno, name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if dist.is_main:\n    barrier(dist)", [(2, "barrier")]),
        ("if rank == 0:\n    pass\nelse:\n    x.full_tensor()", [(4, "full_tensor")]),
        ("def f():\n    if dist.rank != 0:\n        return\n    torch_dist.all_reduce(x)", [(4, "all_reduce")]),
        ("y = all_reduce(x) if dist.is_main else x", [(1, "all_reduce")]),
        ("if dist.world_size > 1:\n    all_reduce(x)", []),
        ("if dist.is_main:\n    write()\nbarrier(dist)", []),
    ],
)
def test_collective_under_a_rank_is_found(source, found):
    assert list(collectives_under_a_rank(source)) == found


@pytest.mark.parametrize("path", sorted(TRAINER.rglob("*.py")), ids=lambda path: str(path.relative_to(TRAINER)))
def test_trainer_has_no_collective_that_only_some_ranks_reach(path):
    assert list(collectives_under_a_rank(path.read_text())) == []
