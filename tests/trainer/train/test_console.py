"""What `train.py` prints on a terminal of somebody else's names and values: nothing drives it or forges a line."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.terminals import EVIL, assert_tame, on_terminal
from trainer.console import tame_others
from trainer.errors import DataError
from trainer.failures.diagnose import describe

NAME = EVIL.replace("/", "").encode("utf-8", "surrogatepass")
"""Of a file: any bytes but a slash."""
SEEN = rb"\x1b]0;owned\x07"


def train_py(folder: Path, *words: str | bytes) -> bytes:
    env = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    output = on_terminal([sys.executable, str(REPO / "train.py"), *words], cwd=folder, env=env)
    assert_tame(output)
    assert SEEN in output
    return output


def test_key_of_a_config(tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({"train": {EVIL: 1}}))
    assert b"hint: " in train_py(tmp_path, "c.yaml")


def test_name_of_a_file_and_what_is_wrong_in_it(tmp_path):
    path = os.fsencode(tmp_path) + b"/" + NAME + b".jsonl"
    Path(os.fsdecode(path)).write_text('{"text": 5}\n')
    train_py(tmp_path, "tokenize", path, "--tokenizer", "builtin:bytes", "--out", "o.tokens")


def test_rows_that_are_inspected(tmp_path):
    text = EVIL.replace("\n", " ")  # the lines of a row are shown as lines
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows).replace("\\ud800", ""))
    config = {"data": {"train": "rows.jsonl"}, "target": {"device": "cpu"}, "train": {"steps": 1}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    train_py(tmp_path, "c.yaml", "--inspect", "--samples", "1")


def test_config_of_a_model_folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    config = {"model": {"name": "model"}, "data": {"train": "builtin:stdlib-docs"}, "target": {"device": "cpu"}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    train_py(tmp_path, "c.yaml", "--inspect")


@pytest.mark.parametrize("error", [DataError(EVIL, where=EVIL, hint=EVIL), ValueError(EVIL)])
def test_error_in_words(error):
    lines = describe(error).split("\n")
    assert [line.split()[0] for line in lines] in (["Error:", "in", "hint:"], ["Error:", "in"])


def test_words_of_libraries(monkeypatch, capsys, caplog):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    try:
        tame_others()
        logging.getLogger("someone").error("%s of %r", EVIL, 5)
    finally:
        logging.setLogRecordFactory(factory)
    sys.excepthook(ValueError, ValueError(EVIL), None)
    for said in (caplog.messages[0], warnings.formatwarning(EVIL, UserWarning, "f.py", 1), capsys.readouterr().err):
        assert SEEN.decode() in said and "\x1b" not in said
