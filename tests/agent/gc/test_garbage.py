"""What may go, decided from an inventory alone: jobs by age, number and size, and what only they needed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer.agent.gc.choose import (
    AGENT,
    BLOB,
    CACHE,
    DATA,
    ENV,
    MIN_AGE_S,
    PACK,
    SPARE,
    TREE,
    GcObject,
    Inventory,
    JobItem,
    Policy,
    Removals,
    choose,
)
from tests.support.storing import DAY_S


def job(name: str, *, ended_s: float | None = 10 * DAY_S, size: int = 10, names: Any = (), **more: Any) -> JobItem:
    values = {"foreign": False, "settled": True, "known": True, **more}
    return JobItem(name, size, ended_s, names=frozenset(names), **values)


def inventory(*jobs: JobItem, objects: Any = (), blobs_of: Any = None, names_of: Any = None) -> Inventory:
    return Inventory(jobs, tuple(objects), blobs_of or {}, {}, names_of or {}, None)


def gone(inventory: Inventory, **limits: Any) -> list[str]:
    return sorted(job.id for job in choose(inventory, Policy(**limits)).jobs)


# --- which jobs -------------------------------------------------------------------------------------------------------

FIVE = inventory(*(job(f"j{n}", ended_s=n * DAY_S) for n in range(1, 6)))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, []),
        ({"older_than_s": 3.5 * DAY_S}, ["j4", "j5"]),
        ({"keep_jobs": 2}, ["j3", "j4", "j5"]),
        ({"keep_jobs": 0}, ["j1", "j2", "j3", "j4", "j5"]),
        ({"max_bytes": 25}, ["j3", "j4", "j5"]),
        ({"max_bytes": 25, "keep_jobs": 4}, ["j5"]),
        ({"older_than_s": 0, "keep_jobs": 3}, ["j4", "j5"]),
        ({"older_than_s": 4.5 * DAY_S, "max_bytes": 35}, ["j4", "j5"]),
        ({"keep_jobs": 0, "only": frozenset({"j1", "j9"})}, ["j1"]),
    ],
)
def test_ended_jobs_go_by_age_number_and_size(limits: dict[str, Any], expected: list[str]) -> None:
    assert gone(FIVE, **limits) == expected


@pytest.mark.parametrize("other", [{"ended_s": None}, {"foreign": True}])
def test_a_job_that_runs_or_is_another_machine_s_never_goes(other: dict[str, Any]) -> None:
    assert gone(inventory(job("a", **other)), older_than_s=0, max_bytes=0) == []


def test_a_job_from_which_a_kept_one_began_stays_and_goes_with_it() -> None:
    began = job("b", ended_s=DAY_S, names={"a"})
    assert gone(inventory(job("a"), began), older_than_s=2 * DAY_S) == []
    assert gone(inventory(job("a"), began), older_than_s=0) == ["a", "b"]


def test_a_job_into_which_the_code_of_a_kept_one_links_stays() -> None:
    linking = job("b", ended_s=DAY_S, names={"tree"})
    assert gone(inventory(job("a"), linking, names_of={"tree": frozenset({"a"})}), older_than_s=2 * DAY_S) == []


# --- what jobs share --------------------------------------------------------------------------------------------------


def test_what_no_job_needs_goes_with_the_last_one_that_needed_it() -> None:
    objects = [GcObject(kind, f"{kind}{n}", 1, 9 * DAY_S) for kind in (TREE, BLOB, DATA, ENV, AGENT) for n in (1, 2)]
    found = inventory(
        job("a", names={"tree1", "data1", "env1", "agent1"}),
        job("b", ended_s=None, names={"tree2", "data2", "env2", "agent2"}),
        objects=objects,
        blobs_of={"tree1": frozenset({"blob1"}), "tree2": frozenset({"blob2"})},
    )
    assert [obj.name for obj in choose(found, Policy()).objects] == ["agent1"]  # an ended job runs no agent
    assert {t.name for t in choose(found, Policy(keep_jobs=0)).objects} == {"tree1", "blob1", "data1", "env1", "agent1"}


def test_what_is_young_or_held_by_a_process_stays() -> None:
    young = [GcObject(kind, kind, 1, age_s - 1) for kind, age_s in MIN_AGE_S.items()]
    held = [GcObject(kind, kind + "2", 1, 99 * DAY_S, in_use=True) for kind in MIN_AGE_S]
    assert choose(inventory(objects=young + held), Policy()).objects == ()
    old = [obj._replace(age_s=MIN_AGE_S[obj.kind]) for obj in young]
    assert len(choose(inventory(objects=old), Policy()).objects) == len(MIN_AGE_S)


@pytest.mark.parametrize(
    ("age_days", "limits", "running", "goes"),
    [
        (29, {}, False, False),
        (30, {}, False, True),
        (99, {}, True, False),  # a job that runs may be about to read it
        (1, {"max_bytes": 14}, False, True),
        (1, {"max_bytes": 14}, True, False),
        (1, {"max_bytes": 15}, False, False),
    ],
)
def test_caches_go_by_age_and_before_jobs_by_size(
    age_days: int, limits: dict[str, Any], running: bool, goes: bool
) -> None:
    objects = [GcObject(CACHE, "compile/torch-2", 5, age_days * DAY_S)]
    found = inventory(job("a", ended_s=None if running else DAY_S), objects=objects)
    chosen = choose(found, Policy(**limits))
    assert (bool(chosen.objects), chosen.jobs) == (goes, ())


@pytest.mark.parametrize(
    ("state", "stay"),
    [({"known": False}, {TREE, BLOB, PACK, DATA, ENV, AGENT}), ({"settled": False}, {ENV, AGENT})],
)
def test_while_a_job_s_needs_are_unknown_nothing_goes_that_it_might_need(state: dict[str, Any], stay: set[str]) -> None:
    objects = [GcObject(kind, kind, 1, 99 * DAY_S) for kind in (TREE, BLOB, PACK, DATA, ENV, AGENT, SPARE)]
    found = inventory(job("a", ended_s=None, **state), objects=objects)
    assert {obj.kind for obj in objects} - {t.kind for t in choose(found, Policy()).objects} == stay


NAMES = [f"{kind}{n}" for kind in (TREE, DATA, ENV, AGENT) for n in range(4)]
IDS = [f"job{n}" for n in range(6)]
BLOBS = [f"blob{n}" for n in range(6)]
PACKS = ["pack0", "pack1"]
CACHES = ["cache0", "cache1"]
AGES = st.sampled_from([0.0, 3599.0, 3601.0, 2 * DAY_S, 40 * DAY_S])


@st.composite
def inventories(draw: Any) -> Inventory:
    words = st.frozensets(st.sampled_from(NAMES + IDS), max_size=6)
    jobs = tuple(
        JobItem(
            name,
            draw(st.integers(0, 100)),
            draw(st.none() | AGES),
            draw(st.booleans()),
            draw(words) - {name},
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for name in draw(st.sets(st.sampled_from(IDS)))
    )
    names = [*NAMES, *BLOBS, *PACKS, *CACHES, "spare0"]
    objects = tuple(GcObject(name[:-1], name, 5, draw(AGES), draw(st.booleans())) for name in names)
    trees = [name for name in NAMES if name.startswith(TREE)]
    blobs = {tree: draw(st.frozensets(st.sampled_from(BLOBS))) for tree in trees}
    links = {tree: draw(st.frozensets(st.sampled_from(IDS), max_size=1)) for tree in trees}
    packed = {pack: draw(st.frozensets(st.sampled_from(BLOBS))) for pack in PACKS}
    return Inventory(jobs, objects, blobs, packed, links, draw(st.none() | st.sampled_from(trees)))


POLICIES = st.builds(
    Policy, st.none() | AGES, st.none() | st.integers(0, 300), st.none() | st.integers(0, 4), st.none()
)


@settings(max_examples=150)
@given(inventories(), POLICIES)
def test_nothing_goes_that_a_kept_job_needs(found: Inventory, policy: Policy) -> None:
    removed = choose(found, policy)
    ids, names = {j.id for j in removed.jobs}, {t.name for t in removed.objects}
    assert all(j.ended_s is not None and not j.foreign for j in removed.jobs)
    for kept in (j for j in found.jobs if j.id not in ids):
        trees = {name for name in kept.names if name.startswith(TREE)}
        linked = {name for tree in trees for name in found.names_of[tree]}
        blobs = {blob for tree in trees for blob in found.blobs_of[tree]}
        agents = {name for name in kept.names if name.startswith(AGENT)} if kept.ended_s is not None else set()
        assert not (kept.names | linked) - {kept.id} & ids
        assert not ((kept.names | blobs) - agents) & names
    if any(job.ended_s is None for job in found.jobs):
        assert not names.intersection(CACHES)
    left = {t.name for t in found.objects if t.kind == TREE} - names
    whole = {blob for tree in left for blob in found.blobs_of[tree]}
    assert not whole & names  # a tree that is left is whole
    assert not any(found.packed[pack] & whole for pack in names.intersection(PACKS))
    assert choose(_without(found, removed), policy).objects == ()  # and once more finds nothing


def _without(found: Inventory, removed: Removals) -> Inventory:
    return found._replace(
        jobs=tuple(j for j in found.jobs if j not in removed.jobs),
        objects=tuple(t for t in found.objects if t not in removed.objects),
    )
