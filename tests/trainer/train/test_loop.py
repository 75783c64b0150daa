"""The step: one normaliser for any split, exact resume, skipped non-finite steps, orderly stops."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, packed_batch, tiny_shape
from tests.support.trainings import STEPS, build, losses, poison, train, train_rank, training_on
from trainer.batch import Batch, LossSum
from trainer.data.loader import build_data
from trainer.data.tokenize.tokenizer import load_tokenizer
from trainer.dist import Dist
from trainer.errors import ConfigError, ModelError
from trainer.export.finish import rows_to_compare
from trainer.export.model import random_rows, rows_of
from trainer.models.build import check_length
from trainer.models.families.decoder_shape import shape_from_config
from trainer.recipes import sft
from trainer.train import loop
from trainer.train.loop import stop_requests
from trainer.train.step import train_step
from trainer.train.values import NonFiniteError


def eval_losses(records: list[dict]) -> list[float]:
    return [record["eval_loss"] for record in records if "eval_loss" in record]


@pytest.fixture(scope="module")
def alone(rows, tmp_path_factory) -> list[dict]:
    """The records of one process that takes the whole batch at once."""
    return train(1, rows, tmp_path_factory.mktemp("alone") / "run", micro_batch_size=6)


# --- the normaliser ---------------------------------------------------------------------------------------------------


def test_rows_longer_than_a_named_models_positions_are_refused():
    config = training_on("rows.jsonl")
    with pytest.raises(ConfigError, match="seq_len is 96, more than max_position_embeddings of None, 64"):
        check_length(config, tiny_shape(max_position_embeddings=64))


@pytest.mark.parametrize("max_grad_norm", [0.01, 0.0])
def test_step_is_as_long_as_the_clipped_gradient(rows, tmp_path, max_grad_norm):
    run = build(rows, tmp_path)
    run.config = replace(run.config, optim=replace(run.config.optim, max_grad_norm=max_grad_norm))
    run.optimizer = torch.optim.SGD(run.module.parameters(), fused=True)
    before = torch.nn.utils.parameters_to_vector(run.module.parameters()).clone()
    norm = train_step(run, 0, lr=1.0).read()[3]
    moved = (torch.nn.utils.parameters_to_vector(run.module.parameters()) - before).norm().item()
    assert moved == pytest.approx(max_grad_norm or norm, rel=1e-3)
    assert norm > 0.1


class NoTargets:
    """In the place of a TrainLoader: a step whose rows have no target on any rank."""

    def step_batches(self, step: int) -> list[Batch]:
        batch = packed_batch([[4, 4]], length=8)
        return [replace(batch, labels=torch.full_like(batch.labels, -100))] * 2


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_step_without_any_target_has_a_loss_of_zero_and_finite_weights(rows, tmp_path, max_grad_norm):
    run = build(rows, tmp_path)
    run.config = replace(run.config, optim=replace(run.config.optim, max_grad_norm=max_grad_norm))
    run.data = replace(run.data, train=NoTargets())
    assert train_step(run, 0, lr=1e-2).read()[:5] == [0.0, 0.0, 16.0, 0.0, 1.0]
    assert all(parameter.isfinite().all() for parameter in run.module.parameters())


def test_products_in_bf16_leave_weights_and_optimizer_state_in_fp32_where_small_steps_count(rows, tmp_path):
    run = build(rows, tmp_path, precision="bf16")
    for step in range(50):
        train_step(run, step, lr=1e-4)
    state = [value for entry in run.optimizer.state.values() for value in entry.values()]
    assert {tensor.dtype for tensor in [*run.module.parameters(), *state]} == {torch.float32}
    norm = run.module.model.norm.weight  # 1.0 at first, where bf16 has no number nearer than 0.4 %
    assert 5e-4 < (norm - 1.0).abs().max() < 6e-3


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_accumulation_does_not_change_the_losses(alone, rows, tmp_path, micro_batch_size):
    records = train(1, rows, tmp_path / "run", micro_batch_size=micro_batch_size)
    assert losses(records) == pytest.approx(losses(alone), abs=1e-5)
    assert eval_losses(records) == pytest.approx(eval_losses(alone), abs=1e-5)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "fsdp"), (2, "ddp"), (4, "fsdp")])
def test_ranks_reproduce_the_losses_and_norms_of_one_process(alone, rows, tmp_path, ranks, backend):
    records = train(ranks, rows, tmp_path / "run", backend=backend)
    assert losses(records) == pytest.approx(losses(alone), abs=1e-5)
    assert eval_losses(records) == pytest.approx(eval_losses(alone), abs=1e-5)
    norms = [[r["grad_norm"] for r in some if "loss" in r] for some in (records, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_records_have_the_documented_keys(alone):
    keys = {
        "step",
        "steps",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s_per_gpu",
        "mfu",
        "step_s",
        "data_wait_s",
    }
    assert set(alone[1]) == keys | {"mem_gib", "epoch"}
    assert [record["step"] for record in alone if "loss" in record] == list(range(1, STEPS + 1))
    assert [record["step"] for record in alone if "eval_loss" in record] == [0, 4, 8]
    assert (alone[1]["mfu"], alone[1]["steps"]) == (None, STEPS)


def test_log_every_averages_over_the_window(alone, rows, tmp_path):
    run = build(rows, tmp_path / "counted", micro_batch_size=6)
    targets = [sum(int(b.num_targets) for b in run.data.train.step_batches(s)) for s in range(4)]
    weighted = sum(loss * count for loss, count in zip(losses(alone), targets, strict=False)) / sum(targets)
    records = train(1, rows, tmp_path / "run", micro_batch_size=6, log_every=4)
    assert [record["step"] for record in records if "loss" in record] == [4, 8]
    assert losses(records)[0] == pytest.approx(weighted, abs=1e-5)


# --- resume -----------------------------------------------------------------------------------------------------------


def test_last_steps_are_recorded_also_where_log_every_ends_in_between(rows, tmp_path):
    records = train(1, rows, tmp_path, log_every=3, micro_batch_size=6, stop_after_steps=5)
    assert [record["step"] for record in records if "loss" in record] == [3, 5]


def test_resume_takes_the_newest_complete_and_drops_later_records(alone, rows, tmp_path):
    run = tmp_path / "run"
    train(1, rows, run, micro_batch_size=6, save_every=2, stop_after_steps=5, keep_last=0)
    (run / "checkpoints" / "step_000005" / "COMPLETE").unlink()
    records = train(1, rows, run, micro_batch_size=6, keep_last=0)
    assert [record["step"] for record in records if "loss" in record] == list(range(1, STEPS + 1))
    assert losses(records) == losses(alone)


def test_resume_never_starts_over(alone, rows, tmp_path):
    train(1, rows, tmp_path / "run", micro_batch_size=6, stop_after_steps=3)
    records = train(1, rows, tmp_path / "run", micro_batch_size=6, resume="never")
    assert (losses(records), eval_losses(records)) == (losses(alone), eval_losses(alone))


def test_run_that_starts_over_is_resumed_and_not_the_one_before(rows, tmp_path):
    train(1, rows, tmp_path / "run", save_every=2)
    train(1, rows, tmp_path / "run", resume="never", stop_after_steps=3)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_000003"]
    records = train(1, rows, tmp_path / "run", stop_after_steps=1)
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]


def test_resume_goes_on_exactly_where_a_part_of_an_epoch_ended(rows, tmp_path):
    short = train(1, rows, tmp_path / "run", steps=None, epochs=0.5)
    assert short[-2]["epoch"] == pytest.approx(0.5, abs=0.02)
    longer = train(1, rows, tmp_path / "run", steps=None, epochs=1)
    assert longer[-2]["epoch"] == 1.0
    everything = build(rows, tmp_path / "other").data.report.train.tokens
    assert sum(record.get("tokens", 0) for record in longer) == everything


@pytest.mark.parametrize(
    ("model", "named"),
    [({"num_layers": 1}, "num_layers 2 -> 1"), ({"rope_theta": 5e3}, "rope_theta 10000.0 -> 5000.0")],
)
def test_resume_with_another_model_is_refused_by_field(rows, tmp_path, model, named):
    train(1, rows, tmp_path / "run", stop_after_steps=1)
    config = training_on(rows)
    config = replace(config, model=replace(config.model, **model))
    with pytest.raises(ModelError, match=re.escape(named)):
        sft.run(config, tmp_path / "run", ALONE)


def test_resume_names_what_changed_and_refuses_a_run_that_is_over(rows, tmp_path, capsys):
    train(1, rows, tmp_path / "run", stop_after_steps=3)
    train(1, rows, tmp_path / "run", steps=4)
    assert "changed since the checkpoint, in force from here on: train.steps 8 -> 4\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is after step 4, and the run has 2 steps"):
        train(1, rows, tmp_path / "run", steps=2)


def test_resume_from_a_path_that_is_no_checkpoint_names_the_right_one(rows, tmp_path):
    train(1, rows, tmp_path / "run", stop_after_steps=1)
    with pytest.raises(ConfigError, match="no complete checkpoint") as caught:
        train(1, rows, tmp_path / "other", resume=str(tmp_path / "run"))
    assert caught.value.hint == f"did you mean {tmp_path}/run/checkpoints/step_000001?"


def test_retention_keeps_the_last_checkpoints(rows, tmp_path):
    train(1, rows, tmp_path / "run", save_every=2, keep_last=2)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_000006", "step_000008"]


def test_full_collections_leave_out_what_lives_for_the_whole_run(rows, tmp_path):
    run = build(rows, tmp_path / "run", steps=3, micro_batch_size=6)
    loss_fn, seen = run.loss_fn, []

    def counted(module, batch) -> LossSum:
        if module.training:
            seen.append(len(gc.get_objects()))
        return loss_fn(module, batch)

    run.loss_fn = counted
    loop.train(run)
    first, *later = seen
    assert len(later) == 2 and max(later) < first / 20
    assert len(gc.get_objects()) > first / 2


# --- non-finite steps -------------------------------------------------------------------------------------------------


def test_nonfinite_step_changes_nothing_and_is_counted(rows, tmp_path):
    run = build(rows, tmp_path / "run", micro_batch_size=6)
    poison(run, steps={3})
    train_step(run, 0, lr=1e-2)
    train_step(run, 1, lr=1e-2)
    before = [parameter.clone() for parameter in run.module.parameters()]
    values = train_step(run, 2, lr=1e-2)
    assert values.read()[4] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, run.module.parameters(), strict=True))
    assert train_step(run, 3, lr=1e-2).read()[4] == 1.0


def train_poisoned(dist: Dist, rows: str, run_dir: str, steps: list[int]) -> str:
    run = build(rows, Path(run_dir), dist, backend="fsdp", micro_batch_size=3, max_nonfinite_steps=2)
    poison(run, steps=set(steps), rank=1)
    try:
        loop.train(run)
    except NonFiniteError as error:
        return str(error)
    return "trained"


def test_nonfinite_loss_on_one_rank_is_skipped_on_all(rows, tmp_path):
    assert run_ranks(train_poisoned, 2, rows, str(tmp_path), [3, 5]) == ["trained", "trained"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r.get("skipped")] == [3, 5]
    assert [r["loss"] is None for r in records if "loss" in r] == [False, False, True, False, True, False, False, False]


def test_nonfinite_steps_in_a_row_end_the_run_on_every_rank(rows, tmp_path):
    first, second = run_ranks(train_poisoned, 2, rows, str(tmp_path), [3, 4])
    assert first == second
    assert first.startswith("steps 3 to 4 were skipped: loss sum nan")
    assert not (tmp_path / "checkpoints").exists()


def test_run_shorter_than_the_limit_fails_when_every_step_was_skipped(rows, tmp_path):
    run = build(rows, tmp_path, micro_batch_size=6, steps=3)
    poison(run, steps={1, 2, 3})
    with pytest.raises(NonFiniteError, match="steps 1 to 3 were skipped"):
        loop.train(run)
    assert not (tmp_path / "checkpoints").exists()


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_stop_file_saves_a_checkpoint_and_ends_early(rows, tmp_path):
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "stop.json").write_text("{}")
    outcomes = run_ranks(train_rank, 2, rows, str(tmp_path), {})
    step = outcomes[0]["steps"]
    assert outcomes[0]["state"] == "stopped"
    assert 1 <= step <= 2
    assert (tmp_path / "checkpoints" / f"step_{step:06d}" / "COMPLETE").exists()


def train_with_signal_on_rank_1(dist: Dist, rows: str, run_dir: str) -> tuple[int, bool]:
    run = build(rows, Path(run_dir), dist, backend="fsdp", micro_batch_size=3)
    loss_fn = run.loss_fn

    def signalled(module, batch) -> LossSum:
        if dist.rank == 1 and module.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss_fn(module, batch)

    run.loss_fn = signalled
    result = loop.train(run)
    return result.step, result.stopped


def test_sigterm_on_one_rank_stops_all_at_the_same_step(rows, tmp_path):
    first, second = run_ranks(train_with_signal_on_rank_1, 2, rows, str(tmp_path))
    assert first == second == (2, True)
    assert (tmp_path / "checkpoints" / "step_000002" / "COMPLETE").exists()


def test_second_interrupt_ends_a_single_process_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with stop_requests(tmp_path) as is_stop_requested, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert is_stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        is_stop_requested()


# --- the rows that an export is compared by ---------------------------------------------------------------------------


def test_rows_to_compare_are_held_out_ones_and_without_any_those_of_the_last_step(rows, tmp_path):
    run = build(rows, tmp_path, steps=2)
    shape = shape_from_config(run.config.model, 320)
    assert rows_to_compare(run, 2, shape) == rows_of(run.data.eval.batches())
    config = replace(run.config, data=replace(run.config.data, eval_fraction=0.0))
    run.data = build_data(config, ALONE, load_tokenizer(config))
    assert rows_to_compare(run, 2, shape) == rows_of(run.data.train.step_batches(1))
    assert rows_to_compare(run, 1, shape) != rows_to_compare(run, 2, shape)
    assert rows_to_compare(run, run.start_step, shape) == random_rows(320)
