"""A token file gives back every id, target and name that was written, and refuses what does not fit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ferry import REPO
from tests.trainer.data.token_files import document, write
from trainer.data.tokenize.token_file import TokenFile, check_ids
from trainer.data.tokenize.token_writer import TokenWriter
from trainer.errors import DataError


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "ids"),
    [(151_936, "uint32", [151_643, 0, 65_536]), (65_537, "uint32", [65_536]), (65_536, "uint16", [65_535, 40_000])],
)
def test_largest_ids_round_trip_in_the_smallest_dtype(tmp_path, vocab_size, dtype, ids):
    file = write(tmp_path / "a.tokens", [document(ids)], vocab_size=vocab_size)
    assert file.header.dtype == dtype
    assert file[0].ids.tolist() == ids
    assert (file[0].ids.dtype, file.header.max_id) == (np.int32, max(ids))


@settings(max_examples=40)
@given(st.lists(st.lists(st.tuples(st.integers(0, 299), st.booleans()), max_size=20), max_size=12), st.booleans())
def test_every_document_comes_back(tmp_path_factory, rows, has_targets):
    docs = [document([i for i, _ in row], name=f"ä{n}", targets=[t for _, t in row]) for n, row in enumerate(rows)]
    file = write(tmp_path_factory.mktemp("t") / "a.tokens", docs, vocab_size=300, has_targets=has_targets)
    expected = [(d.id, d.ids.tolist(), d.is_target.tolist() if has_targets else [True] * len(d.ids)) for d in docs]
    assert [(d.id, d.ids.tolist(), d.is_target.tolist()) for d in file] == expected
    assert file.lengths.tolist() == [len(row) for row in rows]
    assert file.header.num_targets == sum(doc.num_targets for doc in file)
    assert file.header.num_tokens == sum(len(row) for row in rows)


def test_keys_are_equal_for_documents_that_say_the_same(tmp_path):
    docs = [document([1, 2]), document([1, 3]), document([1, 2], name="copy"), document([1, 2], targets=[1, 0])]
    keys = write(tmp_path / "a.tokens", docs, has_targets=True).keys.tolist()
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3


def test_fingerprint_changes_with_ids_targets_and_names(tmp_path):
    docs = [
        [document([1, 2])],
        [document([1, 3])],
        [document([1, 2], targets=[1, 0])],
        [document([1, 2], name="e")],
        [document([1]), document([2])],
    ]
    prints = [write(tmp_path / f"{n}.tokens", d, has_targets=True).fingerprint for n, d in enumerate(docs)]
    assert len(set(prints)) == len(prints)
    assert write(tmp_path / "again.tokens", docs[0], has_targets=True).fingerprint == prints[0]


def test_an_id_outside_the_tokenizer_is_refused_on_writing(tmp_path):
    with pytest.raises(DataError, match="token 1 has id 300, and the tokenizer has ids 0 to 299") as error:
        write(tmp_path / "a.tokens", [document([5]), document([4, 300], name="b.txt")], vocab_size=300)
    assert error.value.where == "b.txt"
    assert list(tmp_path.iterdir()) == []


def test_an_id_outside_the_model_names_file_document_and_offset(tmp_path):
    file = write(tmp_path / "a.tokens", [document([5, 6]), document([]), document([7, 8, 900], name="b.txt")])
    message = r"151936 tokens and the model has 900: document 2 \(b\.txt\) holds id 900 at token 2"
    with pytest.raises(DataError, match=message):
        file.check(vocab_size=900)
    file.check(vocab_size=901, tokenizer="t1")


def test_another_tokenizer_is_refused_by_name(tmp_path):
    file = write(tmp_path / "a.tokens", [document([5])], tokenizer="t1")
    with pytest.raises(DataError, match="t1 of 151936 tokens, and this run's is t2") as error:
        file.check(vocab_size=151_936, tokenizer="t2")
    assert error.value.where.endswith("a.tokens")


def test_what_is_no_token_file_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    for content in (b"", b"hello", b"x" * 4096):
        path.write_bytes(content)
        with pytest.raises(DataError, match="no token file"):
            TokenFile.open(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        TokenFile.open(tmp_path / "absent.tokens")


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, [document(list(range(40)))], has_targets=True)
    whole = path.read_bytes()
    for size in range(8, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="truncated"):
            TokenFile.open(path)


def test_a_newer_format_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, [document([1])])
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(DataError, match="format 9, and this program reads format 1"):
        TokenFile.open(path)


def test_an_exception_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.tokens"
    before = write(path, [document([1])]).fingerprint
    with pytest.raises(RuntimeError), TokenWriter(path, vocab_size=9, tokenizer="t", has_targets=False) as writer:
        writer.add(document([2]))
        raise RuntimeError
    assert TokenFile.open(path).fingerprint == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tokens"]


def test_a_killed_writer_leaves_no_file_of_that_name(tmp_path):
    program = (
        "import os, numpy as np; from pathlib import Path; from trainer.data.tokenize.chat import Encoded\n"
        "from trainer.data.tokenize.token_writer import TokenWriter\n"
        "w = TokenWriter(Path('a.tokens'), vocab_size=9, tokenizer='t', has_targets=False).__enter__()\n"
        "for _ in range(9999): w.add(Encoded('d', np.ones(99, np.int32), np.ones(99, bool)))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env).returncode == -signal.SIGKILL
    assert not (tmp_path / "a.tokens").exists()
    assert len(write(tmp_path / "a.tokens", [document([1])])) == 1


def test_a_folder_that_takes_no_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"a\.tokens cannot be written"):
        write(tmp_path / "file" / "a.tokens", [])


def test_ids_of_documents_are_checked_against_the_model():
    with pytest.raises(DataError, match="token 1 has id 260, and the model has ids 0 to 259") as error:
        check_ids(document([3, 260], name="rows.jsonl:7"), 260)
    assert error.value.where == "rows.jsonl:7"


def test_a_damaged_header_is_refused(tmp_path):
    path = write(tmp_path / "a.tokens", [document([1, 2])]).path
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")
    with pytest.raises(DataError, match="header is damaged"):
        TokenFile.open(path)


def test_file_that_is_written_over_while_it_is_read_is_an_error_that_says_what_changed(tmp_path):
    path = tmp_path / "a.tokens"
    file = write(path, [document([1, 2, 3]), document([4, 5])])
    assert file[0].ids.tolist() == [1, 2, 3]
    size = path.stat().st_size
    path.write_bytes(b"other content")
    with pytest.raises(DataError, match=rf"has changed while it was read: {size:,} bytes of .*, now 13 bytes") as error:
        file[1]
    assert error.value.where == str(path)


def test_file_that_is_replaced_or_removed_while_it_is_read_goes_on_as_it_was(tmp_path):
    path = tmp_path / "a.tokens"
    file = write(path, [document([1, 2, 3])])
    write(path, [document([7])])
    assert file[0].ids.tolist() == [1, 2, 3]
    path.unlink()
    assert file[0].ids.tolist() == [1, 2, 3]
