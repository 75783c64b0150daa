"""Which kind a file is; what is wrong with a task file, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ferry import REPO
from trainer.config.kinds.recognise import CONFIG, KINDS, Found, expect, fitting, read_kind
from trainer.config.kinds.task import Program, TaskFile, read_task
from trainer.config.kinds.task_keys import render_table
from trainer.errors import ConfigError

KNOWN = {
    "config": [
        "{}",
        "recipe: sft",
        "run: {name: a}",
        "target: {ssh: a}\nrun:",
        "files: [a]",
        "script: a.py\nargs: [b]",
    ],
    "task": ["run: python a.py", "run: [a]", "run: ''", "run: a\nsecrets: [A]\nsetup: b\nname: c", "run: a\nmodel: b"],
    "skypilot": [
        "run: a\nresources: {accelerators: A100}",
        "run: a\nworkdir: .\nsetup: b\nname: c",
        "setup: a\nenvs: {A: 1}",
        "run: a\nsecrets: {A: }",
    ],
    "dstack": ["type: task\ncommands: [a]\npython: 3.12\nenv: [A]\nname: b", "type: service"],
    "accelerate": ["distributed_type: FSDP", "compute_environment: LOCAL_MACHINE\nnum_processes: 2"],
    "axolotl": ["base_model: a\ndatasets: [b]\nlearning_rate: 1"],
    "trl": ["model_name_or_path: a\noutput_dir: b\nlearning_rate: 1"],
    "llama-factory": ["model_name_or_path: a\nstage: sft\noutput_dir: b"],
}


def file(folder: Path, text: str | bytes) -> Path:
    path = folder / "a.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(folder: Path, text: str | bytes, kind: str | None = None) -> str:
    """The error of a file, read as `run` reads it, with its path as FILE."""
    path = file(folder, text)
    with pytest.raises(ConfigError) as caught:
        found = read_kind(path, named=kind)
        read_task(found.tree, found.places)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in KNOWN.items() for text in texts])
def test_kind_of_a_file_shows_in_its_keys(tmp_path: Path, kind: str, text: str) -> None:
    assert read_kind(file(tmp_path, text)).kind == kind


def test_every_kind_is_tried_and_every_config_of_the_repository_is_one() -> None:
    assert set(KNOWN) == {kind.name for kind in KINDS}
    configs = sorted((REPO / "configs").glob("*"))
    assert configs and {read_kind(path).kind for path in configs if path.suffix in (".py", ".yaml")} == {CONFIG}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("run: a\nrecipe: sft", ("has the key recipe", "has the key run", "--as config or --as task")),
        ("run: [a]\nmodel: {name: b}\n", ("has the key model", "has the key run", "FILE:2")),
        (
            "run: a\ngpus: 0\nresources: {}",
            ("SkyPilot task (it has the key resources)", "--as task or --as skypilot", "FILE:3"),
        ),
        ("modle: {name: a}", ("it has modle", "did you mean model instead of modle?")),
        ("gpus: 0\ndevice: cpu", ("a task file needs run",)),
        ("run:\ngpus: 0", ("a task file needs run",)),
    ],
)
def test_file_that_fits_two_or_none_is_told_with_all_of_them(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    said = refused(tmp_path, text)
    assert [name for name in names if name not in said] == [], said


def test_word_of_the_command_line_decides(tmp_path: Path) -> None:
    path = file(tmp_path, "run: a\nresources: {}\ngpus: 0")
    assert [read_kind(path, named=name).kind for name in ("task", "skypilot")] == ["task", "skypilot"]
    with pytest.raises(ConfigError, match="--as tusk: no such kind") as caught:
        read_kind(path, named="tusk")
    assert caught.value.hint == "did you mean task?"
    with pytest.raises(ConfigError, match="is no YAML"):
        read_kind(tmp_path / "a.py", named="task")


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_refusal_names_the_kind_and_the_command_that_takes_it(tmp_path: Path, kind: str) -> None:
    found = Found(kind, {}, read_kind(file(tmp_path, "{}")).places)
    with pytest.raises(ConfigError) as caught:
        expect(found, "a b.yaml", program="torchferry")
    (row,) = (row for row in KINDS if row.name == kind)
    assert caught.value.message == f"a b.yaml is {row.what}" and "torchferry " in caught.value.hint


# --- a task file ------------------------------------------------------------------------------------------------------

LEVELS = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefg", "bcdefgh", strict=True)]
BOMB = "\n".join(["a: &a [x]", *LEVELS, "run: *h"])
BAD = {
    "empty": ("", "FILE is empty"),
    "a comment": ("# run: a\n", "FILE is empty"),
    "a list": ("- run", "FILE is not a mapping"),
    "a text": ("run", "FILE is not a mapping"),
    "binary": (bytes(range(256)), "not valid YAML"),
    "not UTF-8": (b"run: \xff\xfe\xfa", "not valid YAML"),
    "tag": ("run: !!python/object/apply:os.system [a]", "which is not allowed\n  in FILE:1"),
    "bomb": (BOMB, "values"),
    "deep": ("run: " + "[" * 500, "nested too deeply"),
    "twice": ("run: a\nrun: b", "run is given twice\n  in FILE:1 and line 2"),
    "unknown": ("run: a\nqueu: true", "queu is not a key of a task\n  in FILE:2\nhint: did you mean queue?"),
    "another tool's": ("run: a\nretries: 2", "hint: did you mean max_restarts?"),
    "the trainer's": ("run: a\nmodel: b", "model is for the trainer's config, and run makes this a task"),
    "several": ("run: a\nqueu: 1\ntorchrun: x\n", "2 mistakes"),
    "empty run": ("run: ''", "run is empty"),
    "blank run": ("run: |\n   \n", "run is empty"),
    "no words": ("run: []", "run names no program"),
    "an empty word": ("run: ['']", "run names no program"),
    "run in lists": ("run: [[a]]", "run[0] is ['a'], expected text"),
    "open quote": ("run: echo 'a", "a quote that does not end\n  in FILE:1"),
    "no shell": ("run: |\n  #!/usr/bin/python3\n  print()", "python3, which is no shell"),
    "a shell's option": ("run: |\n  #!/bin/bash -l\n  a", "bash -l, and this shell is started without options"),
    "no text": ("run: '#!/bin/sh'", "nothing after its first line"),
    "env as a list": ("run: a\nenv: [A=1]", "env is ['A=1'], expected a mapping of names to text\n  in FILE:2"),
    "env of a list": ("run: a\nenv: {A: [1]}", "env.A is [1], expected text"),
    "env's name": ("run: a\nenv: {A=B: c}", "env holds 'A=B', not a name of an environment variable\n  in FILE:2"),
    "text for a flag": ("run: a\ntorchrun: maybe", "torchrun is 'maybe', expected true or false"),
    "text for a number": ("run: a\nmax_restarts: often", "max_restarts is 'often', expected a whole number"),
    "a mapping": ("run: a\ngpus: {A100: 2}", "gpus is a mapping"),
    "NUL": ('run: "a\\0b"', "without NUL"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_task_file_is_an_error_with_its_place(tmp_path: Path, case: str) -> None:
    text, said = BAD[case]
    assert said in refused(tmp_path, text, "task")


def read(folder: Path, text: str) -> TaskFile:
    found = read_kind(file(folder, text))
    return read_task(found.tree, found.places)


@pytest.mark.parametrize(
    ("run", "program"),
    [
        ("python a.py --lr 1e-4", Program(("python", "a.py", "--lr", "1e-4"))),
        ("python 'a b.py' \"c  d\"", Program(("python", "a b.py", "c  d"))),
        ("[python, -c, 'print(1) && $A', 2]", Program(("python", "-c", "print(1) && $A", "2"))),
        ("a && b", Program(text="a && b")),
        ("A=1 a", Program(text="A=1 a")),
        ("cd a", Program(text="cd a")),
        ("a *.txt", Program(text="a *.txt")),
        ("|\n  a\n\n    b $A\n", Program(text="a\n\n  b $A")),
        ("|\n  #!/usr/bin/env bash\n  [[ a ]]\n", Program(text="[[ a ]]", shell="bash")),
        ("|\n  #!/bin/bash -e\n  a\n", Program(text="set -e\na", shell="bash")),
        ("|\n  #!/bin/bash -euo pipefail\n  a\n", Program(text="set -euo pipefail\na", shell="bash")),
        ("|\n  python a.py\n", Program(("python", "a.py"))),
    ],
)
def test_list_is_words_and_text_is_what_a_shell_reads(tmp_path: Path, run: str, program: Program) -> None:
    assert read(tmp_path, f"run: {run}").program == program


def test_words_after_it_reach_words_and_a_text_that_names_them() -> None:
    programs = [Program(("a",)), Program(text='a "$@"'), Program(text="a ${1}"), Program(text="a | b $0")]
    assert [program.takes_arguments for program in programs] == [True, True, True, False]


def test_very_long_run_is_read_whole(tmp_path: Path) -> None:
    text = "; ".join(["echo a"] * 100_000)
    assert read(tmp_path, f"run: {text}").program.text == text


def test_values_are_the_words_of_their_options(tmp_path: Path) -> None:
    text = "run: a\ngpus: [0, 1]\nenv: {A: 1, B: 'x=y', C: ''}\nqueue: yes\noutputs: out\nhost:\nmax_runtime: 1h\n"
    words = read(tmp_path, text).words
    assert words == {
        "gpus": ["0,1"],
        "env": ["A=1", "B=x=y", "C="],
        "queue": True,
        "outputs": ["out"],
        "max_runtime": ["1h"],
    }


def test_page_has_each_key_as_the_table_has_it() -> None:
    page = (REPO / "docs" / "tasks.md").read_text().splitlines()
    begin = page.index("|---|---|---|---|") + 1
    assert page[begin : page.index("", begin)] == render_table()
    named = {kind.name for kind in KINDS}
    assert {name for name in named if not any(line.startswith("| `") and f"`{name}`" in line for line in page)} == set()


def test_pure_answer_needs_no_file() -> None:
    assert fitting({"run": "a", "recipe": "sft"}) == {"config": ["recipe"], "task": ["run"]}
