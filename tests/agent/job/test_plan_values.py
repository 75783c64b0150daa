"""A plan as data: the same after a way through JSON, of version 1 too, and refused where nobody here knows it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agent.host.typed import InvalidData, from_json, to_json
from deployer.agent.job.plan import Devices, Plan, Role, Slot, fill, groups_of, parse_plan
from deployer.agent.python.spec import PythonSpec
from tests.agent.typed_values import values_of
from tests.compat.finished import JOBS

PYTHON = Slot("python")


def plan_of(**changes: Any) -> dict[str, Any]:
    role = Role("program", ((PYTHON,), "m.py"), ((Slot("job"), "/code")), {"A": "b"}, (Devices("any"),))
    plan = Plan("a-1", "a", "2026-01-01T00:00:00Z", (role,), PythonSpec(), "t" * 40, request=_request())
    return {**json.loads(json.dumps(to_json(plan))), **changes}


def _request() -> Any:
    from deployer.agent.job.plan import Request

    return Request(("python", "m.py"), overrides=("target.max_restarts=3",))


@given(values_of(Plan))
def test_a_plan_written_and_read_is_the_same(plan: Plan) -> None:
    assert from_json(json.loads(json.dumps(to_json(plan))), Plan, strict=True) == plan


def test_a_plan_of_today_is_read_as_it_was_sent() -> None:
    assert to_json(parse_plan(plan_of())) == plan_of()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 3}, "the plan is of version 3, and this Torchferry knows versions 1 and 2"),
        ({"version": "x"}, "the plan is of version 'x', and this Torchferry knows versions 1 and 2"),
        (
            {"hosts": 4},
            "of version 2, is not understood: hosts is not known here; this Torchferry knows versions 1 and 2",
        ),
        ({"tree": 5}, r"is not understood: tree is 5, not a text"),
        ({"roles": []}, "is for no role; this Torchferry knows versions 1 and 2, and one role on one node"),
    ],
)
def test_what_is_not_known_is_refused_with_its_name_and_both_versions(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        parse_plan(plan_of(**changes))


def test_an_unknown_role_and_a_field_of_a_role_are_refused() -> None:
    (role,) = plan_of()["roles"]
    with pytest.raises(
        InvalidData, match=r"roles\[0\].name is 'server', not one of trainer, program; this .* versions 1 and 2"
    ):
        parse_plan(plan_of(roles=[{**role, "name": "server"}]))
    with pytest.raises(InvalidData, match=r"roles\[0\].port is not known here"):
        parse_plan(plan_of(roles=[{**role, "port": 80}]))
    with pytest.raises(InvalidData, match="is for program on 1 nodes, trainer on 2 nodes"):
        parse_plan(plan_of(roles=[role, {**role, "name": "trainer", "nodes": [{"kind": "cpu"}] * 2}]))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_value_in_a_plan_is_read_or_is_damage(value: Any) -> None:
    for name in plan_of():
        try:
            parse_plan(plan_of(**{name: value}))
        except InvalidData as damage:
            assert "this Torchferry knows versions" in str(damage) or name == "version"


def test_folders_of_groups_are_the_former_ones_where_there_is_one() -> None:
    plan = parse_plan(plan_of())
    role = plan.roles[0]
    trainer = role._replace(name="trainer", nodes=(Devices("cpu"), Devices("cpu")))
    assert [group.folder for group in groups_of(plan)] == [""]
    assert [group.folder for group in groups_of(plan._replace(roles=(trainer,)))] == ["node0", "node1"]
    both = plan._replace(roles=(trainer, role))
    assert [group.folder for group in groups_of(both)] == ["trainer/node0", "trainer/node1", "program"]


def test_text_is_filled_with_slots_and_an_unknown_slot_is_an_error() -> None:
    assert fill("plain", {}) == "plain"
    assert fill((Slot("job"), "/code"), {"job": "/r/j"}) == "/r/j/code"
    with pytest.raises(KeyError):
        fill((Slot("future"),), {"job": "x"})


# --- version 1 --------------------------------------------------------------------------------------------------------


def old_plan(name: str) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((JOBS / name / "job.json").read_text())["plan"]
    return plan


@pytest.mark.parametrize("name", sorted(folder.name for folder in JOBS.iterdir()))
def test_a_plan_of_version_1_becomes_one_of_today(name: str) -> None:
    old, plan = old_plan(name), parse_plan(old_plan(name))
    assert (plan.job_id, plan.tree, plan.config_yaml, plan.version) == (
        old["job_id"],
        old["tree"],
        old["config_yaml"],
        1,
    )
    (role,) = plan.roles
    assert to_json(role.argv) == old["argv"]
    assert (role.name, role.nproc, role.max_restarts) == (old["kind"], old["nproc"], old["policy"]["max_restarts"])
    assert role.nodes == (Devices(old["device"], tuple(old["gpus"])),)


def test_what_the_user_had_asked_for_is_read_from_a_plan_of_version_1() -> None:
    assert parse_plan(old_plan("sft")).request.command == ()
    failed = parse_plan(old_plan("failed")).request
    assert failed.command == ("python", "fails.py", "a b")
    assert "target.max_restarts=1" in failed.overrides
    assert not [text for text in failed.overrides if text.startswith("target.gpu_ranks")]
    assert 'target.gpu_ranks=["auto:1"]' in parse_plan(old_plan("gpu")).request.overrides
    ranks = parse_plan(old_plan("ranks")).request
    assert ranks.command[0].endswith(".py")
    assert "target.gpu_ranks=[0, 1]" in ranks.overrides


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torchrun": True}, r"argv has no rank\.py"),
        ({"nproc": 10**12}, "nproc is 1000000000000, more than 1024"),
    ],
)
def test_a_plan_of_version_1_that_fits_its_types_and_is_none_is_damage(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidData, match=words):
        parse_plan({**old_plan("failed"), **changes})


def test_a_policy_is_optional_in_a_plan_of_version_1() -> None:
    old = old_plan("failed")
    del old["policy"]
    assert parse_plan(old).roles[0].max_restarts == 0
    with pytest.raises(InvalidData, match="kind is 'server'"):
        parse_plan({**old, "kind": "server"})


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("ranks", {"argv": ["python", "x.py"]}, "argv has no rank.py, by which torchrun starts a program"),
        ("ranks", {"nproc": 1 << 62}, "nproc is 4611686018427387904, more than 1024"),
        ("gpu", {"gpus": ["9" * 5000]}, ""),
    ],
)
def test_a_plan_of_version_1_that_nobody_wrote_is_damage_or_read(
    name: str, changes: dict[str, Any], words: str
) -> None:
    damaged = {**old_plan(name), **changes}
    if words:
        with pytest.raises(InvalidData, match=words):
            parse_plan(damaged)
    else:  # as it stands there: the rules of the config say what is wrong, once somebody resumes it
        assert "9" * 5000 in parse_plan(damaged).request.overrides[1]
