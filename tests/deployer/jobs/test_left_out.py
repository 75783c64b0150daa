"""What a launch left behind, joined with what the job then missed; what is said to be done works."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from deployer.agent.job.status import Missing
from deployer.jobs.left_out import (
    MOST_PATHS,
    LeftOut,
    forget_left_out,
    left_out,
    note_left_out,
    recall_left_out,
    why_missing,
)

PATHS = {
    "data": ("data/", ".gitignore:1"),
    "sub/a b.bin": ("*.bin", "sub/.gitignore:2"),
    "results": ("/results/", "built in"),
    "src/tools": ("tools/", "/p/.git/info/exclude:3"),
    "own.py": ("own.py", ".deployignore:1"),
    ".venv": ("pyvenv.cfg", "built in: a virtual environment"),
}
DATA = "data was left out by .gitignore:1 (data/); --include data"
CASES = {
    "data/x.jsonl": DATA,
    "data": DATA,
    "sub/a b.bin": "sub/a b.bin was left out by sub/.gitignore:2 (*.bin); --include 'sub/a b.bin'",
    "results/x/model": "results was left out by the built-in rule /results/; --include results",
    "src/tools/x": "src/tools was left out by /p/.git/info/exclude:3 (tools/); --include src/tools",
    "database/x": None,
    "../data/x": None,
    "empty/out.txt": "empty is an empty folder here, and empty folders do not travel; have the program make it",
    "lib/x.c": "lib is a submodule that is not checked out here; git submodule update --init lib",
    "later.txt": "later.txt is here and did not travel; --include later.txt",
    "{project}/data/x": "{project}/data/x is a path of this machine: the job runs in a copy of the project, "
    "so write data/x",
    "{outside}": "{outside} is on this machine and not on the host; "
    "ln -s {outside} . and --include set.txt, then write set.txt",
}
MODULES = {
    "own": "own.py was left out by .deployignore:1 (own.py); --include own.py",
    "tools.deep": "src/tools was left out by /p/.git/info/exclude:3 (tools/); --include src/tools",
    "numpy": None,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    for folder in ("empty", "lib", "data"):
        (project / folder).mkdir(parents=True)
    (project / "later.txt").touch()
    (project / ".gitmodules").write_text('[submodule "lib"]\n\tpath = lib\n')
    (tmp_path / "set.txt").touch()
    return project


@pytest.mark.parametrize("name", CASES)
def test_missing_file_is_joined_with_why_it_stayed_here(project: Path, name: str) -> None:
    def fill(text: str) -> str:
        return text.replace("{project}", str(project)).replace("{outside}", str(project.parent / "set.txt"))

    expected = CASES[name]
    found = why_missing([Missing(fill(name))], left_out(project, PATHS), remote=True)
    assert found[:1] == ([] if expected is None else [fill(expected)])


def test_missing_module_is_joined_with_the_file_that_stayed_here(project: Path) -> None:
    left = left_out(project, PATHS)
    for name, expected in MODULES.items():
        assert why_missing([Missing(name, "module")], left, remote=True) == ([expected] if expected else [])
    assert why_missing([Missing("data/a"), Missing("data/b")], left, remote=True) == [DATA]
    assert why_missing([Missing(str(project.parent / "set.txt"))], left, remote=False) == []
    assert why_missing([Missing("data/a")], None, remote=True) == []
    odd = ["~nobody-has-this-name/x", "x" * 5000, "a\0b", "/" + "y" * 300, "", str(Path.home() / ".ssh"), "\udcff/x"]
    assert why_missing([*map(Missing, odd), Missing("data/a")], left, remote=True) == [DATA]


def test_note_is_bounded_kept_forgotten_and_a_damaged_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path / "state"))
    many = {f"a/b/{number}": ("*", ".gitignore:1") for number in range(3 * MOST_PATHS)}
    left = left_out(tmp_path, {**many, "data": ("data/", ".gitignore:2"), "a\udcff": ("a*", "x:1")})
    note_left_out("j-1", left)
    kept = recall_left_out("j-1")
    assert kept == left and len(left.paths) == MOST_PATHS and "data" in left.paths
    note = tmp_path / "state" / "left_out" / "j-1.json"
    for damage in ('{"project": 5}', "[" * 10000, json.dumps({**left._asdict(), "paths": {"data": 99}})):
        note.write_text(damage)
        found = recall_left_out("j-1")
        assert found is None or why_missing([Missing("data/x")], found, remote=True) == []
    forget_left_out("j-1")
    forget_left_out("j-1")
    assert recall_left_out("j-1") is None and LeftOut("/p", (), {}).paths == {}


def test_hints_at_the_end_of_a_job_work_when_they_are_followed(ferry) -> None:
    subprocess.run(["git", "init", "-q", ferry.project], check=True)
    (ferry.project / "data").mkdir()
    ferry.write("data/x", "seen")
    ferry.write("helper.py", "word = 'helped'\n")
    ferry.write(".gitignore", "data/\n")
    ferry.write(".git/info/exclude", "helper.py\n")
    ferry.write("main.py", "print(open('data/x').read())\nimport helper\nprint(helper.word)\n")
    words: list[str] = []
    for missed in (["data was left out by .gitignore:1"], ["helper.py was left out by"]):
        done = ferry.run("run", *ferry.where(), "--no-pull", *words, "--", "python", "main.py")
        told = done.stderr.decode()
        assert done.returncode == 1 and missed[0] in told, told
        (job,) = [name for name in ferry.job_ids() if name in told.split(" failed:")[0].splitlines()[-1]]
        again = ferry.run("status", job, *ferry.where())
        assert missed[0] in " ".join(again.stdout.decode().split())
        words += re.findall(r"(--include) (\S+)", told)[0]
    done = ferry.run("run", *ferry.where(), "--no-pull", *words, "--", "python", "main.py")
    assert (done.returncode, done.stdout) == (0, b"seen\nhelped\n"), done.stderr.decode()
