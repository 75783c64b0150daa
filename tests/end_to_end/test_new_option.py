"""A new option is two edits: a field of the schema, and a row of the options that mirror keys.

Both are made in a copy of the tree, and that copy's own commands are asked for what follows from them.
"""

from __future__ import annotations

import difflib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO, Ferry

FIELD = '''\
    niceness: int = key(0, limit=AT_LEAST_0, aliases=("nice_level",), elsewhere=("nice -n",), supervised=True)
    """How far the job stands back behind others."""
'''
ROW = '    _row("--nice", "target.niceness", "Stand back behind others.", type=int, metavar="N", at_resume={}),\n'
ROWS = "LIMITS = (\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("changed") / "tree"
    copy.mkdir()
    for name in ("deployer", "trainer"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("deploy.py", "train.py"):
        shutil.copy(REPO / name, copy)
    schema, options = copy / "trainer" / "schema" / "target.py", copy / "deployer" / "commands" / "key_options.py"
    schema.write_text(schema.read_text() + FIELD)
    before, rows, after = options.read_text().partition(ROWS)
    assert rows
    options.write_text(before + rows + ROW + after)
    return copy


@pytest.fixture
def ferry(ferry: Ferry, tree: Path) -> Ferry:
    """A client of that tree, in a project whose own trainer fails at once."""
    ferry.source = tree
    ferry.write("train.py", "raise SystemExit(3)")
    (ferry.project / "trainer").mkdir()
    ferry.write("trainer/__init__.py", "")
    ferry.write("a.yaml", "target: {device: cpu, niceness: 1}\n")
    return ferry


def python(tree: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *words]
    return subprocess.run(argv, cwd=folder, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True)


def test_help_of_run_and_resume_shows_it(ferry: Ferry) -> None:
    for command in ("run", "resume"):
        assert "--nice N                   Stand back behind others.\n" in ferry.run(command, "--help").stdout.decode()


def test_page_of_keys_has_one_row_more(tree: Path, tmp_path: Path) -> None:
    page = python(tree, "-m", "trainer.config.docs", folder=tmp_path).stdout
    old = (REPO / "docs" / "config.md").read_text()
    lines = list(difflib.unified_diff(old.splitlines(), page.splitlines(), n=0))[3:]
    assert lines == [
        "+| `target.niceness` | a whole number; 0 or more | `0` | How far the job stands back behind others. |"
        " `nice_level`, `nice -n` |"
    ]


def test_its_limit_is_a_rule_for_program_config_and_override(ferry: Ferry) -> None:
    broken = "Error: target.niceness is -2, must be 0 or more\n"
    program = ferry.run("run", "--dry-run", "--nice", "-2", "--", "true")
    option = ferry.run("a.yaml", "--dry-run", "--nice", "-2")
    override = ferry.run("a.yaml", "--dry-run", "target.niceness=-2")
    assert [done.returncode for done in (program, option, override)] == [2, 2, 2]
    assert program.stderr.decode() == broken
    assert option.stderr.decode() == override.stderr.decode() == f"{broken}  on the command line\n"


def test_other_tools_name_of_it_is_corrected(ferry: Ferry) -> None:
    ferry.write("b.yaml", "target:\n  nice_level: 1\n")
    said = ferry.run("b.yaml", "--dry-run").stderr.decode()
    assert said == "Error: target.nice_level is not a key\n  in b.yaml:2\nhint: did you mean target.niceness?\n"


def test_trainer_started_by_hand_says_that_it_has_no_supervisor(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("target: {niceness: 1}\n")
    notes = "config_notes(load_config('c.yaml'), backend='pytorch', deployed=False)"
    said = python(tree, "-c", f"from trainer.config.load import *\nprint(*{notes})", folder=tmp_path).stdout
    assert said == "target.niceness: no effect, train.py has no supervisor: deploy.py does that\n"


def test_job_has_it_and_a_resume_keeps_or_changes_it(ferry: Ferry) -> None:
    def niceness() -> int:
        """As its request holds it: the project's own trainer need not know what the host carries out."""
        assert "niceness" not in (ferry.job() / "config.yaml").read_text()
        settings = json.loads((ferry.job() / "job.json").read_text())["plan"]["request"]["overrides"]
        return int(dict(setting.split("=") for setting in settings)["target.niceness"])

    assert ferry.run("a.yaml", *ferry.where(), "--no-pull").returncode == 3
    (job_id,) = ferry.job_ids()
    assert niceness() == 1
    for words, expected in ((("--nice", "5"), 5), ((), 5), (("target.niceness=7",), 7)):
        assert ferry.run("resume", job_id, *words, "--no-pull").returncode == 3
        assert niceness() == expected
    refused = ferry.run("resume", job_id, "--nice", "-2")
    assert refused.returncode == 2 and b"target.niceness is -2, must be 0 or more" in refused.stderr


def test_program_keeps_it_over_a_resume(ferry: Ferry) -> None:
    assert ferry.run("run", *ferry.where(), "--nice", "5", "--no-pull", "--", "false").returncode == 1
    assert ferry.run("resume", ferry.job_ids()[0], "--no-pull").returncode == 1
    record = json.loads((ferry.job() / "job.json").read_text())
    plans = [record["resumed"][0]["plan_before"], record["plan"]]
    assert all("target.niceness=5" in plan["request"]["overrides"] for plan in plans)
