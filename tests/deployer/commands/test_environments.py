"""What a project needs, on the real command line: every hint of this part is followed, and works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.ferry import Ferry


def hint_of(stderr: bytes) -> str:
    return re.findall(r"hint: (.*)", stderr.decode())[-1]


def run(ferry: Ferry, *words: str, program: str) -> subprocess.CompletedProcess[bytes]:
    return ferry.run("run", *ferry.where(), "--no-pull", *words, "--", "python", "-c", program)


def test_a_missing_module_s_hints_work_when_followed(ferry):
    (ferry.project / "tools").mkdir()
    ferry.write("tools/ferry_own.py", "value = 7\n")
    ferry.write("requirements-gpu.txt", "ferry-other  # pytest\npytest\n")
    lost = run(ferry, program="import ferry_own")
    assert lost.returncode == 1
    assert b"ferry_own is the project's own, at tools/ferry_own, where Python does not look" in lost.stderr
    option = hint_of(lost.stderr).partition(" makes ")[0]
    assert run(ferry, *shlex.split(option), program="import ferry_own; print(ferry_own.value)").stdout == b"7\n"
    lost = run(ferry, program="import ferry_other")
    assert b"requirements-gpu.txt names ferry-other, but what it lists was not asked of" in lost.stderr
    option = hint_of(lost.stderr).partition(" asks ")[0]
    asked = run(ferry, *shlex.split(option), "--dry-run=remote", program="1")
    assert asked.returncode == 0 and b"lacks ferry-other (not installed)" in asked.stdout


def test_a_src_layout_is_importable_where_the_host_has_the_rest(ferry):
    (ferry.project / "src/ferry_pkg").mkdir(parents=True)
    ferry.write("src/ferry_pkg/__init__.py", "value = 7\n")
    needs = "name='ferry_pkg'\ndependencies=['pytest', 'gone; os_name==\"nt\"']\n"
    ferry.write("pyproject.toml", "[build-system]\nrequires=['x']\n[project]\n" + needs)
    program = "import os, ferry_pkg; print(ferry_pkg.value, os.environ['PYTHONPATH'].count(':'))"
    done = run(ferry, "--env", "PYTHONPATH=/of/mine", program=program)
    assert done.stdout == b"7 1\n", done.stderr.decode()
    assert not list((ferry.root / "envs").glob("*/COMPLETE"))


@pytest.mark.parametrize(
    ("files", "words", "message", "follow"),
    [
        (
            {"environment.yml": "x"},
            ("--requirements", "environment.yml"),
            "environment.yml is a file of conda, which is not read here",
            "",
        ),
        (
            {"requirements.txt": "-r no.txt\n", "no.txt": "", ".gitignore": "no.txt\n"},
            (),
            "requirements.txt:1: no.txt is left out of what is sent",
            "--include no.txt",
        ),
        (
            {"requirements.txt": "-r requirements.txt\n"},
            (),
            "requirements.txt:1: requirements.txt names itself",
            "--requirements none",
        ),
        (
            {"pyproject.toml": "[project]\nname=\n"},
            (),
            "pyproject.toml is no TOML: Invalid value (at line 2, column 6)",
            "--requirements none",
        ),
    ],
)
def test_files_that_cannot_be_used_are_one_line_before_anything_is_sent(ferry, files, words, message, follow):
    for name, text in files.items():
        ferry.write(name, text)
    refused = run(ferry, *words, "--dry-run", program="1")
    assert refused.returncode == 2 and message in refused.stderr.decode() and b"Traceback" not in refused.stderr
    if follow:
        assert run(ferry, *shlex.split(follow), "--dry-run", program="1").returncode == 0
    assert "--include" not in follow or follow in hint_of(refused.stderr)


UV = shutil.which("uv")


@pytest.mark.skipif(UV is None, reason="no uv here")
def test_uv_s_own_commands_in_our_hints_make_files_that_are_read(ferry):
    from deployer.agent.python.build import UV_HINT

    ferry.write("pyproject.toml", "[project]\nname='own'\nversion='1'\nrequires-python='>=3.8'\n")
    for command in ("uv lock", UV_HINT.rpartition(": ")[2]):
        done = subprocess.run(
            shlex.split(command), cwd=ferry.project, env={**os.environ, "UV_OFFLINE": "1"}, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
    assert Path(ferry.project, "uv.lock").is_file() and Path(ferry.project, "requirements.txt").is_file()
    for name in ("uv.lock", "requirements.txt"):
        assert run(ferry, "--requirements", name, program="print(1)").stdout == b"1\n"
