"""The help of every command, as it is shown on 80 columns: `tests/plain/help/COMMAND.txt`.

`python -m tests.plain.test_help --write` writes these files again, after a change that somebody has read.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import click
import pytest

from deployer.cli import cli
from deployer.commands.training import FORWARDED, OF_A_CONFIG
from deployer.exit_codes import EXIT_CODES, OWN
from trainer.commands.cli import load_command, train_command

FILES = Path(__file__).with_name("help")
PROGRAM, WIDTH = "torchferry", 80
COMMANDS = (PROGRAM, *sorted(cli.commands))
MOST_WORDS, MOST_PARAGRAPHS = 30, 2
UNCLEAR = "of its own", "of their own", "for so long", "what is none"


def command_of(name: str) -> click.Command:
    """The command whose help is shown for a name; of those of the trainer, the trainer's."""
    if name in FORWARDED:
        return train_command if name in OF_A_CONFIG else load_command(name)
    return cli if name == PROGRAM else cli.commands[name]


def help_of(name: str) -> str:
    command = command_of(name)
    path = PROGRAM if name == PROGRAM else f"{PROGRAM} {name}"
    context = command.context_class(command, info_name=path, terminal_width=WIDTH, **command.context_settings)
    return command.get_help(context).rstrip() + "\n"


def paragraphs_of(name: str) -> list[str]:
    """Those above the options, each as one line; without the list of codes and whatever is not wrapped."""
    command = command_of(name)
    verb = getattr(command, "verbs", {}).get(name)
    text = (verb or command).help or ""
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if "\b" not in part)
    return [part for part in found if not part.startswith("Exit codes: ")]


def sentences_of(name: str) -> list[str]:
    options = [param.help or "" for param in command_of(name).params if isinstance(param, click.Option)]
    codes = [*(one.meaning for one in EXIT_CODES), OWN] if name == PROGRAM else []
    return [line for text in (*paragraphs_of(name), *options, *codes) for line in re.split(r"(?<=[.!?])\s+", text)]


def examples_in(text: str) -> list[list[str]]:
    """The words of each example, up to a redirection or a comment."""
    lines = re.search(r"^  Examples:\n((?:    .*\n)+)", text, re.MULTILINE)
    each = [shlex.split(line, comments=True) for line in lines[1].splitlines()] if lines else []
    return [words[: next((i for i, word in enumerate(words) if word in (">", ">>")), None)] for words in each]


def understand(words: list[str]) -> None:
    """An error for what the command line does not take."""
    if words[0] in FORWARDED:
        command_of(words[0]).make_context(words[0], words[1:]).close()
        return
    with cli.make_context(PROGRAM, list(words)) as context:
        name, command, rest = cli.resolve_command(context, context._protected_args + context.args)
        assert command is not None
        command.make_context(name, rest, parent=context).close()


def write() -> None:
    for file in FILES.glob("*.txt"):
        file.unlink()
    for name in COMMANDS:
        (FILES / f"{name}.txt").write_text(help_of(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_as_it_was_read(name: str) -> None:
    assert help_of(name) == (FILES / f"{name}.txt").read_text()


def test_no_file_is_left_of_a_command_that_is_gone() -> None:
    assert {file.stem for file in FILES.glob("*")} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_sentences_are_short_and_plain(name: str) -> None:
    assert [line for line in sentences_of(name) if len(line.split()) > MOST_WORDS] == []
    said = " ".join(help_of(name).split()).lower()
    assert [phrase for phrase in UNCLEAR if phrase in said] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    options = [param for param in command_of(name).params if isinstance(param, click.Option)]
    assert [option.name for option in options if not re.search(r"[.\]]$", option.help or "")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_line_two_paragraphs_and_fits_on_the_screen(name: str) -> None:
    summary, *others = paragraphs_of(name)
    assert summary == FORWARDED.get(name, [summary])[0] and re.fullmatch(r"[A-Z][a-z-]+ .*\.", summary)
    assert len(summary) <= WIDTH - 2 and len(others) <= MOST_PARAGRAPHS
    lines = help_of(name).splitlines()
    assert [line for line in lines if len(line) > WIDTH or re.search(r"(^| )--[a-z-]+-$", line)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_two_examples_that_are_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = examples_in(help_of(name))
    assert len(examples) >= 2
    for program, *words in examples:
        assert program == PROGRAM
        understand(words)
    if name != PROGRAM:
        assert len([words for _, *words in examples if words[0] == name]) >= 2


@pytest.mark.parametrize("name", ["run", "pull", "gc"])
def test_options_of_the_connection_come_last_and_help_at_the_very_end(name: str) -> None:
    own, _, connection = help_of(name).partition("\nConnection:\n")
    options = ["--ssh-key", "--accept-new-host-key", "--transport", "--connect-timeout", "--remote-root", "-h,"]
    assert [line.split()[0] for line in connection.splitlines() if line.startswith("  -")] == options
    assert "  --ssh " in own and not any(f"  {option} " in own for option in options)


def test_name_of_an_option_is_never_broken_at_the_end_of_a_line() -> None:
    for width in range(60, 100):
        command = cli.commands["gc"]
        text = command.get_help(command.context_class(command, info_name="gc", terminal_width=width))
        assert "\u2011" not in text and not re.search(r"--\w+-\n", text), width


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    write()
