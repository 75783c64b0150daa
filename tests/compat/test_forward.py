"""A job of 836d9e4 that clients with another schema resume: one that has a key more, one that has a key less.

Each client is a copy of the present tree with that change. The job's own trainer, as far as it reads the config, judges
what it is sent.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.compat.finished import lay_out
from tests.compat.versions import HANG_S, done, record
from tests.support.ferry import REPO, Ferry

READS = """
import sys
from trainer.config.load import load_config
config = load_config(sys.argv[1])
print(config.train.steps, config.train.nonfinite, config.model.tie_embeddings, config.target.queue)
"""
"""The beginning of the old trainer: everything of it before torch."""
KEYS = """\
    niceness: int = key(0, limit=AT_LEAST_0, supervised=True)
    \"\"\"How far the job stands back behind others.\"\"\"
"""
TRAIN_KEY = """\
    patience: int = 3
    \"\"\"How long the loop waits.\"\"\"
"""
ROW = '    _row("--nice", "target.niceness", "Stand back behind others.", type=int, metavar="N", at_resume={}),\n'
END_OF_ROWS = ')\n"""The rules that the host applies to a job without the client."""'


def copied(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in ("deployer", "trainer"):
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("deploy.py", "train.py"):
        shutil.copy(REPO / name, tree)
    return tree


def change(path: Path, was: str, becomes: str) -> None:
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes, 1))


@pytest.fixture(scope="module")
def with_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a client whose schema has two keys more: one of the trainer's, and one that the host carries out."""
    tree = copied(tmp_path_factory.mktemp("more"))
    for name, lines in (("target", KEYS), ("train", TRAIN_KEY)):
        path = tree / "trainer" / "schema" / f"{name}.py"
        path.write_text(path.read_text() + lines)
    change(tree / "deployer" / "commands" / "key_options.py", END_OF_ROWS, ROW + END_OF_ROWS)
    return tree


@pytest.fixture(scope="module")
def with_less(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a client whose schema has lost a key."""
    tree = copied(tmp_path_factory.mktemp("less"))
    change(tree / "trainer" / "schema" / "model.py", "    tie_embeddings: bool = True\n", "")
    line = '    "model.tie_embeddings": Dropped(bool, True),\n'
    change(tree / "trainer" / "config" / "keys.py", "    **DROPPED_WORDS,\n", line + "    **DROPPED_WORDS,\n")
    return tree


@pytest.fixture
def job(ferry: Ferry, old_code: Path) -> Path:
    """A finished job, whose config.yaml says of three keys what is not the default."""
    (job,) = lay_out(ferry.root, old_code, "sft").values()
    (job / "lib" / "train.py").write_text(READS)
    path, kept = job / "job.json", json.loads((job / "job.json").read_text())
    text = kept["plan"]["config_yaml"]
    for was, becomes in (("nonfinite: skip", "nonfinite: abort"), ("tie_embeddings: true", "tie_embeddings: false")):
        assert was in text
        text = text.replace(was, becomes)
    kept["plan"]["config_yaml"] = text
    path.write_text(json.dumps(kept))
    return job


def resume(ferry: Ferry, job: Path, *words: str, code: int = 0) -> Any:
    ran = ferry.run("resume", job.name, *ferry.where(), "--no-pull", *words, timeout_s=HANG_S)
    if code:
        assert ran.returncode == code, ran.stderr.decode()
        return ran.stderr.decode()
    assert b"note" not in ran.stderr  # nothing is said of what stands in the file
    return done(ran)


def text_of(job: Path) -> str:
    text: str = record(job)["plan"]["config_yaml"]
    assert (job / "config.yaml").read_text() == text
    return text


def test_client_with_a_key_more_sends_nothing_of_it(ferry: Ferry, job: Path, with_more: Path) -> None:
    ferry.source = with_more
    before = record(job)["plan"]["config_yaml"]
    assert resume(ferry, job) == "2 abort False False\n"
    assert text_of(job) == before
    assert resume(ferry, job, "train.steps=9", "--queue", "--nice", "4") == "9 abort False True\n"
    expected = before.replace("  steps: 2\n", "  steps: 9\n").replace("  queue: false\n", "  queue: true\n")
    assert text_of(job) == expected
    assert record(job)["plan"]["request"]["overrides"] == ["target.niceness=4"]
    refused = resume(ferry, job, "train.patience=4", code=2)
    assert refused.startswith(f"Error: the trainer of {job.name} does not know train.patience, which is newer: ")
    assert "\nhint: launch a new job, with train.resume=… naming the checkpoint to begin with\n" in refused
    ferry.source = REPO  # which knows nothing of that key: the host should do what this client cannot tell it
    refused = resume(ferry, job, code=2)
    assert refused.startswith("Error: target.niceness is not a key\n  in ")


def test_client_with_a_key_less_leaves_it_and_gives_it_to_the_trainer(ferry: Ferry, job: Path, with_less: Path) -> None:
    ferry.source = with_less
    before = record(job)["plan"]["config_yaml"]
    assert resume(ferry, job) == "2 abort False False\n"
    assert text_of(job) == before
    assert resume(ferry, job, "model.tie_embeddings=yes", "train.nonfinite=skip") == "2 skip True False\n"
    expected = before.replace("tie_embeddings: false", "tie_embeddings: true").replace("abort", "skip")
    assert text_of(job) == expected


def test_present_client_changes_what_is_given_alone(ferry: Ferry, job: Path) -> None:
    before = record(job)["plan"]["config_yaml"]
    assert resume(ferry, job, "train.steps=9", "--gpus", "1") == "9 abort False False\n"
    assert text_of(job) == before.replace("  steps: 2\n", "  steps: 9\n").replace("gpu_ranks: [0]", "gpu_ranks: [1]")
