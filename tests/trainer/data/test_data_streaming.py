"""A stream gives the rows of data that is all at hand, window by window, and goes on exactly where it stopped."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import ALONE
from tests.trainer.data.documents import ONE, Rank, documents_of
from trainer.config.rules import check_config, config_notes
from trainer.data.batches.steps import Loader
from trainer.data.dataset.documents import KEYS
from trainer.data.loader import Data, build_data
from trainer.data.rows.messages import Row
from trainer.data.tokenize.encode import content_key
from trainer.data.tokenize.tokenizer import load_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.recipes import sft
from trainer.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, SourceConfig, TrainConfig


def write_rows(folder: Path, name: str, count: int) -> str:
    file = folder / f"{name}.jsonl"
    rows = [{"question": f"{name} {n}?", "answer": f"{n}" * (1 + n % 4)} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def make_config(train: list[str | SourceConfig], *, data: dict[str, Any] | None = None, **how: Any) -> Config:
    settings = {"eval_fraction": 0.0, "seq_len": 64, "streaming": True, "stream_window": 10} | (data or {})
    config = Config(data=DataConfig(train=train, **settings), train=TrainConfig(**({"micro_batch_size": 3} | how)))
    check_config(config)
    return config


def load(config: Config, rank: Rank = ONE) -> Data:
    return build_data(config, rank, load_tokenizer(config))


def names(loader: Loader, steps: range, *, world_size: int = 1) -> list[str]:
    """The file and line of each conversation."""
    return [Path(name).name for name in documents_of(loader, steps, world_size=world_size)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_data_within_one_window_give_the_batches_of_data_at_hand(tmp_path, packing, shuffle):
    files: list[str | SourceConfig] = [write_rows(tmp_path, "a", 17), write_rows(tmp_path, "b", 9)]
    streamed = make_config(files, data={"packing": packing, "shuffle": shuffle, "stream_window": 100}, steps=20)
    at_hand = replace(streamed, data=replace(streamed.data, streaming=False))
    ours, theirs = load(streamed).train, load(at_hand).train
    for step in range(20):  # about two epochs
        for one, other in zip(ours.step_batches(step), theirs.step_batches(step), strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
            assert torch.equal(one.labels, other.labels)


def test_every_epoch_has_each_conversation_once_in_windows_of_its_own_order(tmp_path):
    config = make_config([write_rows(tmp_path, "a", 25)], data={"packing": False}, global_batch_size=5)
    rows = names(load(config).train, range(10))
    for epoch in (rows[:25], rows[25:50]):
        assert len(set(epoch)) == 25
        for begin, end in ((0, 10), (10, 20), (20, 25)):  # a window and nothing else
            assert {int(name.split(":")[1]) for name in epoch[begin:end]} == set(range(begin + 1, end + 1))
    assert rows[:25] != rows[25:50]
    assert rows[:10] != [f"a.jsonl:{n}" for n in range(1, 11)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_divide_the_rows_of_a_step(tmp_path, world_size):
    config = make_config([write_rows(tmp_path, "a", 40)], global_batch_size=5)
    expected = names(load(config).train, range(6))
    ranks = [load(config, Rank(rank, world_size)).train for rank in range(world_size)]
    assert all(names(rank, range(6), world_size=world_size) == expected for rank in ranks)
    parts = [load(config, Rank(rank, world_size)).train.step_batches(0) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    whole = sum(int(batch.num_targets) for batch in load(config).train.step_batches(0))
    assert sum(int(batch.num_targets) for part in parts for batch in part) == whole


@pytest.mark.parametrize("stop", range(1, 9))
@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_resume_goes_on_with_the_next_row_within_and_across_windows_and_epochs(tmp_path, stop, weights):
    files = [write_rows(tmp_path, "a", 17), write_rows(tmp_path, "b", 9)]
    sources = [SourceConfig(file, weight=weights and weights[i]) for i, file in enumerate(files)]
    config = make_config(list(sources), data={"packing": False}, micro_batch_size=4)
    expected = names(load(config).train, range(16))
    first = load(config)
    for step in range(stop):
        first.train.step_batches(step)
    state = json.loads(json.dumps(first.train.state_dict(stop)))  # as a checkpoint keeps it
    for world_size in (1, 2):
        resumed = load(config, Rank(0, world_size))
        resumed.train.load_state_dict(state)
        after = names(resumed.train, range(stop, stop + 3), world_size=world_size)
        assert after == expected[4 * stop : 4 * stop + 3 * 4 * world_size]


def test_weights_hold_in_every_window_and_sources_begin_anew(tmp_path):
    a, b = write_rows(tmp_path, "a", 100), write_rows(tmp_path, "b", 7)
    config = make_config(
        [SourceConfig(a, weight=0.6), SourceConfig(b, weight=0.4)], data={"packing": False}, global_batch_size=10
    )
    data = load(config)
    for step in range(5):
        counts = Counter(name.split(".")[0] for name in names(data.train, range(step, step + 1)))
        assert counts == {"a": 6, "b": 4}
    assert data.train.epoch_at(5) == 0.0


def test_repeat_and_limit_hold_in_an_epoch(tmp_path):
    a, b = write_rows(tmp_path, "a", 40), write_rows(tmp_path, "b", 9)
    config = make_config(
        [SourceConfig(a, repeat=2.5), SourceConfig(b, limit=3)],
        data={"packing": False, "stream_window": 1000},
        global_batch_size=1,
    )
    data, epoch = load(config), []
    step = 0
    while data.train.epoch_at(step) == 0.0:
        epoch += names(data.train, range(step, step + 1))
        step += 1
    counts = Counter(epoch)
    assert {count for name, count in counts.items() if name.startswith("b")} == {1}
    assert sum(name.startswith("b") for name in counts) == 3
    in_a = [count for name, count in counts.items() if name.startswith("a")]
    assert set(in_a) == {2, 3}
    assert 10 <= in_a.count(3) <= 30  # by content, about half of 40


def test_held_out_rows_are_looked_at_and_not_trained_on(tmp_path):
    a = write_rows(tmp_path, "a", 60)
    data = load(
        make_config([a], data={"eval_fraction": 0.3, "packing": False, "max_eval_rows": 8}, global_batch_size=6)
    )
    assert data.report.eval is not None
    assert data.report.eval.rows_kept == 8
    trained = set(names(data.train, range(20)))
    held_out = {f"a.jsonl:{n}" for n in range(1, 61)} - trained
    assert 8 <= len(held_out) <= 30
    assert sum(int(batch.num_targets) for batch in data.eval.batches()) == data.report.eval.target_tokens


def test_rows_far_ahead_are_not_read_before_the_first_step(tmp_path):
    path = Path(write_rows(tmp_path, "a", 60))
    path.write_text(path.read_text() + "{broken\n")
    train = load(make_config([str(path)], data={"packing": False}, global_batch_size=10)).train
    for step in range(5):
        train.step_batches(step)
    with pytest.raises(DataError) as error:
        for step in range(5, 8):
            train.step_batches(step)
    assert error.value.where == f"{path}:61"


def test_file_that_changes_during_the_run_is_an_error_that_says_what_changed(tmp_path):
    path = Path(write_rows(tmp_path, "a", 60))
    train = load(make_config([str(path)], data={"packing": False}, global_batch_size=10)).train
    train.step_batches(0)
    before = path.stat()
    path.write_text(path.read_text() + '{"question": "a", "answer": "b"}\n')
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.jsonl has changed while it was trained on") as error:
        for step in range(1, 8):
            train.step_batches(step)
    assert f"{before.st_size:,} -> {path.stat().st_size:,} bytes" in error.value.message


def test_resume_with_a_changed_file_or_seed_is_refused(tmp_path):
    path = Path(write_rows(tmp_path, "a", 30))
    config = make_config([str(path)])
    state = load(config).train.state_dict(1)
    with pytest.raises(DataError, match="another stream"):
        load(replace(config, train=replace(config.train, seed=1))).train.load_state_dict(state)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="another stream"):
        load(config).train.load_state_dict(state)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_stream_without_a_row_to_train_on_is_an_error(tmp_path, weight):
    path = write_rows(tmp_path, "a", 30)
    config = make_config([SourceConfig(path, weight=weight)], data={"seq_len": 4})
    with pytest.raises(DataError, match=r"none of the .* conversations read can be used: .* no target token"):
        load(config)


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({}, {"steps": None, "epochs": 1.0}, "nobody has counted an epoch's steps"),
        ({"max_train_rows": 9}, {}, "max_train_rows is 9"),
        ({"max_eval_rows": None, "eval_fraction": 0.1}, {}, "max_eval_rows is null"),
    ],
)
def test_keys_that_a_stream_cannot_honour_are_refused(data, train, message):
    with pytest.raises(ConfigError, match=message):
        make_config(["a.jsonl"], data=data, **train)


def test_window_without_a_stream_is_told_to_have_no_effect():
    config = Config(data=DataConfig(stream_window=8))
    assert "data.stream_window: no effect, data.streaming is false" in config_notes(
        config, backend="pytorch", deployed=False
    )


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_training_on_a_stream_has_the_losses_of_training_on_data_at_hand_also_resumed(tmp_path):
    config = Config(
        data=DataConfig([write_rows(tmp_path, "a", 30)], eval_fraction=0.0, seq_len=64, streaming=True),
        train=TrainConfig(steps=6, save_every=0, micro_batch_size=2),
        optim=OptimConfig(warmup_steps=0),
        model=ModelConfig(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1),
        run=RunConfig(export=False),
    )
    at_hand = replace(config, data=replace(config.data, streaming=False))
    stopped = replace(config, train=replace(config.train, stop_after_steps=3))
    for folder, runs in (("at_hand", [at_hand]), ("streamed", [stopped, config])):
        for run in runs:
            (tmp_path / folder).mkdir(exist_ok=True)
            sft.run(run, tmp_path / folder, ALONE)
    assert losses(tmp_path / "streamed") == losses(tmp_path / "at_hand")
    assert len(losses(tmp_path / "streamed")) == 6


def test_ranks_documents_are_those_of_the_step_until_their_window_is_given_back(tmp_path):
    config = make_config([write_rows(tmp_path, "a", 30)], global_batch_size=5)
    train = load(config, Rank(0, 2)).train
    train.step_batches(0)
    alone = load(config).train.rank_documents(0, 0)
    by_rank = [train.rank_documents(0, rank) for rank in (0, 1)]
    assert all(by_rank) and [*by_rank[0], *by_rank[1]] == alone
    for step in range(1, 20):
        train.step_batches(step)
    assert train.rank_documents(0, 0) == []


def test_rows_dropped_later_are_noted_once_and_nothing_is_printed(tmp_path, capsys):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 25
    rows[15] = {"messages": [{"role": "system", "content": "only"}]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = load(make_config([str(tmp_path / "rows.jsonl")], data={"packing": False})).train
    train.step_batches(0)
    for step in range(1, 5):
        train.step_batches(step)
    (note,) = train.take_notes()
    assert note.startswith("train: window 2 of epoch 0: 1 dropped, no target token: ")
    assert train.take_notes() == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("streaming", [True, False])
def test_closed_data_prepares_no_more_steps(tmp_path, streaming):
    source = write_rows(tmp_path, "a", 30)
    config = make_config([source])
    data = load(config if streaming else replace(config, data=replace(config.data, streaming=False)))
    data.train.step_batches(0)
    data.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        data.train.step_batches(5)


def lone_system_turns() -> Iterator[dict[str, Any]]:
    return ({"messages": [{"role": "system", "content": str(number)}]} for number in count())


def test_stream_without_a_row_to_hold_out_trains_without_evaluation(tmp_path):
    file = tmp_path / "rows.jsonl"
    bad = next(row for row in lone_system_turns() if content_key(Row("", row["messages"])) < 0.01 * KEYS)
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file.write_text("".join(json.dumps(row) + "\n" for row in [bad, good]))
    data = load(make_config([str(file)], data={"eval_fraction": 0.01}))
    assert (data.report.eval, len(data.eval), data.report.train.rows_kept) == (None, 0, 1)
