"""What a run tells while it trains: parameters, skipped steps, stragglers, traces, trackers; and its early end."""

from __future__ import annotations

import gzip
import io
import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.support.ranks import FORKED, run_ranks
from tests.support.tiny import ALONE
from tests.support.trainings import build, poison, train, training_on
from trainer.batch import LossSum
from trainer.checkpoint.folders import STATE_FILE, Saved
from trainer.config.load import config_from_dict, config_to_dict
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.export.finish import finish
from trainer.metrics.log import MetricsLog, render_train
from trainer.metrics.trackers import check_trackers, numbers_of, open_trackers
from trainer.profile.trace import step_watchers
from trainer.recipes import sft
from trainer.schema import Config
from trainer.train import loop
from trainer.train.evaluate import Evaluator
from trainer.train.plan_log import summarize
from trainer.train.run import Run
from trainer.train.saves import Saver
from trainer.train.step import train_step
from trainer.train.values import NonFiniteError, PeakMemory, Reader, Window


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    pairs = [{"id": f"row{n}", "question": f"what is {n}?", "answer": "na " * (1 + n % 5) + str(n)} for n in range(40)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def with_keys(config: Config, **sections: dict) -> Config:
    tree = config_to_dict(config)
    for section, fields in sections.items():
        tree[section] |= fields
    return config_from_dict(tree)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_summary_counts_trained_and_frozen_parameters():
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 2, bias=False))
    module[0].weight.requires_grad_(False)
    assert summarize(module).render() == ["parameters: 120 in all, 20 trained, 100 frozen (83.3%); float32"]


def test_summary_names_mixed_dtypes_with_an_example():
    module = nn.Sequential(nn.Linear(10, 10, bias=False).to(torch.bfloat16), nn.Linear(10, 2, bias=False))
    assert summarize(module).render() == [
        "parameters: 120 in all, 120 trained",
        "mixed dtypes: 100 bfloat16 (e.g. 0.weight), 20 float32 (e.g. 1.weight)",
    ]


def test_summary_counts_a_tied_parameter_once():
    module = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    module[1].weight = module[0].weight
    assert summarize(module).total == 21


# --- non-finite steps -------------------------------------------------------------------------------------------------


def train_with_nan(dist: Dist, rows: str, run_dir: str) -> tuple[list[list[float]], list[str], str]:
    """Rank 1's loss of step 3 is NaN. The weights before each step, the ids of that rank's rows, the console."""
    sys.stdout = io.StringIO()
    run = build(rows, Path(run_dir), dist, backend="ddp", micro_batch_size=3, steps=4)
    poison(run, steps={3}, rank=1)
    kept: list[list[float]] = []
    loss_fn = run.loss_fn

    def watch(module: nn.Module, batch) -> LossSum:
        if module.training:
            kept.append(torch.nn.utils.parameters_to_vector(module.parameters()).tolist())
        return loss_fn(module, batch)

    run.loss_fn = watch
    loop.train(run)
    return kept, run.data.train.rank_documents(2, 1), sys.stdout.getvalue()


def test_nan_of_one_rank_is_skipped_on_all_and_told_with_rank_and_rows(rows, tmp_path):
    (first, ids, told), (second, *_) = run_ranks(train_with_nan, 2, rows, str(tmp_path))
    assert first == second
    assert first[2] == first[3] != first[1]  # the weights before step 4 are those before step 3, bit for bit
    assert "warning: step 3 skipped, the weights are as before it: the loss of rank 1 was not finite" in told
    assert f"rows of rank 1: {', '.join(ids[:8])}" in told


def test_limit_of_one_nonfinite_step_ends_the_run_at_the_first(rows, tmp_path):
    run = build(rows, tmp_path, micro_batch_size=6, max_nonfinite_steps=1)
    poison(run, steps={2})
    with pytest.raises(NonFiniteError, match=r"^step 2 was skipped: loss sum nan"):
        loop.train(run)


class OnTheDevice:
    """The event of a step whose values are still on their way when the step has been launched."""

    def synchronize(self) -> None:
        pass


def cross_after_a_nan(rows: str, run_dir: Path, limit: int) -> None:
    """The border behind step 2, whose loss is NaN and not yet read, with a save due beside the training."""
    run = build(rows, run_dir, micro_batch_size=6, save_every=2, eval_every=0, max_nonfinite_steps=limit)
    poison(run, steps={2})
    steps, saver = Reader(run, PeakMemory(torch.device("cpu"))), Saver(run, beside=FORKED)
    for step in (0, 1):
        steps.push(replace(train_step(run, step, lr=1e-3), ready=OnTheDevice()))
    try:
        loop.Border(run, steps, Evaluator(run), saver, lambda: False).cross(2)
    finally:
        saver.finish()


def test_step_is_judged_before_its_save_where_one_nonfinite_step_ends_the_run(rows, tmp_path):
    with pytest.raises(NonFiniteError, match=r"^step 2 was skipped"):
        cross_after_a_nan(rows, tmp_path / "one", limit=1)
    assert not (tmp_path / "one" / "checkpoints").exists()
    cross_after_a_nan(rows, tmp_path / "two", limit=2)
    assert [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()] == ["step_000002"]


# --- ranks and their speed --------------------------------------------------------------------------------------------


def test_straggler_is_the_slowest_ranks_time_over_the_median():
    window = Window()
    window.add_busy([1.0, 1.0, 4.0])
    window.add_busy([1.0, 1.0, 2.0])
    assert window.straggler() == {"straggler": 3.0, "slowest_rank": 2}


def test_memory_that_a_save_takes_for_its_copy_is_not_told_as_the_training_s(monkeypatch):
    peak = {"gib": 30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["gib"] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(gib=20))
    memory = PeakMemory(torch.device("cuda"))
    with memory.left_out():
        peak["gib"] = 75
    assert memory.gib() == 30.0
    peak["gib"] = 31
    assert memory.gib() == 31.0
    assert PeakMemory(torch.device("cpu")).gib() is None


@pytest.mark.parametrize(("mem_gib", "words"), [(None, "rank 1 slow x2.0"), (1.0, "rank 1 slow x2.0 on the host")])
def test_slow_rank_on_a_gpu_is_said_to_be_slow_on_the_host(mem_gib, words):
    record = {"step": 1, "loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s_per_gpu": 5.0, "mem_gib": mem_gib}
    assert render_train({**record, "straggler": 2.0, "slowest_rank": 1}, 9, None).split("  ")[-1] == words


def test_straggler_of_two_ranks_is_told_in_the_records(rows, tmp_path):
    records = train(2, rows, tmp_path, steps=2, backend="ddp")
    assert all(r["straggler"] >= 1.0 and r["slowest_rank"] in (0, 1) for r in records if "loss" in r)
    alone = train(1, rows, tmp_path / "alone", steps=2)
    assert all("straggler" not in record for record in alone)


# --- early stop -------------------------------------------------------------------------------------------------------


def scripted_eval(run: Run, losses: list[float]) -> None:
    """Make the held-out losses these, one an evaluation; the training itself is as ever."""
    loss_fn, pending = run.loss_fn, list(losses)

    def scripted(module: nn.Module, batch) -> LossSum:
        loss = loss_fn(module, batch)
        return loss if module.training else LossSum(loss.count * torch.tensor(pending[0]), loss.count)

    def next_loss(step: int, numbers) -> None:
        if "eval/loss" in numbers:
            pending.pop(0)

    run.loss_fn = scripted
    run.log.trackers.append(Recorder(next_loss))


class Recorder:
    def __init__(self, log) -> None:
        self.log = log

    def close(self) -> None:
        pass


def test_early_stop_saves_exports_and_succeeds_with_a_reason(rows, tmp_path):
    run = build(rows, tmp_path, eval_every=1, early_stop_patience=2, steps=8)
    scripted_eval(run, [5.0, 4.0, 4.5, 4.25, 1.0])
    result = loop.train(run)
    assert (result.step, result.stopped, result.eval_loss_best) == (3, False, 4.0)
    assert (tmp_path / "checkpoints" / "step_000003" / "COMPLETE").exists()
    shape, tokenizer = run.extra["shape"], None
    assert finish(run, result, shape=shape, tokenizer=tokenizer) == 0
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["state"], outcome["eval_loss_best"]) == ("succeeded", 4.0)
    assert outcome["reason"] == "no held-out loss improved the best one, 4.0000, in 2 evaluations"
    state = json.loads((tmp_path / "checkpoints" / "step_000003" / STATE_FILE).read_text())
    assert state.keys() <= Saved.__dataclass_fields__.keys()  # what a resume reads has a type


def test_early_stop_counts_gains_below_min_delta_as_none(rows, tmp_path):
    run = build(rows, tmp_path, eval_every=1, early_stop_patience=2, early_stop_min_delta=0.5)
    scripted_eval(run, [5.0, 4.75, 4.5, 1.0])
    assert loop.train(run).step == 2


def test_early_stop_goes_on_counting_after_a_resume(rows, tmp_path):
    run = build(rows, tmp_path, eval_every=1, early_stop_patience=2, stop_after_steps=1)
    scripted_eval(run, [5.0, 5.5])
    assert loop.train(run).stopped
    assert run.extra["evals_without_gain"] == 0  # a start that is asked to stop looks at nothing more
    run = build(rows, tmp_path, eval_every=1, early_stop_patience=2)
    scripted_eval(run, [5.5, 5.5, 1.0])
    assert run.start_step == 1
    assert loop.train(run).step == 3
    again = build(rows, tmp_path, eval_every=1, early_stop_patience=2)
    assert loop.train(again).step == 3


def test_evaluation_that_is_never_finite_stops_early_too(rows, tmp_path):
    run = build(rows, tmp_path, eval_every=1, early_stop_patience=2)
    scripted_eval(run, [float("nan")] * 4)
    result = loop.train(run)
    assert (result.step, result.reason) == (1, "no finite loss in 2 evaluations")


def eval_uneven(dist: Dist, rows: str, run_dir: str) -> float | None:
    run = build(rows, Path(run_dir), dist, backend="fsdp", micro_batch_size=1, steps=2)
    return loop.train(run).eval_loss_first


def test_evaluation_of_rows_that_no_rank_count_divides_is_token_exact(rows, tmp_path):
    alone = eval_uneven(ALONE, rows, str(tmp_path / "alone"))
    for world in (2, 3):
        losses = run_ranks(eval_uneven, world, rows, str(tmp_path / f"{world}"))
        assert losses == pytest.approx([alone] * world, abs=1e-5)


# --- traces -----------------------------------------------------------------------------------------------------------


def trace(dist: Dist, rows: str, run_dir: str) -> None:
    loop.train(build(rows, Path(run_dir), dist, backend="ddp", steps=4, profile_steps=[2, 4]), watchers=step_watchers)


def test_named_steps_are_traced_by_every_rank_for_chrome(rows, tmp_path):
    run_ranks(trace, 2, rows, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    of_each = [f"step_{step:06d}_rank_{rank}" for step in (2, 4) for rank in (0, 1)]
    assert names == [f"{name}.{suffix}" for name in of_each for suffix in ("json", "json.gz", "txt")]
    events = json.loads(gzip.decompress((tmp_path / "profile" / names[1]).read_bytes()))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert products
    assert products[0]["args"]["Input Dims"]


def test_trace_that_the_disk_does_not_take_is_one_warning(rows, tmp_path, capsys):
    (tmp_path / "profile").write_text("a file where the folder should be")
    run = build(rows, tmp_path, steps=2, profile_steps=[1])
    assert loop.train(run, watchers=step_watchers).step == 2
    assert "warning: " in capsys.readouterr().out


def test_step_to_trace_that_lies_before_a_resume_is_noted(rows, tmp_path, capsys):
    loop.train(build(rows, tmp_path, stop_after_steps=2))
    loop.train(
        build(rows, tmp_path, stop_after_steps=1, profile_steps=[2], memory_snapshot_steps=[3]), watchers=step_watchers
    )
    assert "note: train.profile_steps holds 2, and this start goes on after step 2" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


# --- trackers ---------------------------------------------------------------------------------------------------------


def test_record_becomes_grouped_numbers():
    assert numbers_of({"step": 3, "steps": 9, "loss": 2.0, "mfu": None, "tokens": 5}) == {
        "train/loss": 2.0,
        "train/tokens": 5,
    }
    assert numbers_of({"step": 3, "eval_loss": 2.0, "eval_s": 0.1}) == {"eval/loss": 2.0, "eval/s": 0.1}


def recipe(rows: str, run_dir: Path, trackers: list[str], **fields) -> None:
    sft.run(with_keys(training_on(rows, **fields), run={"trackers": trackers}), run_dir, ALONE)


def test_tensorboard_holds_every_step_once_also_over_a_resume(rows, tmp_path):
    recipe(rows, tmp_path, ["tensorboard"], save_every=2, steps=6, stop_after_steps=5)
    newest = tmp_path / "checkpoints" / "step_000005"
    (newest / "COMPLETE").unlink()
    recipe(rows, tmp_path, ["tensorboard"], steps=6)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert [event.value for event in scalars] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 4, 6]


FAKE_WANDB = """
import json, os
def tell(**what):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, data, step=None):
        if step == int(os.environ.get("FAKE_WANDB_BREAKS", -1)):
            raise OSError(28, "No space left on device")
        tell(call="log", step=step, keys=sorted(data))
    def finish(self):
        tell(call="finish")
def init(project=None, name=None, id=None, resume=None, dir=None, config=None):
    tell(call="init", project=project, name=name, id=id, resume=resume, recipe=config["recipe"])
    return Run()
"""


@pytest.fixture
def wandb_calls(tmp_path_factory, monkeypatch):
    """A module `wandb` with the calls of the real one that we use; gives what was called."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("FAKE_WANDB", str(folder / "calls"))
    yield lambda: [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def test_wandb_run_is_gone_on_with_after_a_resume(rows, tmp_path, wandb_calls):
    recipe(rows, tmp_path, ["wandb"], stop_after_steps=2)
    recipe(rows, tmp_path, ["wandb"], stop_after_steps=1)
    first, second = [call for call in wandb_calls() if call["call"] == "init"]
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("torchferry", "run", "allow")
    logged = [call["step"] for call in wandb_calls() if call["call"] == "log"]
    assert logged == [0, 1, 2, 3]
    assert sum(call["call"] == "finish" for call in wandb_calls()) == 2


def test_tracker_that_fails_is_dropped_with_one_warning(rows, tmp_path, wandb_calls, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_WANDB_BREAKS", "2")
    recipe(rows, tmp_path, ["wandb"], steps=5)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert warnings == [
        "warning: wandb failed (OSError: [Errno 28] No space left on device); training goes on without it"
    ]
    assert [call["step"] for call in wandb_calls() if call["call"] == "log"] == [0, 1]
    assert json.loads((tmp_path / "outcome.json").read_text())["state"] == "succeeded"


def test_tracker_that_does_not_start_is_one_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    told: list[str] = []
    config = with_keys(Config(), run={"trackers": ["tensorboard"]})
    assert open_trackers(config, tmp_path, keep_through=0, tell=told.append) == []
    assert len(told) == 1
    assert told[0].startswith("warning: tensorboard does not start (")


def test_tracker_that_is_not_installed_is_an_error_that_names_the_package():
    config = with_keys(Config(), run={"trackers": ["wandb"]})
    with pytest.raises(ConfigError) as caught:
        check_trackers(config)
    assert str(caught.value) == (
        "run.trackers names wandb, which is not installed for this Python\nhint: pip install wandb"
    )


def log_on_a_full_disk(dist: Dist, path: str) -> str:
    """Ten records where the file may have 500 bytes, and one when it may have more; what the console showed."""
    sys.stdout = io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    log = MetricsLog(Path(path), total_steps=10)
    for step in range(1, 11):
        log.train({"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s_per_gpu": 5.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.train({"step": 11, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s_per_gpu": 5.0})
    log.close()
    return sys.stdout.getvalue()


def test_metrics_that_the_disk_does_not_take_are_one_warning_and_written_later(tmp_path):
    (shown,) = run_ranks(log_on_a_full_disk, 1, str(tmp_path / "metrics.jsonl"))
    assert shown.count("metrics.jsonl was not written: ") == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 12))
