"""Tokens are made once for all ranks of a node, kept, and made again when anything that decides them has changed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE
from tests.trainer.data.documents import documents_of
from trainer.data.dataset.cache import telling, tokenize_in_memory, tokenize_in_run
from trainer.data.dataset.documents import read_rows
from trainer.data.loader import build_data
from trainer.data.tokenize.encode import encode_rows
from trainer.data.tokenize.tokenizer import load_tokenizer
from trainer.dist import Dist, DistError
from trainer.errors import DataError
from trainer.schema import Config, DataConfig, TrainConfig


@pytest.fixture
def config(tmp_path) -> Config:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"What is {n}?", "answer": f"{n}" * (n % 9)} for n in range(40)]
    rows.append({"question": "Why? " * 40, "answer": "dropped: no target is left of it"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(data=DataConfig(train=[str(path)], seq_len=64), train=TrainConfig(micro_batch_size=2, steps=4))


def made_at(run_dir: Path) -> int:
    return (run_dir / "tokens" / "rows.tokens").stat().st_mtime_ns


def test_documents_of_the_file_are_those_in_memory(config, tmp_path):
    tokenizer = load_tokenizer(config)
    (mapped, table), (listed, expected) = (
        tokenize_in_run(config, tokenizer, ALONE, tmp_path / "run"),
        tokenize_in_memory(config, tokenizer),
    )
    assert [doc.ids.tolist() for doc in mapped] == [doc.ids.tolist() for doc in listed]
    assert [doc.is_target.tolist() for doc in mapped] == [doc.is_target.tolist() for doc in listed]
    assert [doc.id for doc in mapped] == [doc.id for doc in listed]
    for name in ("source", "key", "document", "targets", "truncated"):
        assert getattr(table, name).tolist() == getattr(expected, name).tolist()
    assert table.dropped == expected.dropped
    assert [len(rows) for rows in table.dropped.values()] == [1]


def test_restart_finds_the_tokens_made(config, tmp_path):
    tokenizer = load_tokenizer(config)
    first = build_data(config, ALONE, tokenizer, run_dir=tmp_path)
    at = made_at(tmp_path)
    again = build_data(config, ALONE, tokenizer, run_dir=tmp_path)
    assert made_at(tmp_path) == at
    assert again.train.fingerprint() == first.train.fingerprint()
    assert again.report.train == first.report.train


@pytest.mark.parametrize("change", ["rows", "time", "template", "seq_len", "system_prompt", "limit"])
def test_tokens_are_made_again_when_something_else_decides_them(config, tmp_path, change):
    tokenizer = load_tokenizer(config)
    build_data(config, ALONE, tokenizer, run_dir=tmp_path)
    at, path = made_at(tmp_path), Path(str(config.data.train[0]))
    if change == "rows":
        path.write_text(path.read_text() + '{"question": "More?", "answer": "Yes."}\n')
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "template":
        tokenizer.chat_template = tokenizer.chat_template.replace("\\n", "\\n\\n")
    else:
        values: dict[str, Any] = {"seq_len": {"seq_len": 48}, "system_prompt": {"system_prompt": "Be kind."}}
        config = replace(config, data=replace(config.data, **values.get(change, {"max_train_rows": 20})))
    build_data(config, ALONE, tokenizer, run_dir=tmp_path)
    assert made_at(tmp_path) != at


@pytest.mark.parametrize("name", ["rows.tokens", "rows.npz"])
@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_damaged_files_are_made_again(config, tmp_path, name, damage):
    tokenizer = load_tokenizer(config)
    expected = build_data(config, ALONE, tokenizer, run_dir=tmp_path).train.fingerprint()
    file = tmp_path / "tokens" / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: 200 if damage == "cut" else 0])
    assert build_data(config, ALONE, tokenizer, run_dir=tmp_path).train.fingerprint() == expected


def test_seed_and_packing_need_no_other_tokens(config, tmp_path):
    tokenizer = load_tokenizer(config)
    build_data(config, ALONE, tokenizer, run_dir=tmp_path)
    at = made_at(tmp_path)
    other = replace(config, data=replace(config.data, packing=False), train=replace(config.train, seed=9))
    build_data(other, ALONE, tokenizer, run_dir=tmp_path)
    assert made_at(tmp_path) == at


def test_broken_file_is_an_error_that_names_its_line_and_leaves_nothing(config, tmp_path):
    (tmp_path / "b.jsonl").write_text("{")
    config = replace(config, data=replace(config.data, train=[*config.data.train, str(tmp_path / "b.jsonl")]))
    with pytest.raises(DataError) as error:
        build_data(config, ALONE, load_tokenizer(config), run_dir=tmp_path / "run")
    assert error.value.where == f"{tmp_path / 'b.jsonl'}:1"
    assert not list((tmp_path / "run").rglob("*.tokens"))


def test_file_that_is_written_while_it_is_read_is_an_error(config, tmp_path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    os.utime(pipe, ns=(1, 1))
    writer = Thread(target=pipe.write_text, args=('{"question": "a", "answer": "b"}\n',), daemon=True)
    writer.start()
    config = replace(config, data=replace(config.data, train=[str(pipe)], eval_fraction=0.0))
    with pytest.raises(DataError, match="changed while it was read"):
        build_data(config, ALONE, load_tokenizer(config), run_dir=tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tokens"))


def ranks_data(dist: Dist, config: Config, run_dir: Path) -> tuple[int, str, list[str]]:
    try:
        data = build_data(config, dist, load_tokenizer(config), run_dir=run_dir)
    except (DataError, DistError) as error:
        return os.getpid(), type(error).__name__, str(error).splitlines()
    documents = documents_of(data.train, range(4), world_size=dist.world_size)
    return made_at(run_dir), data.train.fingerprint(), documents


def test_ranks_share_one_file_and_one_order(config, tmp_path):
    config = replace(config, train=replace(config.train, global_batch_size=6))
    alone = ranks_data(ALONE, config, tmp_path / "alone")
    first, second = run_ranks(ranks_data, 2, config, tmp_path / "two")
    assert first == second
    assert first[1:] == alone[1:]


def test_every_rank_raises_what_the_reading_rank_has_met(config, tmp_path):
    Path(str(config.data.train[0])).write_text('{"question": "a"}\n')
    answers = run_ranks(ranks_data, 2, config, tmp_path / "run")
    assert [answer[1] for answer in answers] == ["DataError", "DataError"]
    assert answers[0][2] == answers[1][2]


def ranks_of_two_nodes(dist: Dist, config: Config, folders: list[Path]) -> tuple[int, str, list[str]]:
    """Each rank is the first one of a node of its own."""
    return ranks_data(replace(dist, local_rank=0), config, folders[dist.rank])


@pytest.mark.parametrize("shared", [True, False])
def test_each_node_makes_its_own_file_also_in_one_shared_folder(config, tmp_path, shared):
    folders = [tmp_path / "a", tmp_path / ("a" if shared else "b")]
    first, second = run_ranks(ranks_of_two_nodes, 2, config, folders)
    assert first[1:] == second[1:]
    for folder in folders:
        assert sorted(path.name for path in (folder / "tokens").iterdir()) == ["rows.npz", "rows.tokens"]


def test_progress_is_told_in_rows_and_tokens(config, capsys):
    rows = encode_rows(islice(read_rows(config), 3), load_tokenizer(config), config.data)
    documents = [row.document for row in telling(rows, every_s=0)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" tokens")[0] for line in lines] == [
        f"tokenizing: {n} rows, {sum(len(doc.ids) for doc in documents[:n])}" for n in (1, 2, 3)
    ]


def test_rows_of_an_earlier_run_have_its_order_so_that_it_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # rows are named by their path as it is given
    first = [{"role": "user", "content": "Hi", "id": 1}, {"role": "assistant", "content": "Hello", "name": "ann"}]
    rows = [
        {
            "messages": [
                *first,
                {"role": "user", "content": f"{n}?", "name": "bob"},
                {"role": "assistant", "content": str(n)},
            ],
            "source": "web",
        }
        for n in range(8)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=["rows.jsonl"], eval_fraction=0.3, seq_len=200)
    config = Config(data=data, train=TrainConfig(micro_batch_size=1, steps=2))
    made = build_data(config, ALONE, load_tokenizer(config), run_dir=tmp_path / "run")
    # as e33343c gave them, which read no marks and told of no key
    assert made.train.fingerprint() == "be653b3dfb40920c"
    assert made.report.eval is not None and made.report.eval.rows_kept == 2
