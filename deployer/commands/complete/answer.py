"""The answer to a shell that asks what may stand at the cursor, found by click in the commands themselves."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

from deployer.commands.complete import words
from deployer.commands.complete.cli import LINE, VARIABLE, WORD
from deployer.printable import shown

_AT = {
    **dict.fromkeys(("ID", "ID...", "[ID]"), words.jobs),
    **dict.fromkeys(("[ID|PATH]", "[ID|PATH]..."), words.runs),
    "[USER@]HOST[:PORT]": words.hosts,
    "config": words.configs,
    "[KEY=VALUE]...": words.keys,
    **dict.fromkeys(("FILE", "FILE...", "PATH"), words.files),
    **dict.fromkeys(("DIR", "NAME|DIR"), words.folders),
}
"""What an argument or option takes, as its help names it, or by its name. A new command needs nothing here."""

_BREAKS = "=:@<>&|;("
"""Of COMP_WORDBREAKS, but for quotes."""
_TO_ESCAPE, _ESCAPED = r"([^\w%+=:,./~@-])", r"\\\1"
_CURSOR = "\x01"
"""Ends the line that is read, so that its last word is there even when it is empty or a quote in it is open."""


def answer(cli: click.Group, asked: str) -> int:
    """Writes what may stand at the cursor; nothing else, whatever happens: the person is in the middle of a line."""
    for kind in (Bash, Zsh, Fish):
        add_completion_class(kind)
    for command in cli.commands.values():
        for param in command.params:
            complete = _AT.get(param.metavar or param.name or "")
            if complete is not None:
                param._custom_shell_complete = complete
    try:
        return shell_complete(cli, {}, "torchferry", VARIABLE, asked)
    except (Exception, KeyboardInterrupt):
        return 1


class _Answer(ShellComplete):
    """What the three shells share: the line is read here, as a shell reads it, and not by each in its own way."""

    def get_completion_args(self) -> tuple[list[str], str]:
        typed = split_arg_string(os.environ[LINE] + _CURSOR)
        typed[-1] = typed[-1].rstrip(_CURSOR)
        own = next((i for i, word in enumerate(typed) if Path(word).name in ("torchferry", "deploy.py")), 0)
        return typed[own + 1 : -1], typed[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        if "--" in args:  # a program of somebody's own, and its words
            return [words.FILE]
        args = ["--dry-run=local" if word == "--dry-run" else word for word in args]  # takes no word after it
        option = re.match("--?[a-z-]+=", incomplete)
        found = super().get_completions(args, incomplete)
        if option:
            found = [_with(item, f"{option[0]}{item.value}") for item in found]
        elif not args:
            near = words.configs(click.Context(self.cli), self.cli.params[0], incomplete)
            found += [item for item in near if item.type != "open" or not found]  # results/ is in the way of resume
        return [item for item in found if shown(item.value) == item.value]

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type},{item.value}"


def _with(item: CompletionItem[str], value: str) -> CompletionItem[str]:
    return item if item.type in ("file", "dir") else CompletionItem(value, item.type, item.help)


class Bash(_Answer):
    """bash replaces what follows the last of its breaks in a word alone, with that break where it is an `@`, and takes
    an answer as it is to be typed."""

    name = "bash"

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        part = os.environ.get(WORD, "")
        bare = part.lstrip("'\"")
        if not bare.strip(_BREAKS):  # the part is yet to begin
            bare = ""
        before = incomplete.removesuffix(bare).removesuffix("@") if incomplete.endswith(bare) else ""
        found = [(item.type, item.value.removeprefix(before)) for item in self.get_completions(args, incomplete)]
        if part[:1] in ("'", '"'):  # only what stands for itself in quotes
            return "\n".join(f"{kind},{value}" for kind, value in found if not re.search(r"['\"$`\\!]", value))
        return "\n".join(f"{kind},{re.sub(_TO_ESCAPE, _ESCAPED, value)}" for kind, value in found)


class Zsh(_Answer):
    """`_describe` reads an answer up to its first colon, and shows the rest."""

    name = "zsh"

    def format_completion(self, item: CompletionItem[str]) -> str:
        value = item.value.replace("\\", r"\\").replace(":", r"\:")
        return f"{item.type},{value}" + (f":{shown(item.help)}" if item.help else "")


class Fish(_Answer):
    """What follows a tab is shown."""

    name = "fish"

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type},{item.value}" + (f"\t{shown(item.help)}" if item.help else "")
