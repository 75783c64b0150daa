"""What several storages hold together: the newest whole checkpoint, and the files that a node needs. Tables."""

from __future__ import annotations

import pytest

from tests.trainer.nodes.bringing import Folder, needed, to_bring
from trainer.checkpoint.reach import render_lacking
from trainer.checkpoint.spread import ALWAYS, Holding, Part, Spread, agree

NAMES = ["node 0 (a)", "node 1 (b)"]


def sealed(step: int, save: str = "x") -> Holding:
    return Holding(step, save, True)


def prepared(step: int, save: str = "x") -> Holding:
    return Holding(step, save, False)


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ([], [], []),
        ([sealed(2)], [sealed(2)], [(2, "x")]),
        ([sealed(2), sealed(4)], [sealed(2), sealed(4)], [(4, "x"), (2, "x")]),
        ([sealed(2), sealed(4)], [sealed(2)], [(2, "x")]),
        ([sealed(4)], [sealed(2)], []),
        # a kill between two markers: every part was prepared before the first one
        ([sealed(4)], [prepared(4)], [(4, "x")]),
        ([sealed(2), prepared(4)], [sealed(2), prepared(4)], [(2, "x")]),
        # the parts of two saves of one step do not fit
        ([sealed(2), sealed(4, "new")], [sealed(2), sealed(4, "old")], [(2, "x")]),
        ([sealed(4, "new")], [sealed(4, "old"), prepared(4, "new")], [(4, "new")]),
        ([sealed(2), Holding(4, "", True, "state.json has 3 bytes")], [sealed(2), sealed(4)], [(2, "x")]),
    ],
)
def test_checkpoint_is_whole_if_every_storage_has_its_part_and_one_has_the_marker(first, second, whole):
    assert list(agree([first, second], NAMES).whole) == whole
    assert list(agree([second, first], NAMES).whole) == whole


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ([sealed(2), sealed(4)], [sealed(2)], {4: "node 1 (b) has no part of it"}),
        ([sealed(4)], [], {4: "node 1 (b) has no part of it"}),
        ([sealed(2)], [sealed(2), sealed(4)], {4: "node 0 (a) has no part of it"}),
        ([sealed(4, "new")], [sealed(4, "old")], {4: "its parts are of different saves"}),
        ([sealed(4)], [Holding(4, "", True, "state.json is bad")], {4: "node 1 (b): state.json is bad"}),
        ([sealed(4), sealed(2)], [sealed(4)], {}),  # older than the newest whole one: retention was killed
        ([sealed(2), prepared(4)], [sealed(2)], {}),  # a save that no node has finished
    ],
)
def test_newer_step_that_is_not_whole_says_which_node_lacks_it(first, second, why):
    assert agree([first, second], NAMES).lacking == why


RANDOM = {"random_0.pt": (1, 1), "random_1.pt": (1, 2)}
BESIDE = {*RANDOM, ".metadata"}
PARTS = (
    Part("node 0 (a)", (0,), {"__0_0.distcp": (5, 5), ".metadata": (9, 9)}),
    Part("node 1 (b)", (1,), {"__1_0.distcp": (6, 6), ".metadata": (9, 8)}),
)
SHARDS = ("__0_0.distcp", "__1_0.distcp")


def part(storage: int, needs: tuple[str, ...] = SHARDS) -> Spread:
    return Spread("x", storage, PARTS, RANDOM, needs)


def test_node_on_the_same_mesh_needs_its_own_files_and_any_other_what_its_metadata_names():
    assert needed(part(1), ranks=[1]) == {"__1_0.distcp", *BESIDE}
    assert needed(part(1), ranks=[0]) == {*SHARDS, *BESIDE}
    assert needed(part(1)) == {*SHARDS, *BESIDE}
    assert needed(part(0, needs=("__0_0.distcp",))) == {"__0_0.distcp", *BESIDE}  # a whole replica


def folder(storage: int, needs: tuple[str, ...] = SHARDS) -> Folder:
    return Folder({*part(storage).own, *ALWAYS}, part(storage, needs))


def test_nodes_that_come_back_to_their_places_bring_nothing():
    assert to_bring([folder(0), folder(1)], ranks=[[0], [1]]) == [{}, {}]


def test_another_mesh_needs_the_shards_of_the_other_nodes():
    assert to_bring([folder(0), folder(1)]) == [{"__1_0.distcp": 1}, {"__0_0.distcp": 0}]


def test_nodes_with_a_replica_each_need_nothing_on_another_mesh():
    each = [folder(0, ("__0_0.distcp",)), folder(1, ("__1_0.distcp",))]
    assert to_bring(each) == [{}, {}]


def test_new_host_takes_the_part_of_another_and_what_that_needs():
    new = Folder((), None)
    files = {".metadata": 1, "COMPLETE": 1, "state.json": 1, "__1_0.distcp": 1, "random_0.pt": 1, "random_1.pt": 1}
    assert to_bring([new, folder(1, ("__1_0.distcp",))]) == [files, {}]
    lost = to_bring([new, folder(1)])
    assert lost[0] == files | {"__0_0.distcp": None} and lost[1] == {"__0_0.distcp": None}


def test_nothing_can_be_brought_where_no_node_has_a_part():
    assert to_bring([Folder((), None), Folder((), None)]) == [{}, {}]


def test_files_that_a_node_lacks_are_told_with_the_node_that_had_them():
    text = render_lacking([["__1_0.distcp"], ["__0_0.distcp"], ["__0_0.distcp", "x"]], [*NAMES, NAMES[1]], part(0))
    assert text == (
        "node 0 (a) lacks __1_0.distcp, which node 1 (b) had; node 1 (b) lacks __0_0.distcp, which node 0 (a) had; "
        "node 1 (b) lacks x, which no node had"
    )
