"""The options of a command as keyword arguments of a function: the same names, the same checks."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from deployer.commands.key_options import KeyOption
from deployer.commands.values import parse_duration
from deployer.errors import UsageError
from deployer.plan.notify import VARIABLE, read_notify

ALIASES = {"host": "ssh", "outputs": "out", "secrets": "secret"}
"""Names in Python that differ from the name of the option."""
NOT_OF_A_LAUNCH = {
    **dict.fromkeys(("json", "dry_run"), "it is for the command line"),
    **dict.fromkeys(("no_pull", "pull_max", "give_up", "detach"), "Job.wait decides that"),
}


def read_keywords(
    command: click.Command, given: Mapping[str, Any], *, function: str, refused: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two mappings from `given`: values of config keys by dotted key, and values of other options by their name in the
    command.

    A name is that of an option without leading dashes (max_restarts). A value is the text of the command line, or the
    Python equivalent: a list for --gpus, a mapping for --env, seconds for a duration. `refused`: options that the
    function does not have, and why. Raises TypeError for these, and for an unknown name with the nearest known one.
    Raises UsageError for a wrong value.
    """
    options = {_keyword(option): option for option in command.params if isinstance(option, click.Option)}
    keys: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for said, value in given.items():
        name = ALIASES.get(said, said)
        if name in refused:
            raise TypeError(f"{function}() has no option {name!r}: {refused[name]}")
        if name not in options:
            known = [word for word in (*options, *ALIASES) if word not in refused]
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected option {name!r}{meant}")
        if value is None:
            continue
        option = options[name]
        read = _read(option, said, value)
        if isinstance(option, KeyOption):
            keys |= option.changes(read)
        else:
            others[option.name or name] = read
    return keys, others


def as_overrides(given: Mapping[str, Any] | Sequence[str] | None) -> tuple[str, ...]:
    """KEY=VALUE for each config key; a value that is not a string is written as JSON, which YAML can read."""
    import json

    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Mapping):
        return tuple(map(str, given))
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value, default=os.fspath)}"
        for key, value in given.items()
    )


@contextmanager
def notified(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The URLs to which the host sends events: these, else those of the environment variable, which is hidden from
    programs meanwhile. Raises UsageError for a command: commands run on a client that follows the job, and this one may
    not follow."""
    in_shell = os.environ.get(VARIABLE)
    try:
        whom = read_notify(words)
        if whom.commands:
            hint = "a URL is told by the host; for anything else there is what follows Job.wait()"
            raise UsageError("notify takes URLs from Python, and no command", hint=hint)
        yield whom.urls
    finally:
        if in_shell is not None:
            os.environ.setdefault(VARIABLE, in_shell)


def _keyword(option: click.Option) -> str:
    long = next((text for text in option.opts if text.startswith("--")), option.opts[0])
    return long.lstrip("-").replace("-", "_")


def _read(option: click.Option, name: str, value: Any) -> Any:
    if option.is_flag:
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}")
        return value
    context = click.Context(click.Command(name))
    try:
        return option.type_cast_value(context, _words(option, name, value))
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", hint=error.hint) from None
    except click.ClickException as error:
        raise UsageError(f"{name}: {error.format_message()}") from None


def _words(option: click.Option, name: str, value: Any) -> Any:
    """The value in the form that the command line uses."""
    if isinstance(value, bool):
        raise TypeError(f"{name} takes a value, not {value!r}")
    if option.multiple:
        if isinstance(value, Mapping):
            return [f"{key}={entry}" for key, entry in value.items()]
        return [os.fspath(value)] if isinstance(value, str | os.PathLike) else [str(entry) for entry in value]
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, int | float) and getattr(option.type, "func", None) is parse_duration:
        return f"{value:f}s"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
