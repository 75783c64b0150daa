"""Files as people have them give the rows of plain JSON lines, or one line that says what is wrong and what to do."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from trainer.config.load import local_data_paths
from trainer.data.rows.files import MAX_LINE
from trainer.data.rows.sources import identify, read_conversations
from trainer.errors import DataError
from trainer.schema import Config, DataConfig

ROWS = [
    {"question": "Two lines,\nand a \"quote\"?", "answer": "Yes; both."},
    {"question": "é\tü?", "answer": "4"},
]  # fmt: skip
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b'question,answer\n"Two lines,\nand a ""quote""?",Yes; both.\n\xc3\xa9\t\xc3\xbc?,4\n'
SEMICOLONS = b'question;answer\r\n"Two lines,\nand a ""quote""?";"Yes; both."\r\n\r\n\xc3\xa9\t\xc3\xbc?;4\r\n'
TABS = b'question\tanswer\n"Two lines,\nand a ""quote""?"\tYes; both.\n"\xc3\xa9\t\xc3\xbc?"\t4\n'
BOM = b"\xef\xbb\xbf"


def texts(spec: str, split: str = "train") -> list[list[str]]:
    return [[message["content"] for message in row.messages] for row in read_conversations(spec, split=split)]


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lines.json", LINES),
        ("list.jsonl", json.dumps(ROWS).encode()),
        ("list.json", json.dumps(ROWS, indent=2).encode()),
        ("pretty.json", "\n".join(json.dumps(row, indent=1) for row in ROWS).encode()),
        ("splits.json", json.dumps({"test": [{"question": "no", "answer": "no"}], "train": ROWS}).encode()),
        ("wrapped.json", json.dumps({"version": "1", "data": ROWS}).encode()),
        ("lines.ndjson", LINES),
        ("bom.jsonl", BOM + LINES),
        ("bom.json", BOM + json.dumps(ROWS).encode()),
        ("crlf.jsonl", b"\r\n" + LINES.replace(b"\n", b"\r\n \r\n")),
        ("a.csv", CSV),
        ("excel.csv", BOM + SEMICOLONS),
        ("a.tsv", TABS),
        ("a.csv.gz", gzip.compress(CSV, mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("a.jsonl.zst", zstd(LINES)),
        ("packed_and_named_plainly.jsonl", gzip.compress(LINES, mtime=0)),
        ("nan.jsonl", LINES.replace(b'}\n', b', "system": NaN}\n')),
    ],
)  # fmt: skip
def test_file_gives_the_rows_of_json_lines(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts(str(tmp_path / name)) == [[row["question"], row["answer"]] for row in ROWS]


MESSAGES = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_messages_in_a_column_of_text_are_read_as_json(tmp_path):
    quoted = MESSAGES.replace('"', '""')
    (tmp_path / "a.csv").write_text(f'messages\n"{quoted}"\n')
    assert texts(str(tmp_path / "a.csv")) == [["a", "b"]]


def saved(folder: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))


def saved_splits(folder: Path) -> None:
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "other": split.select([0])}).save_to_disk(str(folder))


def parts(folder: Path) -> None:
    folder.mkdir()
    for number, row in enumerate(ROWS):
        (folder / f"part-{number}.jsonl").write_text(json.dumps(row))
    (folder / "notes.csv").write_text("no,rows\n")


@pytest.mark.parametrize(("make", "pattern"), [(saved, ""), (saved_splits, ""), (parts, "/part-*.jsonl")])
def test_saved_data_sets_and_patterns_give_the_same_rows(tmp_path, make: Callable[[Path], None], pattern):
    make(tmp_path / "data")
    assert texts(f"{tmp_path}/data{pattern}") == [[row["question"], row["answer"]] for row in ROWS]
    assert len(identify(f"{tmp_path}/data{pattern}", "train")) > 2


def test_split_that_a_saved_data_set_lacks_is_an_error_with_those_it_has(tmp_path):
    saved_splits(tmp_path / "data")
    with pytest.raises(DataError, match="it has the splits train, other"):
        texts(f"{tmp_path}/data", split="test")


def test_pattern_travels_as_the_files_that_it_names(tmp_path):
    parts(tmp_path / "data")
    config = Config(data=DataConfig(train=["data/part-*.jsonl", "data/none-*.jsonl"]))
    names = ["data/part-0.jsonl", "data/part-1.jsonl", "data/none-*.jsonl"]
    assert local_data_paths(config, root=tmp_path) == names


ONE = b'{"question": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message", "where", "hint"),
    [
        # what was said to be at column 1
        ("a.jsonl", ONE + b'{"question": "a", "answer":   \n' + ONE, "Expecting value at column 28", "a.jsonl:2", ""),
        ("a.jsonl", b"\n" + ONE[:-2] + b" x}\n", "delimiter at column 33", "a.jsonl:2", ""),
        ("a.json", b'[\n{"question": "a",\n "answer" "b"}]', "delimiter at column 11", "a.json:3", ""),
        ("a.json", b"[" + ONE + b"," + ONE[:-2] + b"]", "delimiter at column 33", "a.json:2", ""),
        ("a.jsonl", b'{"question": "a", "question": "b"}', 'the key "question" twice', "a.jsonl:1", ""),
        ("a.jsonl", b'{"question": "a", "answer": Infinity}', "Infinity, which is no JSON", "a.jsonl:1", ""),
        ("a.json", b"[" * 100_000, "not readable JSON", "a.json:1", ""),
        ("a.json", b'{"train": [{"x": 1}], "val": [{"x": 1}]}', "no split 'dev'; it", "a.json", "data.train_split"),
        ("a.json", b'{"rows": 3}', "no known schema has the keys 'rows'", "a.json[0]", "rename"),
        ("a.json", "[]".encode("utf-16"), "is UTF-16 text", "", "iconv -f UTF-16"),
        ("a.jsonl", b"\xe9", "not UTF-8: byte 0xe9", "a.jsonl:1", "convert it"),
        ("a.jsonl", b"PK\x03\x04abc", "is a zip archive", "", "unpack it"),
        ("a.jsonl", b"PAR1abc", "is a Parquet file", "", ".parquet"),
        ("a.parquet", b"PAR1abc", "not a readable Parquet file", "a.parquet", ""),
        ("a.xlsx", b"PK\x03\x04abc", "no kind of file that can be read", "", ".csv"),
        ("a.csv", b"question,answer\na,b,c\n", "has 3 values, and the header 2 names", "a.csv:2", "quote texts"),
        ("a.csv", b'question,answer\na,b\n"a"x,b\n', "not CSV: ", "a.csv:3", "within quotes"),
        ("a.csv", b"question,question\n", "names a column twice", "a.csv:1", ""),
        ("a.csv", b"question,answer\na,\xe9\n", "not UTF-8", "a.csv:2", "convert it"),
        ("a.csv", b"", "has no rows", "a.csv", ""),
        ("a.jsonl.zst", zstd(LINES)[:-9], "cannot be read", "", ""),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], "cannot be read", "", ""),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:9] + b"junk", "cannot be read", "", ""),
    ],
)  # fmt: skip
def test_error_names_file_line_and_column_in_one_line(tmp_path, name, content, message, where, hint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        texts(str(tmp_path / name), split="dev")
    assert message in error.value.message and "\n" not in error.value.message
    assert len(error.value.message) < 200 + len(str(tmp_path))
    assert error.value.where == (str(tmp_path / where) if where else "")
    assert hint in error.value.hint and bool(hint) == bool(error.value.hint)


def test_line_without_end_is_not_read_into_memory(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(MAX_LINE + 2)  # a hole: it takes no disk
    with pytest.raises(DataError, match="a line of more than 64 MiB"):
        texts(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("hf://datasets/openai/gsm8k", "is a URL", "write its name, openai/gsm8k"),
        ("https://huggingface.co/datasets/openai/gsm8k/viewer", "is a URL", "write its name, openai/gsm8k"),
        ("https://example.com/rows.jsonl", "is a URL", "download it"),
        ("./none/*.jsonl", "there is no file", "data.train"),
    ],
)
def test_source_that_is_no_file_says_what_to_write(spec, message, hint):
    for call in (lambda: texts(spec), lambda: identify(spec, "train")):
        with pytest.raises(DataError, match=message) as error:
            call()
        assert hint in error.value.hint


def test_data_set_that_cannot_be_made_tells_the_cause(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": 1, "answer": {"x": 2}}\n')
    with pytest.raises(DataError) as error:
        texts(str(tmp_path))
    assert "error occurred while generating" not in error.value.message
