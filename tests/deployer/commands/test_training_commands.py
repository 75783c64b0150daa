"""The trainer's commands under the deployer's name: train, inspect, init, convert, keys and the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deployer.commands.training import FORWARDED
from tests.support.ferry import REPO


def torchferry(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "import sys; sys.argv[0] = 'torchferry'; from deployer.cli import main; main()"]
    return subprocess.run([*argv, *words], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", FORWARDED)
def test_help_is_the_trainers_and_names_this_program(tmp_path: Path, name: str) -> None:
    done = torchferry(tmp_path, name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"Usage: torchferry {name} [OPTIONS] "), done
    assert f"\n  {FORWARDED[name][0]}\n" in done.stdout and f"\n    torchferry {name} " in done.stdout
    assert "train.py" not in done.stdout


def test_words_and_exit_codes_pass_as_they_are(tmp_path: Path) -> None:
    done = torchferry(tmp_path, "init", "lora", "--data", "my rows; $(x).jsonl")
    said = "lora.yaml is written. Next: torchferry inspect lora.yaml\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert "torchferry inspect lora.yaml\n# Every key: torchferry keys\n" in (tmp_path / "lora.yaml").read_text()
    assert 'train: ["my rows; $(x).jsonl"]' in (tmp_path / "lora.yaml").read_text()
    done = torchferry(tmp_path, "init", "lora")
    assert done.returncode == 2 and done.stderr.startswith("Error: lora.yaml is there already\n")
    done = torchferry(tmp_path, "inspect", "lora.yaml", "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr  # no such data: with a trace, as was asked for


def test_folders_of_the_project_are_not_taken_for_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    for name in ("trainer/__init__.py", "train.py", "deployer.py"):
        (tmp_path / name).write_text("raise SystemExit('the project')")
    deploy = [sys.executable, str(REPO / "deploy.py")]
    done = subprocess.run([*deploy, "keys", "lora.rank", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["key"] for row in json.loads(done.stdout)] == ["lora.rank"]


def test_help_lists_them_apart(tmp_path: Path) -> None:
    text = torchferry(tmp_path, "--help").stdout
    listed = text.partition("On this machine, without a job:\n")[2].partition("\n\n")[0]
    assert {row.split()[0] for row in listed.splitlines()} == set(FORWARDED)
