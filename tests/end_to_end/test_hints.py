"""Hints about a program and its tree, followed: what they say to type has to work."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import deployer
from deployer.cli import cli
from deployer.errors import UsageError
from deployer.plan.prepare import large_files
from deployer.project.manifest import scan
from tests.support.ferry import Ferry

FILES = {
    "m.py": "",
    "d/m.py": "print('in d')",
    "run.sh": "#!/bin/sh\n",
    "crlf.sh": "#!/bin/sh\r\necho ran\r\n",
    ".gitignore": "left/\n",
    "left/x.py": "",
    "left/rows.jsonl": "{}\n",
    "c.yaml": "{target: {device: cpu}, data: {train: [left/rows.jsonl, stays.jsonl]}}",
    ".deployignore": "stays.jsonl\n",
    "stays.jsonl": "{}\n",
    "../data/rows": "",
}
EXECUTABLE = ("run.sh", "crlf.sh")
TORCHRUN = ("--torchrun", "--gpus", "0,1", "--")
HINTS = [  # the words of `run`, what the hint is to say, and what is to be typed then: in the shell, or as words
    (("--", "cd d && python3 m.py"), "{}", ("-- bash -c 'cd d && python3 m.py'",)),
    (("--", "cd", "d", "&&", "python3", "m.py", "a b"), "{}", ("""-- bash -c 'cd d && python3 m.py '"'"'a b'"'"''""",)),
    (("--", "A=1", "B=2 3", "python3", "m.py"), "{}", ("--env A=1 --env 'B=2 3' -- python3 m.py",)),
    (("--", "run.sh", "x"), "{}", ("-- ./run.sh x",)),
    (("--", "./d/../m.py"), "{}", ("chmod +x m.py",)),
    (("--", "./crlf.sh"), "{}", ("perl -pi -e 's/\\r$//' crlf.sh",)),
    (("--", "m.py", "--a"), "{}, or {}", ("-- python m.py --a", "--torchrun --gpus 0,1 -- m.py --a")),
    (("--", "python3", "mm.py"), "did you mean {}?", ("m.py",)),
    (("--", "python3", "left/x.py"), "send it with {}", ("--include left/x.py",)),
    (
        ("--include", "../data", "--", "true"),
        "{}, then {}: its target travels",
        ("ln -s ../data data", "--include data"),
    ),
    (
        (*TORCHRUN, "torchrun", "--nnodes", "1", "m.py", "-a"),
        "{}, one process for each GPU",
        (" ".join((*TORCHRUN, "m.py -a")),),
    ),
    (
        ("--torchrun", "--", "m.py"),
        "add {} for GPUs 0 and 1, or {} for the two freest",
        ("--gpus 0,1", "--gpus auto:2"),
    ),
    (("python3", "m.py"), "put -- before a program: deploy.py run {}", ("-- python3 m.py",)),
    (
        ("c.yaml",),
        "send it with {} (or {} in the config)",
        ("--include stays.jsonl", "files=['stays.jsonl']"),
    ),
]


@pytest.fixture
def project(ferry: Ferry, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (ferry.project / name).parent.mkdir(exist_ok=True)
        (ferry.project / name).write_bytes(text.encode())
    for name in EXECUTABLE:
        (ferry.project / name).chmod(0o755)
    subprocess.run(["git", "init", "-q", "."], cwd=ferry.project, check=True)
    monkeypatch.chdir(ferry.project)
    return ferry.project


def refusal(*words: str) -> UsageError | None:
    """What a dry run of these words is refused with."""
    result = CliRunner().invoke(cli, ["run", "--dry-run", *words])
    assert result.exit_code == 0 or isinstance(result.exception, UsageError), result.exception
    return result.exception if isinstance(result.exception, UsageError) else None


def hint_of(*words: str) -> str:
    refused = refusal(*words)
    assert refused is not None
    return refused.hint or ""


def raised_at(error: UsageError) -> int | None:
    """The line of `first_word` that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.lineno if Path(frame.filename).name == "first_word.py" else None


def with_typed(words: tuple[str, ...], typed: str) -> list[str]:
    """The words with what was typed: options before theirs, a program in place of theirs, or a name for the last."""
    if typed.startswith("files="):
        return [*words, typed]
    if not typed.startswith("-"):
        return [*words[:-1], *([typed] if typed else words[-1:])]
    options, new = _cut(shlex.split(typed))
    own, program = _cut([word for word in words if not ("--torchrun" in options and word in TORCHRUN[:3])])
    if "--include" in options and "--include" in own:
        own = []
    return [*([] if new and "--" not in words else own), *options, "--", *(new or program)][
        : None if new or program else -1
    ]


def _cut(words: Sequence[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def test_what_each_hint_says_to_type_works(project: Path) -> None:
    lines = set[int | None]()
    for words, says, typed in HINTS:
        refused = refusal(*words)
        assert refused is not None, words
        assert refused.hint == says.format(*typed)
        lines.add(raised_at(refused))
        for_the_shell = [text for text in typed if not re.match("-|files=|m.py", text)]
        for text in for_the_shell:
            subprocess.run(text, shell=True, check=True)
        for text in [text for text in typed if text not in for_the_shell] or [""]:
            assert refusal(*with_typed(words, text)) is None, text
    module = Path(deployer.__file__).parent / "plan" / "first_word.py"
    raises = {node.lineno for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Raise)}
    assert raises == lines - {None}, "each hint about a first word is in the table"


def test_large_file_is_sent_apart_as_the_hint_says(project: Path) -> None:
    with (project / "a big.bin").open("wb") as file:
        file.truncate(100_000_001)
    question = large_files(scan(project, hash_cache=None))
    assert question is not None
    option, path, *_ = shlex.split(question.hint)
    assert (option, path) == ("--include", "a big.bin")
    assert large_files(scan(project, hash_cache=None, included=[path])) is None


def test_shell_script_with_windows_line_ends_is_warned_of(project: Path) -> None:
    def said() -> str:
        return CliRunner().invoke(cli, ["run", "--dry-run", "--", "sh", "crlf.sh"]).stderr

    warning = re.search(r"warning: crlf.sh has Windows line ends .*: (perl .*)", said())
    assert warning is not None
    subprocess.run(warning[1], shell=True, check=True)
    assert "warning" not in said()


def test_program_that_the_hint_names_runs(ferry: Ferry, project: Path) -> None:
    program = shlex.split(hint_of("--", "cd d && python3 m.py && .././crlf.sh"))
    subprocess.run(hint_of("--", "./crlf.sh"), shell=True, check=True)
    done = ferry.run("run", *ferry.where(), "--no-pull", *program)
    assert (done.returncode, done.stdout) == (0, b"in d\nran\n"), done.stderr.decode()
