"""Texts of every kind become token files, the same whatever number of processes makes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from trainer.commands.cli import COMMANDS
from trainer.commands.tokenize import tokenize
from trainer.data.rows.findings import parse_findings
from trainer.data.tokenize.plain_text import CHUNK_CHARS, CHUNK_TEXTS, Text, cut_texts, read_texts, write_token_file
from trainer.data.tokenize.token_file import TokenFile
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer, vocabulary_hash
from trainer.errors import DataError

END = "<|im_end|>"  # of the byte tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two documents at two depths, and a file of another kind."""
    found = tmp_path / "notes"
    (found / "deep").mkdir(parents=True)
    (found / "b.txt").write_text("ünder")
    (found / "deep" / "a.md").write_text("# Over")
    (found / "c.py").write_text("pass")
    return found


def decoded(path: Path) -> list[tuple[str, str]]:
    tokenizer = build_bytes_tokenizer()
    return [(doc.id, tokenizer.decode(doc.ids.tolist())) for doc in TokenFile.open(path)]


def run(*words: object) -> str:
    return CliRunner().invoke(tokenize, [str(word) for word in words], catch_exceptions=False).stdout


def test_folder_gives_a_document_for_each_file_with_an_end_token(folder, tmp_path):
    run(folder, "--tokenizer", "builtin:bytes", "--out", tmp_path / "a.tokens")
    assert decoded(tmp_path / "a.tokens") == [
        (f"{folder}/b.txt", "ünder" + END),
        (f"{folder}/deep/a.md", "# Over" + END),
    ]


def test_json_report_has_exact_counts(folder, tmp_path):
    (folder / "empty.txt").write_text("")
    report = json.loads(run(folder, "-t", "builtin:bytes", "-o", tmp_path / "a.tokens", "--json"))
    counts = {key: report[key] for key in ("documents", "tokens", "text_bytes", "bytes_per_token", "empty", "dtype")}
    assert counts == {
        "documents": 2, "tokens": 14, "text_bytes": 12, "bytes_per_token": 1.0, "empty": 1, "dtype": "uint16"
    }  # fmt: skip


def test_report_for_people_names_documents_tokens_and_bytes_per_token(folder, tmp_path):
    out = run(folder, "-t", "builtin:bytes", "-o", tmp_path / "a.tokens")
    assert "2 documents, 14 tokens (uint16), 1.00 bytes per token" in out


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_with_a_text_column_are_documents(tmp_path, suffix):
    rows = [{"text": "one", "x": 1}, {"text": "two", "x": 2}]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    assert [text.text for text in read_texts(str(path))] == ["one", "two"]
    assert [text.text for text in read_texts(str(path), limit=1)] == ["one"]


def test_columns_beside_the_text_are_told_and_kept_with_the_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "url": "x"}\n{"text": "b"}\n')
    report = write_token_file(tmp_path / "a.tokens", read_texts(f"{tmp_path}/a.jsonl"), build_bytes_tokenizer())
    told = f"note: columns that are not read: 'url' (1 rows); the first in {tmp_path}/a.jsonl:1"
    assert report.render()[-1] == told
    header = TokenFile.open(tmp_path / "a.tokens").header
    assert parse_findings(header.meta["findings"], tmp_path) == report.findings
    for damaged in ([{"kind": "column"}], [3], 7, [{"kind": "a", "what": "b", "rows": "c", "first": "d"}]):
        with pytest.raises(DataError, match="is damaged"):
            parse_findings(damaged, tmp_path)


def test_row_without_text_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match=r"no text in 'text': its keys are 'body'") as error:
        list(read_texts(str(path)))
    assert error.value.where == f"{path}:2"


def test_file_that_is_no_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="not UTF-8: byte 0xff at offset 2") as error:
        list(read_texts(str(tmp_path / "a.txt")))
    assert error.value.where == str(tmp_path / "a.txt")


def test_source_without_documents_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match="has no documents"):
        list(read_texts(str(tmp_path / "rows.jsonl")))


def test_text_that_looks_like_a_special_token_stays_text(tmp_path):
    write_token_file(tmp_path / "a.tokens", [Text("a", f"x{END}y")], build_bytes_tokenizer())
    [doc] = TokenFile.open(tmp_path / "a.tokens")
    assert len(doc.ids) == 2 + len(END) + 1
    assert (doc.ids == build_bytes_tokenizer().eos_token_id).sum() == 1


def test_tokenizer_that_adds_the_end_itself_gets_no_second_one(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_bytes_tokenizer()
    end = (END, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"$A {END}", f"$A $B {END}", [end])
    write_token_file(tmp_path / "a.tokens", [Text("a", "xy")], tokenizer)
    assert decoded(tmp_path / "a.tokens") == [("a", "xy" + END)]


def test_processes_write_the_same_file(tmp_path):
    texts = [Text(str(n), "word " * (n % 40)) for n in range(400)]
    for workers in (0, 2):
        write_token_file(tmp_path / f"{workers}.tokens", texts, build_bytes_tokenizer(), workers=workers)
    assert (tmp_path / "0.tokens").read_bytes() == (tmp_path / "2.tokens").read_bytes()


def test_file_carries_the_tokenizer_that_made_it(folder, tmp_path):
    run(folder, "-t", "builtin:bytes", "-o", tmp_path / "a.tokens")
    header = TokenFile.open(tmp_path / "a.tokens").header
    assert (header.tokenizer, header.vocab_size) == (vocabulary_hash(build_bytes_tokenizer()), 260)
    assert header.meta == {"sources": [str(folder)], "tokenizer": "builtin:bytes", "eos_token": END}


def test_tokenizer_without_end_token_is_refused(tmp_path):
    tokenizer = build_bytes_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-text token"):
        write_token_file(tmp_path / "a.tokens", [Text("a", "b")], tokenizer)


def test_builtin_text_has_a_document_for_each_module():
    texts = list(read_texts("builtin:stdlib-docs"))
    assert len({text.id for text in texts}) == len(texts) > 100
    [json_module] = [text.text for text in texts if text.id == "builtin:stdlib-docs[json]"]
    assert json_module.startswith("json")


def test_command_is_known_to_train_py():
    assert COMMANDS["tokenize"][0] == "trainer.commands.tokenize:tokenize"


WORKER = """
import os, signal
from trainer.data.tokenize.encode import Workers
if __name__ == "__main__":
    print(list(Workers(signal.getsignal, 1).map([signal.SIGINT])) == [signal.SIG_IGN], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_tokenizing_process_leaves_ctrl_c_to_its_parent_and_ends_with_it(tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(WORKER)
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environ, text=True) as parent:
        out, _ = parent.communicate(timeout=HANG_S)  # ends when nobody holds the pipe any more
    assert (out.strip(), parent.returncode) == ("True", -signal.SIGKILL)


def test_task_of_a_tokenizing_process_is_bounded_in_texts_and_characters():
    texts = [Text(str(number), "x" * size) for number, size in enumerate([5, 2 * CHUNK_CHARS, 5, *[1] * CHUNK_TEXTS])]
    assert [len(chunk) for chunk in cut_texts(texts)] == [1, 1, CHUNK_TEXTS, 1]


def test_name_that_no_run_would_take_for_a_token_file_is_refused(folder, tmp_path):
    result = CliRunner().invoke(tokenize, [str(folder), "-t", "builtin:bytes", "-o", str(tmp_path / "a.bin")])
    assert (result.exit_code, list(tmp_path.glob("*.bin"))) == (2, [])
    assert "must end with .tokens" in result.output
