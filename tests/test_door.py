"""One door to the terminal: mypy refuses raw text there, and no other module writes to a stream of this process."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mypy import api

import deployer.printable
import trainer.console
from deployer.connection.call import error_of
from deployer.errors import HostError
from deployer.printable import shown
from deployer.terminal import relay, show_error, typed
from tests.support.ferry import REPO
from tests.test_house import trees

RAW = """
from deployer.launch.logview import LogView
from deployer.printable import Shown, cells, shown
from deployer import terminal

def tell(host: str, line: Shown) -> None:
    terminal.notice(host)
    terminal.notice(f"{line} of {host}")
    terminal.notice(line + line)
    terminal.notice(line.strip())
    terminal.say(host)
    terminal.confirm(host, declined=line)
    terminal.ask_yes(host)
    terminal.ask_secret(host)
    terminal.table([host], [[line]])
    terminal.table([line], [[host]])
    terminal.facts(host, [])
    terminal.facts(line, [(host, line)])
    terminal.checks([terminal.Check("ok", line, host, line)])
    terminal.progress(host)
    terminal.notice(shown(host), line, *cells(host))
    terminal.facts(shown(host), [cells(host, host)])
"""


def test_mypy_refuses_raw_text_at_every_part_of_the_door(tmp_path, monkeypatch):
    (tmp_path / "raw.py").write_text(RAW)
    monkeypatch.chdir(REPO)
    told, errors, _ = api.run([str(tmp_path / "raw.py")])
    refused = [int(line) for line in re.findall(r"raw\.py:(\d+): error: .*expected .*Shown", told, re.MULTILINE)]
    good = [number for number, line in enumerate(RAW.splitlines(), 1) if "terminal." in line and "shown(" not in line]
    assert (refused, errors) == (good, ""), told


STREAMS = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
HARMLESS = {"isatty", "flush", "fileno", "encoding"}
WRITERS = re.compile(
    r"print|input|breakpoint|getpass\.getpass|traceback\.print_\w+|warnings\.warn|faulthandler\.\w+"
    r"|click\.(echo|secho|echo_via_pager|confirm|prompt|pause|clear|progressbar|get_(text|binary)_stream)"
)


def writes(tree: ast.Module) -> Iterator[str]:
    """What in a module writes to this process's streams, or hands them on."""
    seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in HARMLESS}
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        if name in STREAMS and id(node) not in seen:
            yield name
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {keyword.arg for keyword in node.keywords}
            if WRITERS.fullmatch(called):
                yield called
            if called.startswith("subprocess.") and not ({"capture_output"} & words or {"stdout", "stderr"} <= words):
                yield called
            if called == "Shown" or ast.unparse(node).startswith("cast(Shown"):
                yield called
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (module for module in modules if module.split(".")[0] == "rich")


def test_no_other_module_of_the_client_writes_to_a_terminal():
    found = {path: sorted(set(writes(tree))) for path, tree in trees("deployer").items() if "/agent/" not in path}
    for path in ("deployer/terminal.py", "deployer/fullscreen.py"):
        del found[path]
    assert {path: names for path, names in found.items() if names} == {
        "deployer/printable.py": ["Shown"],
        "deployer/commands/screen.py": ["sys.stderr", "sys.stdout"],  # to LogView, which makes a log fit
        # to whoever asked for it from Python: lines that LogView has made fit, and `shown` ones
        "deployer/api/job.py": ["print"],
        "deployer/api/values.py": ["warnings.warn"],
        # a host's own streams, as with ssh: the command and the shell that somebody asked for
        "deployer/commands/host/exec.py": ["subprocess.call", "sys.stderr", "sys.stdout"],
        "deployer/transport/ssh_program/connection.py": ["subprocess.call"],
    }


def test_no_other_module_of_the_trainer_prints():
    """They hand the streams to `write_line`; `Screen` and the inspection make printable what they put there."""
    found = {path: set(writes(tree)) - STREAMS for path, tree in trees("trainer").items()}
    for path in ("trainer/console.py", "trainer/inspection/view.py"):
        del found[path]
    calls = {path: sorted(n for n in names if not n.startswith("subprocess.")) for path, names in found.items()}
    assert {path: names for path, names in calls.items() if names} == {
        "trainer/failures/watchdog.py": ["faulthandler.dump_traceback"],  # into a file
        # names of modules and lines alone, when nothing else can be told any more
        "trainer/start/rank.py": ["faulthandler.enable", "faulthandler.is_enabled"],
    }


# --- what is printable ------------------------------------------------------------------------------------------------

DRIVES = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]")


@pytest.mark.parametrize("make", [deployer.printable.shown, trainer.console.shown])
@given(st.one_of(st.text(), st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")), st.characters()))
def test_any_text_is_one_line_that_a_terminal_may_get(make, text):
    line = make(text)
    assert not DRIVES.search(line)
    line.encode("utf-8")  # holds no half of a character
    assert make(line) == line


def test_words_of_a_helping_program_are_made_fit(capfd):
    show = relay()
    show(b"sign in at https://x\x1b[2J\x1b]0;ow")
    show(b"ned\x07\n")
    assert capfd.readouterr().err == "sign in at https://x\\x1b]0;owned\\x07\n"


def test_error_is_a_line_for_each_of_its_parts_whatever_they_hold(capsys):
    show_error(HostError("no\nError: 1", where=["host: a\nhint: 2", "f\n  in g:1"], hint="do\nhint: 3"))
    assert capsys.readouterr().err.splitlines() == [
        r"Error: no\nError: 1",
        r"  host: a\nhint: 2",
        r"  in f\n  in g:1",
        r"hint: do\nhint: 3",
    ]


def test_error_of_a_host_in_several_lines_is_quoted_line_by_line():
    error = error_of({"kind": "bug", "message": "the agent failed:\nhint: run me\nValueError: x"})
    assert (error.message, error.where) == ("the agent failed:", ("host: hint: run me", "host: ValueError: x"))


@given(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" ")))
def test_plain_text_stays_as_it_is(text):
    assert deployer.printable.shown(text) == trainer.console.shown(text) == text


def test_both_halves_hide_the_same():
    every = [chr(number) for number in range(0x110000)]
    hides = [{c for c in every if make(c) != c} for make in (deployer.printable.shown, trainer.console.shown)]
    assert hides[0] == hides[1]


@pytest.mark.parametrize("name", [b"a b'\"$(id)", b"out/\xe4 ff'\\.bin", b"-r", b"--to\n", "ä/漢".encode(), b"\x1b[K"])
def test_word_to_be_typed_is_printable_and_read_by_a_shell_as_the_path(name):
    word = typed(os.fsdecode(name))
    assert shown(word) == word
    read = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True).stdout
    assert read == (b"./" + name if name.startswith(b"-") else name)


@pytest.mark.parametrize("words", [["deploy.py", "ps"], ["deploy.py", "--help"], ["train.py", "keys"]])
def test_python_without_our_packages_is_told_in_two_lines(words):
    done = subprocess.run([sys.executable, "-S", *words], cwd=REPO, capture_output=True, text=True)
    hint = "activate the environment that Torchferry is installed in"
    assert (done.returncode, done.stderr) == (2, f"Error: {sys.executable} has no click\nhint: {hint}\n")
