"""Answers a shell's request for completions at the cursor; click finds them in the commands."""

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
"""The completion function by the metavar in the help, or by the parameter's name. A new command needs no entry."""

_BREAKS = "=:@<>&|;("
"""The characters of COMP_WORDBREAKS, except quotes."""
_TO_ESCAPE, _ESCAPED = r"([^\w%+=:,./~@-])", r"\\\1"
_CURSOR = "\x01"
"""Added at the end of the line, so that the last word exists even if it is empty or has an open quote."""


def answer(cli: click.Group, asked: str) -> int:
    """Writes the completions at the cursor, and no errors: the user is in the middle of a line."""
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
    """Common to the three shells: splits the command line here, so that all three follow the same rules."""

    def get_completion_args(self) -> tuple[list[str], str]:
        typed = split_arg_string(os.environ[LINE] + _CURSOR)
        typed[-1] = typed[-1].rstrip(_CURSOR)
        own = next((i for i, word in enumerate(typed) if Path(word).name in ("torchferry", "deploy.py")), 0)
        return typed[own + 1 : -1], typed[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        if "--" in args:  # a program of the user, with its arguments
            return [words.FILE]
        args = ["--dry-run=local" if word == "--dry-run" else word for word in args]  # does not take the next word
        option = re.match("--?[a-z-]+=", incomplete)
        found = super().get_completions(args, incomplete)
        if option:
            found = [_with(item, f"{option[0]}{item.value}") for item in found]
        elif not args:
            near = words.configs(click.Context(self.cli), self.cli.params[0], incomplete)
            found += [item for item in near if item.type != "open" or not found]  # else results/ beside resume
        return [item for item in found if shown(item.value) == item.value]

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type},{item.value}"


def _with(item: CompletionItem[str], value: str) -> CompletionItem[str]:
    return item if item.type in ("file", "dir") else CompletionItem(value, item.type, item.help)


class Bash(_Answer):
    """bash replaces only the part of a word after its last break character, including the break if it is an `@`. It
    inserts the answer unchanged, so the answer must be quoted."""

    name = "bash"

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        part = os.environ.get(WORD, "")
        bare = part.lstrip("'\"")
        if not bare.strip(_BREAKS):  # the part is still empty
            bare = ""
        before = incomplete.removesuffix(bare).removesuffix("@") if incomplete.endswith(bare) else ""
        found = [(item.type, item.value.removeprefix(before)) for item in self.get_completions(args, incomplete)]
        if part[:1] in ("'", '"'):  # only words without characters that are special in quotes
            return "\n".join(f"{kind},{value}" for kind, value in found if not re.search(r"['\"$`\\!]", value))
        return "\n".join(f"{kind},{re.sub(_TO_ESCAPE, _ESCAPED, value)}" for kind, value in found)


class Zsh(_Answer):
    """`_describe` takes the answer up to its first colon as the word, and shows the rest as help."""

    name = "zsh"

    def format_completion(self, item: CompletionItem[str]) -> str:
        value = item.value.replace("\\", r"\\").replace(":", r"\:")
        return f"{item.type},{value}" + (f":{shown(item.help)}" if item.help else "")


class Fish(_Answer):
    """fish shows the text after a tab as help."""

    name = "fish"

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type},{item.value}" + (f"\t{shown(item.help)}" if item.help else "")
