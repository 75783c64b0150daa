"""The pass before the first step leaves a run as it was, and what fails in it leads to another way, on the CPU here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.failing import Keeper, compile_failure, fail_once
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE
from tests.support.trainings import build
from trainer.config.load import config_from_dict
from trainer.data.batches.steps import largest_batch
from trainer.dist import Dist
from trainer.kernels import support
from trainer.memory.fitting import MemoryKeeper
from trainer.schema import Config
from trainer.train import probe
from trainer.train.run import Run
from trainer.train.step import train_step


@pytest.fixture(autouse=True)
def triton_is_not_given_up_for_good():
    yield
    support._given_up.clear()


def stepped(run: Run) -> list[float]:
    """The values of two steps: sums of losses, and gradient norms."""
    return [x for step in (0, 1) for x in train_step(run, step, lr=0.01).read()[:4]]


def keeper_of(run: Run) -> MemoryKeeper:
    return MemoryKeeper(run.config, Any, run.run_dir, run.dist)  # type: ignore[arg-type]


# --- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["pytorch", "ddp", "fsdp"])
def test_pass_changes_neither_random_numbers_nor_gradients_nor_steps(backend, rows, tmp_path):
    plain = build(rows, tmp_path / "plain", backend=backend)
    expected = stepped(plain)
    run = build(rows, tmp_path / "probed", backend=backend)
    before = torch.get_rng_state()
    probe.probe_pass(run)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in run.module.parameters())
    assert stepped(run) == expected


@pytest.mark.parametrize(
    ("train", "data", "shape"),
    [
        ({"micro_batch_size": 3}, {"seq_len": 100}, (3, 100)),
        ({"micro_batch_size": 3}, {"seq_len": 100, "packing": False}, (3, 100)),
        ({"micro_batch_tokens": 350, "global_batch_size": 8}, {"seq_len": 100, "packing": False}, (3, 100)),
        ({"micro_batch_tokens": 199, "global_batch_size": 8}, {"seq_len": 100, "packing": False}, (1, 100)),
    ],
)
def test_largest_batch_has_full_rows_all_of_targets(train, data, shape):
    batch = largest_batch(config_from_dict({"train": train, "data": data}))
    assert tuple(batch.input_ids.shape) == shape
    assert int(batch.num_targets) == int(batch.num_tokens) == shape[0] * shape[1]


def test_probe_is_told_with_what_the_first_step_adds():
    gib = 2**30
    told = probe.render_probe(needs=58 * gib, room=79 * gib, later=12 * gib)
    assert told == "probe: peak 58.0 GiB of 79.0, 12.0 of them the optimizer's state, which the first step makes"


# --- what fails -------------------------------------------------------------------------------------------------------


def after_compile_failure(dist: Dist, rows: str, folder: str, backend: str, backward: bool) -> tuple[str, list, list]:
    plain = build(rows, Path(folder) / f"plain-{dist.rank}", dist, backend=backend)
    expected = stepped(plain)
    run = build(rows, Path(folder) / f"run-{dist.rank}", dist, backend=backend)
    fail_once(run, compile_failure(), backward=backward)
    failure = probe.try_pass(run)
    assert isinstance(failure, str)
    probe.run_without_compiler(run, keeper_of(run), failure)
    assert probe.try_pass(run) is None
    return failure, expected, stepped(run)


@pytest.mark.parametrize(
    ("backend", "ranks", "backward"),
    [
        ("pytorch", 1, False),
        ("fsdp", 2, True),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("pytorch", 1, True), ("fsdp", 2, False)]),
    ],
)
def test_run_whose_compiler_fails_goes_on_as_plain_torch(backend, ranks, backward, rows, tmp_path):
    results = run_ranks(after_compile_failure, ranks, rows, str(tmp_path), backend, backward)
    for failure, expected, got in results:
        assert failure.startswith("rank 0: BackendCompilerFailed: ") and failure.endswith("RuntimeError: no C compiler")
        assert got == pytest.approx(expected, rel=1e-6)


def test_failed_compiler_is_told_in_a_line_and_a_budget_becomes_selective(rows, tmp_path, capsys):
    run = build(rows, tmp_path / "run")
    memory = keeper_of(run)
    memory.given = replace(
        memory.given, parallel=replace(memory.given.parallel, compile=True, activation_checkpointing="budget")
    )
    probe.run_without_compiler(run, memory, "rank 0: NoCompiler: none found")
    told = "warning: blocks cannot be compiled and run as plain torch, which is slower: rank 0: NoCompiler: none found"
    assert told in capsys.readouterr().out
    assert (run.config.parallel.compile, run.config.parallel.activation_checkpointing) == (False, "selective")


def test_plan_that_runs_out_of_memory_gives_way_to_the_next_in_the_same_process(rows, tmp_path):
    expected = stepped(build(rows, tmp_path / "plain", backend="fsdp"))
    run = build(rows, tmp_path / "run", backend="fsdp")
    fail_once(run, torch.OutOfMemoryError("CUDA out of memory."), backward=True)
    assert isinstance(probe.try_pass(run), torch.OutOfMemoryError)
    memory = Keeper(run.run_dir, run.config)
    taken = []
    while run.config.parallel.activation_checkpointing != "selective":
        assert probe.take_next_plan(run, memory)
        plan = run.backend.plan
        taken.append((run.config.parallel.activation_checkpointing, plan.strategy, plan.reduces_every))
    assert taken == [
        ("none", "SHARD_GRAD_OP", True),
        ("none", "FULL_SHARD", False),
        ("none", "FULL_SHARD", True),
        ("selective", "FULL_SHARD", False),
    ]
    assert "activation checkpointing selective" in run.backend.describe()
    assert stepped(run) == pytest.approx(expected, rel=1e-6)


def test_error_of_the_model_itself_is_raised(rows, tmp_path):
    run = build(rows, tmp_path / "run")
    fail_once(run, ValueError("no"), backward=False)
    with pytest.raises(ValueError, match="no"):
        probe.try_pass(run)


def test_nothing_is_tried_on_the_cpu(rows, tmp_path):
    run = build(rows, tmp_path / "run")
    fail_once(run, ValueError("no"), backward=False)
    probe.probe(run, MemoryKeeper(Config(), Any, tmp_path, ALONE))  # type: ignore[arg-type]
