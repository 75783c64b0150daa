"""Which plan for memory is taken, and what happens when it was not enough: pure functions and a run folder."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deployer.agent.supervisor.restarts import Past, why_no_restart
from tests.support.failing import CONFIG, SMALL, Keeper
from tests.support.tiny import ALONE, tiny_shape
from trainer.config.load import config_from_dict
from trainer.memory.estimate import estimate_memory, savings
from trainer.memory.fitting import Fit, MemoryKeeper, fit_into, fit_memory, read_failed
from trainer.memory.plans import MemoryPlan, choose_plan, possible_plans, render_table, usable
from trainer.models.families.decoder_shape import DecoderShape
from trainer.schema import MEMORY_PLAN_FILE, Config, ParallelConfig
from trainer.words import GIB, MIB

KEPT = "none, reshard_after_forward=false"
FAST = MemoryPlan("none", None, False, False)
WIDE = DecoderShape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, tie_embeddings=False)


def names(options: dict[str, Any], *, backend: str = "fsdp", compiled: bool = True, accumulates: bool = False) -> str:
    plans = possible_plans(ParallelConfig(**options), backend=backend, compiled=compiled, accumulates=accumulates)
    return "; ".join(plan.render().removeprefix("activation_checkpointing=") for plan in plans)


# --- which plans there are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "where", "plans"),
    [
        ({}, {}, f"{KEPT}; none; budget (0.7); budget (0.5); budget (0.3); budget (0); budget (0), cpu_offload"),
        ({}, {"compiled": False}, f"{KEPT}; none; selective; full; full, cpu_offload"),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"compiled": False}, "none; selective; full; full, cpu_offload"),
        ({"reshard_after_forward": True}, {"compiled": False}, "none; selective; full; full, cpu_offload"),
        ({}, {"backend": "pytorch"}, "none; budget (0.7); budget (0.5); budget (0.3); budget (0)"),
        ({"cpu_offload": False}, {"compiled": False}, f"{KEPT}; none; selective; full"),
        (
            {"cpu_offload": True},
            {"compiled": False},
            f"{KEPT}, cpu_offload; none, cpu_offload; selective, cpu_offload; full, cpu_offload",
        ),
        ({"activation_checkpointing": "selective"}, {"backend": "ddp"}, "selective"),
        ({"activation_checkpointing": "budget", "cpu_offload": False}, {}, "budget (0.5)"),
        (
            {"activation_checkpointing": "none"},
            {"accumulates": True},
            f"{KEPT}; {KEPT}, reduce_every_micro_batch; none; none, reduce_every_micro_batch;"
            " none, reduce_every_micro_batch, cpu_offload",
        ),
        (
            {"activation_checkpointing": "none", "reduce_every_micro_batch": False, "cpu_offload": False},
            {"accumulates": True},
            f"{KEPT}; none",
        ),
    ],
)
def test_plans_go_from_fast_to_small_and_leave_what_is_set(options, where, plans):
    assert names(options, **where) == plans


def test_plan_in_force_changes_nothing_but_memory():
    before = ParallelConfig(reduce_dtype="bf16", checkpoint_every=2)
    after = MemoryPlan("budget", 0.3, True, False).applied(before)
    assert (after.activation_checkpointing, after.activation_budget, after.reduce_every_micro_batch) == (
        "budget",
        0.3,
        True,
    )
    assert replace(after, activation_checkpointing=None, activation_budget=0.5, reduce_every_micro_batch=None) == (
        replace(before, cpu_offload=False)
    )


# --- which one is taken -----------------------------------------------------------------------------------------------

PLANS = [FAST, replace(FAST, activation_checkpointing="selective"), replace(FAST, activation_checkpointing="full")]
NEEDS = {"none": 80, "selective": 60, "full": 40}


def chosen(free: float, *, failed: tuple[str, ...] = ()) -> str:
    choice = choose_plan(
        PLANS, lambda plan: NEEDS[plan.activation_checkpointing] * GIB, free=int(free * GIB), failed=failed
    )
    return choice.chosen.plan.activation_checkpointing + ("" if choice.fits else "!")


@pytest.mark.parametrize(
    ("free", "plan"), [(100, "none"), (87, "none"), (86, "selective"), (65, "full"), (43, "full!"), (1, "full!")]
)
def test_first_plan_that_leaves_a_margin_is_taken_and_the_smallest_where_none_does(free, plan):
    assert chosen(free) == plan


@pytest.mark.parametrize(("failed", "plan"), [("none", "selective"), ("selective", "full"), ("full", "full")])
def test_plans_up_to_one_that_has_failed_are_not_taken_again(failed, plan):
    assert chosen(100, failed=(f"activation_checkpointing={failed}",)) == plan


def test_choice_is_told_with_what_it_needs_and_what_more_would():
    choice = choose_plan(PLANS, lambda plan: NEEDS[plan.activation_checkpointing] * GIB, free=int(79.1 * GIB))
    assert choice.render() == (
        "memory: activation_checkpointing=selective: about 60.0 GiB of 79.1 free; "
        "activation_checkpointing=none would need 80.0"
    )
    table = render_table(choice)
    assert [line[2] for line in table[:3]] == [" ", "*", " "]
    assert table[0].endswith("    80.00 GiB  does not fit")


def test_table_of_a_small_model_is_in_mib():
    choice = choose_plan(PLANS, lambda plan: NEEDS[plan.activation_checkpointing] * MIB, free=int(79.1 * GIB))
    assert [line.split()[-2:] for line in render_table(choice)[:3]] == [
        ["80.00", "MiB"],
        ["60.00", "MiB"],
        ["40.00", "MiB"],
    ]


def fit(shape: DecoderShape, gib: float, *, ranks: int = 1, failed: tuple[str, ...] = (), **sections: Any) -> Fit:
    values = {
        "target": {"gpu_ranks": list(range(ranks))},
        "data": {"seq_len": 4096, "packing": False},
        **sections,
        "train": {"micro_batch_size": 4, "precision": "bf16", **sections.get("train", {})},
    }
    return fit_into(config_from_dict(values), shape, free=int(gib * GIB), world_size=ranks, failed=failed)


def test_large_model_on_four_gpus_gets_the_least_recomputation_that_fits_and_the_estimate_is_of_that():
    taken = fit(WIDE, 79.1, ranks=4)
    options = taken.config.parallel
    assert (options.activation_checkpointing, options.activation_budget) == ("budget", 0.5)
    needs = estimate_memory(WIDE, taken.config, world_size=4).total
    assert taken.choice is not None
    assert taken.choice.chosen.needs == needs <= usable(taken.choice.free)


def test_small_model_is_not_recomputed():
    assert fit(SMALL, 79.1, train={"micro_batch_size": 2}).config.parallel.activation_checkpointing == "none"


def test_run_that_fits_in_no_way_is_warned_of_with_what_lowers_it():
    taken = fit(WIDE, 20)
    assert taken.lines[1] == "warning: that is more than there is room for; what lowers it:"
    assert any("target.train_backend=fsdp saves" in line for line in taken.lines[2:])


def test_gradients_are_reduced_every_micro_batch_where_waiting_ones_do_not_fit():
    train = {"micro_batch_size": 1, "grad_accum_steps": 4}
    tight, roomy = (fit(WIDE, gib, ranks=4, train=train).config.parallel for gib in (62, 100))
    assert (tight.activation_checkpointing, tight.reduce_every_micro_batch) == ("none", True)
    assert (roomy.activation_checkpointing, roomy.reduce_every_micro_batch) == ("none", False)


def test_parameters_stay_gathered_where_nothing_is_recomputed_and_they_fit():
    roomy, tight, set_by_hand = (
        fit(WIDE, gib, ranks=4, train={"micro_batch_size": 1}, **sections)
        for gib, sections in ((79.1, {}), (60, {}), (79.1, {"parallel": {"reshard_after_forward": True}}))
    )
    assert roomy.config.parallel.reshard_after_forward is False
    assert (tight.config.parallel.activation_checkpointing, tight.config.parallel.reshard_after_forward) == (
        "none",
        None,
    )
    assert set_by_hand.config.parallel.reshard_after_forward is True
    needs = [taken.choice.priced[0].needs for taken in (roomy, set_by_hand) if taken.choice]
    blocks = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)  # parameters without norms and biases
    assert needs[0] - needs[1] == pytest.approx(2 * blocks * 27 / 28, rel=0.01)  # one is there in any case


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"reshard_after_forward": False}, "parallel.reshard_after_forward=true"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "parallel.sharding_strategy=FULL_SHARD"),
    ],
)
def test_freeing_gathered_copies_is_named_among_what_saves_memory(options, change):
    config = config_from_dict({"target": {"gpu_ranks": [0, 1]}, "train": {"precision": "bf16"}, "parallel": options})
    named = [saving for saving in savings(SMALL, config, world_size=2) if saving.change == change]
    assert len(named) == 1 and named[0].size > 100 << 20


def test_nothing_is_chosen_on_the_cpu(tmp_path):
    config = Config()
    assert fit_memory(config, tiny_shape(), tmp_path, ALONE) == Fit(config)
    assert list(tmp_path.iterdir()) == []


# --- after a failure --------------------------------------------------------------------------------------------------


def test_start_after_running_out_of_memory_takes_the_next_plan_and_says_so(tmp_path):
    told = Keeper(tmp_path).record_failure()
    assert told is not None
    assert told.startswith("the next start in this run folder takes the next plan, activation_checkpointing=selective")
    second = Keeper(tmp_path)
    assert second.mode == "selective"
    assert second.fit.lines[0].endswith("; activation_checkpointing=none ran out of memory before")


def test_host_starts_a_run_again_that_has_a_plan_left_and_no_other(tmp_path):
    def end() -> Past:
        return Past("failed", 1, True, f"out of memory\nnote: {Keeper(tmp_path).record_failure()}", 3)

    ends = [end() for _ in ("none", "selective", "full", "full")]
    reasons = [why_no_restart(ends[:n], restarts=n - 1, max_restarts=5, is_trainer=True) for n in (1, 2, 3, 4)]
    assert reasons == [None, None, None, "the same error a second time, at step 3"]


def test_last_plan_has_none_after_it(tmp_path):
    full = replace(CONFIG, parallel=ParallelConfig(activation_checkpointing="full"))
    told = Keeper(tmp_path, full).record_failure()
    assert told == "activation_checkpointing=full is the last plan of parallel.memory=auto: none takes less"
    assert Keeper(tmp_path, full).mode == "full"


def test_plan_that_fails_before_the_first_step_gives_way_within_the_process_and_for_the_next_start(tmp_path):
    keeper = Keeper(tmp_path)
    taken = keeper.take_next()
    assert taken is not None
    assert (taken.parallel.activation_checkpointing, keeper.mode, Keeper(tmp_path).mode) == ("selective",) * 3
    assert keeper.take_next() is not None
    assert keeper.take_next() is None


def test_failure_of_another_batch_is_not_held_against_a_run(tmp_path):
    Keeper(tmp_path).record_failure()
    smaller = replace(CONFIG, train=replace(CONFIG.train, micro_batch_size=1))
    assert read_failed(tmp_path, CONFIG, 1) == ["activation_checkpointing=none"]
    assert read_failed(tmp_path, smaller, 1) == []


def test_failure_that_a_version_with_more_keys_noted_still_counts(tmp_path):
    Keeper(tmp_path).record_failure()
    file = tmp_path / MEMORY_PLAN_FILE
    noted = json.loads(file.read_text())
    noted["setting"]["parallel"] |= {"use_orig_params": None, "state_dict_type": "SHARDED_STATE_DICT"}
    file.write_text(json.dumps(noted))
    assert read_failed(tmp_path, CONFIG, 1) == ["activation_checkpointing=none"]


@pytest.mark.parametrize("text", ["", "[]", '{"failed": 3}', '{"failed": [], "setting": 3}', "no json"])
def test_plan_file_that_is_damaged_is_no_obstacle(tmp_path, text):
    (tmp_path / MEMORY_PLAN_FILE).write_text(text)
    assert Keeper(tmp_path).mode == "none"


def test_plan_file_names_the_plan_in_force(tmp_path):
    Keeper(tmp_path)
    noted = json.loads((tmp_path / MEMORY_PLAN_FILE).read_text())
    assert (noted["plan"], noted["failed"]) == ("activation_checkpointing=none", [])


def test_plan_that_cannot_be_noted_is_said(tmp_path):
    keeper = Keeper(tmp_path / "gone")
    assert "cannot be written (No such file or directory)" in str(keeper.record_failure())


def test_nothing_is_said_after_a_failure_where_nothing_was_chosen(tmp_path):
    keeper = MemoryKeeper(CONFIG, SMALL, tmp_path, ALONE)
    assert (keeper.record_failure(), keeper.take_next(), list(tmp_path.iterdir())) == (None, None, [])
