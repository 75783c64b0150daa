"""A launch's arguments as this client stores them: without values that may be secret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MOST_BYTES = 64 << 10
"""Longer command lines are not stored."""
HIDDEN = "…"
"""Stands for a value that is not stored."""


class Anew(NamedTuple):
    """A launch with the arguments of an earlier one."""

    words: tuple[str, ...]
    values_of: str
    """The job on the host that has the values that are not stored; empty if none is missing."""
    names: tuple[str, ...]
    """Names of these values."""
    kept: tuple[str, ...]
    """The arguments as its own record stores them."""


def kept_words(words: Sequence[str]) -> tuple[str, ...]:
    """The arguments to store. For --env and target.env only the names stay. What --notify names is left out: a URL may
    contain a token, and a command anything. A program's arguments stay as they are: its plan on the host has them
    too."""
    if sum(len(word.encode("utf-8", "surrogateescape")) + 1 for word in words) > MOST_BYTES:
        return ()
    own, program = split_program(words)
    return (*_without_values(_without_whom(own)), *program)


def split_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and `--` with those of a program."""
    cut = list(words).index("--") if "--" in words else len(words)
    return list(words[:cut]), list(words[cut:])


def hidden_names(words: Sequence[str]) -> list[str]:
    """Names of the variables whose values were left out."""
    own, _ = split_program(words)
    return [name for _, _, name in _env_words(own)]


def without_env(words: Sequence[str]) -> list[str]:
    """The arguments without those that set environment variables."""
    own, program = split_program(words)
    given = {place for start, end, _ in _env_words(own) for place in range(start, end)}
    return [*(word for place, word in enumerate(own) if place not in given), *program]


def without_option(words: Sequence[str], option: str, key: str = "") -> tuple[str, ...]:
    """The arguments without an option that takes a value, and without overrides of its key."""
    own, program = split_program(words)
    kept, is_value = list[str](), False
    for word in own:
        is_given = word == option or word.startswith(f"{option}=") or bool(key and word.startswith(f"{key}="))
        if not is_given and not is_value:
            kept.append(word)
        is_value = word == option and not is_value
    return (*kept, *program)


def _without_whom(own: Sequence[str]) -> list[str]:
    before = ["", *own]
    hidden = [HIDDEN if former == "--notify" else word for former, word in zip(before, own, strict=False)]
    return [f"--notify={HIDDEN}" if word.startswith("--notify=") else word for word in hidden]


def _without_values(own: Sequence[str]) -> list[str]:
    words = [[word] for word in own]
    for _, end, known in _env_words(own):
        word = own[end - 1]
        option = "--env=" if word.startswith("--env=") else ""
        name, equals, value = word.removeprefix(option).partition("=")
        several = [] if known else _names_in(value)
        words[end - 1] = [f"{name}.{one}={HIDDEN}" for one in several] or [
            f"{option}{name}{equals}{HIDDEN if equals else ''}"
        ]
    return [word for some in words for word in some]


def _names_in(mapping: str) -> list[str]:
    """The names that `target.env={A: 1, B: 2}` gives."""
    import yaml

    try:
        found = yaml.safe_load(mapping)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str) and name] if isinstance(found, dict) else []


def _env_words(own: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """For each argument that sets environment variables: start, end and the variable's name. The name is empty if the
    argument sets several."""
    for place, word in enumerate(own):
        if place and own[place - 1] == "--env":
            yield place - 1, place + 1, word.partition("=")[0]
        elif word.startswith("--env="):
            yield place, place + 1, word.removeprefix("--env=").partition("=")[0]
        elif word.startswith(("target.env=", "target.env.")) and "=" in word:
            yield place, place + 1, word.partition("=")[0].removeprefix("target.env").removeprefix(".")
