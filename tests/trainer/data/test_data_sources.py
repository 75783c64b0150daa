"""Files of every kind and schema become the same rows; bad ones give one clear error."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trainer.data.rows.sources import read_conversations as read_lazily
from trainer.data.rows.stdlib_docs import is_held_out, read_stdlib_pairs
from trainer.errors import DataError

# rows in the form of GSM8K, written for this test
GSM8K_LIKE = [
    {
        "question": "Ada has 3 boxes of 4 eggs and eats 2 eggs. How many are left?",
        "answer": "She has 3*4=<<3*4=12>>12 eggs.\nShe keeps 12-2=<<12-2=10>>10.\n#### 10",
    },
    {"question": "A train goes 60 km in an hour. How far in 3 hours?", "answer": "60*3=<<60*3=180>>180 km.\n#### 180"},
]


def read_conversations(spec: str, **how):
    return list(read_lazily(spec, **how))


HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write_lines(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("record", "messages", "context"),
    [
        ({"messages": HI}, HI, 0),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, HI, 0),
        ({"prompt": "Hi", "completion": "Hello"}, HI, 1),
        ({"prompt": HI[:1], "completion": HI[1:]}, HI, 1),
        ({"instruction": "Hi", "output": "Hello"}, HI, 0),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, HI, 0),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, [{"role": "user", "content": "Add\n\n1 2"},
                                                                 {"role": "assistant", "content": "3"}], 0),
        ({"question": "Hi", "answer": "Hello", "id": 7}, HI, 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HI[1]]}, HI, 0),
    ],
)  # fmt: skip
def test_schema_detected_gives_messages(tmp_path, record, messages, context):
    [row] = read_conversations(write_lines(tmp_path / "a.jsonl", [record]))
    assert (row.messages, row.context) == (messages, context)


def test_jsonl_rows_are_named_by_file_and_line(tmp_path):
    path = tmp_path / "gsm.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [GSM8K_LIKE[0]]) + "\n\n" + json.dumps(GSM8K_LIKE[1]))
    rows = read_conversations(str(path))
    assert [row.id for row in rows] == [f"{path}:1", f"{path}:3"]
    assert rows[0].messages[1]["content"].endswith("#### 10")


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "parquet", "folder"])
def test_other_files_give_the_rows_of_jsonl(tmp_path, kind):
    lines = "".join(json.dumps(row) + "\n" for row in GSM8K_LIKE)
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "json":
        path.write_text(json.dumps(GSM8K_LIKE))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K_LIKE), path)
    else:  # read by `datasets`
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    expected = read_conversations(write_lines(tmp_path / "rows.jsonl", GSM8K_LIKE))
    assert [row.messages for row in read_conversations(str(path))] == [row.messages for row in expected]


def test_limit_reads_the_first_rows_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GSM8K_LIKE[0]) + "\nthis line is never read\n")
    assert len(read_conversations(str(path), limit=1)) == 1


@pytest.mark.parametrize(
    ("content", "message", "where"),
    [
        (b"", "has no rows", "a.jsonl"),
        (b"\n \n", "has no rows", "a.jsonl"),
        (b'{"question": "a", "answer": "b"}\n{"question": ', "not JSON", "a.jsonl:2"),
        (b'{"question": "a", "answer": "b"}\n[1]', "not an object", "a.jsonl:2"),
        (b'{"question": "a", "answer": "b"}\n{"question": "a"}', "no 'answer'", "a.jsonl:2"),
        (b'{"question": "a", "answer": null}', "answer holds no text but null", "a.jsonl:1"),
        (b'{"question": " ", "answer": ""}', "holds no text", "a.jsonl:1"),
        (b'{"question": "a", "answer": "\xff"}', "not UTF-8: byte 0xff", "a.jsonl:1"),
        (b'{"question": "a", "answer": "\\ud83d"}', "surrogate", "a.jsonl:1"),
        (b'{"text": "a", "label": 1}', "the keys 'text', 'label'", "a.jsonl:1"),
        (b'{"messages": [{"role": "narrator", "content": "x"}]}', "unknown role 'narrator'", "a.jsonl:1"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "unknown role", "a.jsonl:1"),
        (b'{"question": "a", "answer": "b", "n": ' + b"9" * 5000 + b"}", "not readable JSON", "a.jsonl:1"),
        (b"[" * 100_000, "not readable JSON", "a.jsonl:1"),
        (b'{"messages": []}', "not a list of messages", "a.jsonl:1"),
        (b'{"messages": [{"role": "user"}]}', "holds no text", "a.jsonl:1"),
    ],
)
def test_bad_file_gives_one_error_with_its_place(tmp_path, content, message, where):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_conversations(str(path))
    assert message in error.value.message
    assert error.value.where == str(tmp_path / where)


def test_id_of_a_row_is_text_whatever_bytes_name_its_file(tmp_path):
    (tmp_path / os.fsdecode(b"\xe4\x1b.jsonl")).write_text(json.dumps(GSM8K_LIKE[0]))
    [row] = read_conversations(f"{tmp_path}/*.jsonl")
    assert row.id == f"{tmp_path}/\\udce4\\x1b.jsonl:1"


def test_missing_file_error_shows_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no file") as error:
        read_conversations("data/none.jsonl")
    assert str(tmp_path / "data/none.jsonl") in error.value.message


def test_cut_archive_gives_an_error(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GSM8K_LIKE[0]).encode() * 50)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        read_conversations(str(path))


def test_named_schema_wins_over_detection(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": HI, "question": "2+2?", "answer": "4"}])
    [row] = read_conversations(path, schema="question_answer")
    assert row.messages[1]["content"] == "4"


def test_unknown_builtin_names_the_known_one():
    with pytest.raises(DataError, match="there is no builtin:wiki"):
        read_conversations("builtin:wiki")


# --- the standard library's docstrings -------------------------------------------------------------------------------


def test_docstrings_of_a_module_become_pairs(tmp_path):
    (tmp_path / "shop.py").write_text(
        '"""A shop that sells things to people."""\n'
        "raise SystemExit('never imported')\n"
        "class Till:\n"
        "    def add(self, price, *, tax=0.2):\n"
        '        """Add a price\n\n           with its tax.\n        """\n'
        "def short():\n    'Too short.'\n"
    )
    pairs = {pair.question: pair.answer for pair in read_stdlib_pairs(tmp_path)}
    assert pairs == {
        "What is the module `shop` for?": "A shop that sells things to people.",
        "What does `shop.Till.add(self, price, *, tax=0.2)` do?": "Add a price\n\nwith its tax.",
    }


def test_library_gives_thousands_of_distinct_answers():
    pairs = read_stdlib_pairs()
    assert len(pairs) > 3000
    assert len({pair.answer for pair in pairs}) == len(pairs)
    assert "What does `bisect.bisect_left(a, x, lo=0, hi=None, *, key=None)` do?" in {pair.question for pair in pairs}


def test_held_out_split_has_other_modules_than_training():
    train = read_conversations("builtin:stdlib-docs", split="train")
    test = read_conversations("builtin:stdlib-docs", split="test")
    of_row = {f"builtin:stdlib-docs[{pair.name}]": pair.module for pair in read_stdlib_pairs()}
    assert {of_row[row.id] for row in train}.isdisjoint({of_row[row.id] for row in test})
    assert len(test) > 50


def test_held_out_modules_are_the_same_everywhere():
    modules = ["json", "asyncio.tasks", "email.message", "http.client", "trace"]
    assert [name for name in modules if is_held_out(name, 0.05)] == ["json", "trace"]
