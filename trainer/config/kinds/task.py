"""The values of a task file, in the types of their keys, and the program in its `run`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from trainer.config.fields import Word, Wrong, fit
from trainer.config.keys import Places
from trainer.config.kinds.task_keys import BY_NAME, RUN, TaskKey, is_given, unknown_task_key
from trainer.errors import ConfigError, raise_all

_OF_A_SHELL = re.compile(r"[|&;<>()$`*?\[\]#~!{}\n]|\\\n")
"""Characters that make a text more than words for a shell, without quotes and backslashes."""
_WORDS_OF_A_SHELL = frozenset(
    (".", "alias", "cd", "eval", "exec", "export", "set", "source", "ulimit", "umask", "unset")
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SHEBANG = re.compile(r"#!\s*(?:\S*/)?(?:env\s+)?(\S+)[ \t]*([^\n]*)(?:\n|\Z)")
_SET = re.compile(r"-[aefuvx]+|-[aefuvx]*o [a-z]+")
"""Options of a shell that `set` accepts too."""
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_ITS_ARGUMENTS = re.compile(r"\$(?:[@*1-9]|\{[@*1-9])")


class Program(NamedTuple):
    """The program of a task: `words`, or without them a `text` for a shell."""

    words: tuple[str, ...] = ()
    text: str = ""
    shell: str = "sh"

    @property
    def takes_arguments(self) -> bool:
        """Whether additional words reach the program."""
        return bool(self.words) or _ITS_ARGUMENTS.search(self.text) is not None


class TaskFile(NamedTuple):
    program: Program
    words: Mapping[str, bool | list[str]]
    """By key, the values for its option: a word, or one for each entry; for a flag, true or false."""
    places: Places


def read_task(tree: Mapping[str, object], places: Places) -> TaskFile:
    """The values of a task file. Raises ConfigError with all errors."""
    wrong, found = Wrong(), {}
    program = Program()
    for name, value in tree.items():
        try:
            if name not in BY_NAME:
                raise unknown_task_key(name, places)
            if name == RUN:
                program = read_program(value, places)
            elif is_given(value):
                found[name] = _words_of(BY_NAME[name], value, places)
        except ConfigError as error:
            wrong[name] = error
    if RUN not in tree:
        wrong[RUN] = ConfigError("run is missing: the program that the task runs", where=places.source)
    raise_all(wrong.values())
    return TaskFile(program, found, places)


def _words_of(row: TaskKey, value: object, places: Places) -> bool | list[str]:
    if row.kind is bool:
        return bool(fit(value, bool, row.name, places=places))
    if row.joined and isinstance(value, Word | str):
        return [str(fit(value, str, row.name, places=places))]
    fitted = fit(value, row.kind, row.name, places=places)
    if isinstance(fitted, dict):
        return [f"{_variable(row, name, places)}={text}" for name, text in fitted.items()]
    words = [str(word) for word in fitted] if isinstance(fitted, list) else [str(fitted)]
    return [",".join(words)] if row.joined else words


def _variable(row: TaskKey, name: str, places: Places) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        key = f"{row.name}.{name}"
        raise ConfigError(f"{row.name} holds {name!r}, not a name of an environment variable", where=places.of(key))
    return name


def read_program(value: object, places: Places) -> Program:
    """The program in `run`: a list is words. A text is a shell's command, or words if it has no shell syntax."""
    place = places.of(RUN)
    if isinstance(value, list):
        words = tuple(fit(value, list[str], RUN, places=places))
        if not words or not words[0].strip():
            raise ConfigError(
                "run names no program: its first word is empty", where=place, hint="run: [python, train.py]"
            )
        return Program(words)
    if not isinstance(value, Word | str) or not is_given(value):
        raise ConfigError("run is empty, expected a command", where=place, hint="run: python train.py")
    text = str(fit(value, str, RUN, places=places)).strip()
    if not text:
        raise ConfigError("run is empty, expected a command", where=place, hint="run: python train.py")
    if shebang := _SHEBANG.match(text):
        return _of_shell(text[shebang.end() :], shebang[1], shebang[2].strip(), place)
    if is_shell(text):
        return Program(text=text)
    try:
        return Program(tuple(shlex.split(text)))
    except ValueError:
        raise ConfigError("run has a quote that does not end", where=place) from None


def is_shell(text: str) -> bool:
    """Whether a command line is more than words, such as `a && b`."""
    first = text.split(None, 1)[0]
    return bool(_OF_A_SHELL.search(text) or first in _WORDS_OF_A_SHELL or _ASSIGNMENT.match(first))


def _of_shell(text: str, shell: str, options: str, place: str) -> Program:
    if shell not in _SHELLS:
        hint = f"run: [{shell}, FILE] runs a file of the folder"
        raise ConfigError(f"run begins with #! and {shell}, which is no shell", where=place, hint=hint)
    if not text.strip():
        raise ConfigError("run has nothing after its first line", where=place)
    if options and not _SET.fullmatch(options):
        message = f"run begins with #! and {shell} {options[:60]}, and this shell is started without options"
        raise ConfigError(message, where=place, hint=f"#!/bin/{shell} alone, or with -e, -u, -x, -o pipefail")
    return Program(text=f"set {options}\n{text}" if options else text, shell=shell)
