"""The file of `run`: a config, or a task file, whose keys become the options and the program of the launch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from deployer.commands.key_options import KeyOption
from deployer.errors import UsageError
from deployer.plan.launch_plan import in_shell
from deployer.plan.options import Options, run_name
from trainer.config.keys import Places, get_key
from trainer.config.kinds.recognise import CONFIG, TASK, expect, read_kind
from trainer.config.kinds.task import TaskFile, read_task
from trainer.config.kinds.task_keys import BY_NAME, TASK_KEYS, TaskKey
from trainer.config.load import COMMAND_LINE, ConfigError, Draft, key_of, raise_all
from trainer.config.rules import rule_errors
from trainer.schema import Config, with_changes

OF_A_TASK = ("target.", "run.name")
"""The config keys that a task may set: those of a program's job."""


def options_of(
    config: str,
    overrides: tuple[str, ...],
    program: tuple[str, ...],
    *,
    kind: str | None,
    params: Sequence[click.Parameter],
    options: Mapping[str, Any],
) -> Options:
    """The options of a launch from the command line and its file. `params`: the command's parameters; `options`: their
    values on the command line."""
    try:
        found = expect(read_kind(config, named=kind), config, CONFIG, TASK)
        if found.kind == CONFIG:
            if program:
                raise UsageError("give a config or a program after --, not both")
            return Options(config=config, overrides=overrides, **options)
        task = read_task(found.tree, found.places)
        if options["fsdp_config"] is not None:
            raise UsageError("--fsdp-config goes with a config; a task runs a program, which reads its own")
        return _Launch(config, task, params).of(overrides, program, dict(options))
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None


class _Launch:
    """Converts a task file to options."""

    def __init__(self, path: str, task: TaskFile, params: Sequence[click.Parameter]) -> None:
        self._path, self._task = path, task
        self._options = {
            word: param for param in params if isinstance(param, click.Option) for word in param.opts
        }  # by their words

    def of(self, overrides: Sequence[str], program: tuple[str, ...], options: dict[str, Any]) -> Options:
        given, keys, wrong = {}, dict[str, Any](), list[ConfigError]()
        for name, words in self._task.words.items():
            try:
                option, value = self._read(BY_NAME[name], words)
            except ConfigError as error:
                wrong.append(error)
                continue
            if isinstance(option, KeyOption):
                keys |= option.changes(value)
            else:
                given[option.name or ""] = value
        raise_all(wrong)
        own = {**_overridden(overrides), **options["keys"]}
        secrets = [*keys.get("target.secrets", ()), *own.get("target.secrets", ())]
        keys |= own | ({"target.secrets": list(dict.fromkeys(secrets))} if secrets else {})
        command = self._command(program)
        if self._task.program.text:
            keys.setdefault("run.name", run_name(self._stem()))
        for name, value in given.items():
            options[name] = (*value, *options[name]) if isinstance(value, tuple) else options[name] or value
        self._check(keys, own, torchrun=options["torchrun"])
        return Options(command=command, **{**options, "keys": keys})

    def _read(self, row: TaskKey, words: bool | list[str]) -> tuple[click.Option, Any]:
        """The option for a key, and its value: the words of the file, parsed as if they had been typed."""
        option, place = self._options[row.option], self._task.places.of(row.name)
        if isinstance(words, bool):
            return option, words
        try:
            return option, option.type_cast_value(
                click.get_current_context(), words if option.multiple else words[0] if words else None
            )
        except UsageError as error:
            raise ConfigError(f"{row.name}: {error.message}", where=place, hint=error.hint) from None
        except click.BadParameter as error:
            raise ConfigError(f"{row.name}: {error.message.rstrip('.')}", where=place) from None

    def _command(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        program = self._task.program
        if arguments and not program.takes_arguments:
            words = shlex.join(arguments)
            raise UsageError(
                f"run of {self._path} is a text for a shell, so {words} after -- would reach nobody",
                where=self._task.places.of("run"),
                hint='write "$@" where they belong, or run as a list of words',
            )
        return (*program.words, *arguments) if program.words else in_shell(program.text, program.shell, arguments)

    def _stem(self) -> str:
        path = Path(self._path)
        return path.resolve().parent.name if path.stem == "torchferry" else path.name.partition(".")[0]

    def _check(self, keys: Mapping[str, Any], own: Mapping[str, Any], *, torchrun: bool) -> None:
        """Raises ConfigError for keys that break a rule, with their line and the key names of a task."""
        task = self._task
        if torchrun and task.program.text:
            hint = "run: train.py --lr 1e-4, or a list of words; setup has room for what comes before"
            raise ConfigError(
                "torchrun starts a Python file, and run is a text for a shell", where=task.places.of("run"), hint=hint
            )
        if torchrun and "target.gpu_ranks" not in keys:
            message = "torchrun needs gpus: it starts one process for each GPU"
            raise ConfigError(message, where=task.places.of("torchrun"), hint="gpus: 0,1")
        places = Places(task.places.source, {**self._places_of_keys(), **dict.fromkeys(own, COMMAND_LINE)})
        raise_all(map(_in_words_of_a_task, rule_errors(with_changes(Config(), keys), places=places)))

    def _places_of_keys(self) -> dict[str, str]:
        """The place in the file that sets each config key, such as target.env.NAME."""
        found: dict[str, str] = {}
        for row in TASK_KEYS:
            option = self._options.get(row.option)
            if isinstance(option, KeyOption):
                at = {key: place for key, place in self._task.places.by_key.items() if re.match(rf"{row.name}\b", key)}
                found |= {f"{option.key}{key[len(row.name) :]}": place for key, place in at.items()}
        return found


def _in_words_of_a_task(error: ConfigError) -> ConfigError:
    if error.where == COMMAND_LINE:
        return error
    message, hint = error.message, error.hint
    for key, name in {"target.gpu_ranks": "gpus", "target.ssh": "host", "run.name": "name"}.items():
        message, hint = message.replace(key, name), hint.replace(key, name)
    message = re.sub(r"\btarget\.(\w+?)(_s|_gb)?\b", r"\1", message)
    return ConfigError(message, where=error.where, hint=hint)


def _overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of `target.a=c` overrides, by dotted key. Raises ConfigError for a mistake, or a trainer key."""
    if strange := next((key_of(text) for text in overrides if not key_of(text).startswith(OF_A_TASK)), None):
        if strange in BY_NAME:
            hint = f"{BY_NAME[strange].option} says it on the command line"
            raise ConfigError(f"{strange} is a key of the file, and no override", where=COMMAND_LINE, hint=hint)
        message = f"{strange} is for the trainer, and a task runs a program"
        raise ConfigError(message, where=COMMAND_LINE, hint="keys of target can be given so: target.max_restarts=3")
    draft = Draft(Config(), Places())
    draft.override(overrides)
    config = draft.typed()
    return {key: _value_of(config, key) for key in map(key_of, overrides)}


def _value_of(config: Config, key: str) -> Any:
    if key.startswith("target.env."):
        return config.target.env[key.removeprefix("target.env.")]
    return get_key(config, key)
