"""What a mixture reads, holds out, counts and tells."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.documents import ONE, documents_of
from trainer.config.rules import check_config
from trainer.data.loader import Data, build_data
from trainer.data.tokenize.tokenizer import load_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.schema import Config, DataConfig, SourceConfig, TrainConfig


def write_rows(path: Path, name: str, count: int, *, start: int = 0) -> str:
    file = path / f"{name}.jsonl"
    rows = [{"question": f"{name} {n}?", "answer": f"{n}" * (1 + n % 4)} for n in range(start, start + count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def load(train: list[str | SourceConfig], *, steps: int | None = None, **data: Any) -> Data:
    settings = {"eval_fraction": 0.0, "seq_len": 64, "packing": False} | data
    config = Config(
        data=DataConfig(train=train, **settings),
        train=TrainConfig(micro_batch_size=5, steps=steps, epochs=None if steps else 1.0),
    )
    check_config(config)
    return build_data(config, ONE, load_tokenizer(config))


def names(data: Data) -> list[str]:
    """The file and line of every conversation of the run, in order."""
    steps = range(data.train.total_steps)
    return [Path(name).name for name in documents_of(data.train, steps)]


def test_limit_reads_so_many_rows_of_a_source(tmp_path):
    a, b = write_rows(tmp_path, "a", 9), write_rows(tmp_path, "b", 9)
    data = load([SourceConfig(a, limit=2), b])
    assert Counter(name.split(".")[0] for name in names(data)) == {"a": 2, "b": 9}
    assert data.report.train.rows_read == 11


def test_repeat_gives_the_rows_of_a_source_more_often(tmp_path):
    a, b = write_rows(tmp_path, "a", 4), write_rows(tmp_path, "b", 4)
    data = load([SourceConfig(a, repeat=2.5), b])
    counts = Counter(names(data))
    assert sorted(count for name, count in counts.items() if name.startswith("a")) == [2, 2, 3, 3]
    assert {count for name, count in counts.items() if name.startswith("b")} == {1}


def test_weights_give_shares_and_the_report_says_what_was_asked_and_got(tmp_path):
    a, b = write_rows(tmp_path, "a", 30), write_rows(tmp_path, "b", 10)
    data = load([SourceConfig(a, weight=0.3), SourceConfig(b, weight=0.7)])
    assert Counter(name.split(".")[0] for name in names(data)) == {"a": 12, "b": 28}
    shares = data.report.train.sources
    assert [(share.rows, share.documents) for share in shares] == [(30, 12), (10, 28)]
    assert [share.asked for share in shares] == pytest.approx([0.3, 0.7])
    assert [share.got for share in shares] == pytest.approx([0.3, 0.7])
    assert f"{a}: 30 conversations; an epoch has 12," in "\n".join(data.report.render())


@pytest.mark.parametrize(
    "settings", [({}, {}), ({"repeat": 1.5}, {}), ({"weight": 1.0}, {"weight": 3.0}), ({"limit": 5}, {"repeat": 0.5})]
)
@pytest.mark.parametrize("packing", [True, False])
def test_token_count_of_the_report_is_that_of_the_batches_of_an_epoch(tmp_path, settings, packing):
    files = [write_rows(tmp_path, "a", 23), write_rows(tmp_path, "b", 9)]
    data = load([SourceConfig(file, **how) for file, how in zip(files, settings, strict=True)], packing=packing)
    batches = [batch for step in range(data.train.total_steps) for batch in data.train.step_batches(step)]
    assert sum(int(batch.num_tokens) for batch in batches) == data.report.train.tokens
    assert sum(int(batch.num_targets) for batch in batches) == data.report.train.target_tokens


def test_held_out_rows_of_a_mixture_are_each_looked_at_once_and_not_trained_on(tmp_path):
    a, b = write_rows(tmp_path, "a", 20), write_rows(tmp_path, "b", 20)
    data = load([SourceConfig(a, repeat=3.0), b], eval_fraction=0.25)
    assert data.report.eval is not None
    assert data.report.eval.rows_kept == 10
    assert sum(int(batch.num_targets) for batch in data.eval.batches()) == data.report.eval.target_tokens
    assert len(set(names(data))) == 30


def test_repeated_and_held_out_copies_are_told(tmp_path):
    a, copy = write_rows(tmp_path, "a", 6), tmp_path / "copy.jsonl"
    copy.write_text("".join(Path(a).read_text().splitlines(keepends=True)[:4]))
    text = "\n".join(load([a, str(copy)], eval=[str(copy)]).report.render())
    assert "train: 4 conversations repeat an earlier one word for word" in text
    assert "4 of 4 held-out conversations are word for word in the training data too" in text
    assert "word for word" not in "\n".join(load([a]).report.render())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": ["a", SourceConfig("b", weight=1.0)]}, r"data.train\[0\] has no weight and others have"),
        ({"train": [SourceConfig("a", weight=1.0, repeat=2.0)]}, "has weight 1 and repeat 2"),
        ({"train": [SourceConfig("a", weight=-1.0)]}, r"data.train\[0\].weight is -1.0, must be more than 0"),
        ({"train": [SourceConfig("a", repeat=0.0)]}, r"data.train\[0\].repeat is 0.0, must be more than 0"),
        ({"train": ["a", SourceConfig("b", limit=0)]}, r"data.train\[1\].limit is 0, must be 1 or more"),
        ({"eval": [SourceConfig("a", weight=1.0)]}, "data.eval has weights"),
    ],
)
def test_settings_of_sources_that_make_no_sense_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        check_config(Config(data=DataConfig(**data)))


def test_epoch_that_takes_nothing_of_its_source_is_refused_with_its_numbers(tmp_path):
    with pytest.raises(DataError, match=r"none of the 9 conversations: repeat asks for 0\.001 of"):
        load([SourceConfig(write_rows(tmp_path, "a", 9), repeat=0.001)])


def test_repeat_beyond_what_an_epoch_can_lay_out_is_refused():
    with pytest.raises(ConfigError, match=r"data.train\[0\].repeat is 1e\+09, must be at most 10,000"):
        check_config(Config(data=DataConfig(train=[SourceConfig("a", repeat=1e9)])))


@pytest.mark.parametrize("count", [2, 3])
def test_one_row_is_left_to_train_on_however_much_is_held_out(tmp_path, count):
    data = load([write_rows(tmp_path, "a", count)], eval_fraction=0.9)
    assert data.report.eval is not None
    assert (data.report.train.rows_kept, data.report.eval.rows_kept) == (1, count - 1)


def test_rows_that_cannot_be_used_are_not_held_out_in_place_of_others(tmp_path):
    file = tmp_path / "some.jsonl"
    bad = {"messages": [{"role": "system", "content": "only"}]}
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    other = {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}
    file.write_text("".join(json.dumps(row) + "\n" for row in [bad] * 30 + [good, other]))
    data = load([str(file)], eval_fraction=0.01)
    assert data.report.eval is not None
    assert (data.report.eval.rows_read, data.report.eval.rows_kept) == (1, 1)
    assert (data.report.train.rows_read, data.report.train.rows_kept) == (31, 1)


def test_built_in_text_keeps_its_held_out_modules_where_other_data_is_evaluated(tmp_path):
    other = write_rows(tmp_path, "a", 3)
    counts = [
        load(["builtin:stdlib-docs"], eval=[other], eval_fraction=share, max_train_rows=None).report.train.rows_read
        for share in (0.5, 0.0)
    ]
    assert counts[0] == counts[1]
