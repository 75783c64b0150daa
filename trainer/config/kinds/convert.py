"""Another tool's task as a task file: the common parts of both readers, and the output format. Pure.

A key without a counterpart is never dropped silently: it becomes a note, with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.fields import NULL_WORDS, Word
from trainer.config.files import dump_yaml
from trainer.config.kinds.task import is_shell
from trainer.config.kinds.task_keys import TASK_KEYS
from trainer.config.target import ENV_NAME, LAUNCHER_NAMES
from trainer.console import shown
from trainer.errors import ConfigError

MOST_GPUS = 99
THE_HOST = "the host that --ssh names is taken as it is"
NO_CONTAINER = (
    "no container is started: the job's Python is found on the host or built, setup installs what else it needs"
)
FOLDER = "the folder you are in is sent, and the job runs in its copy"
ONE_HOST = "a job runs on one host"


@dataclass
class Written:
    """A task file under construction."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values by the key of a task."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """Notes on the other tool's file: a key, and why it is missing here, or how it was converted."""

    def note(self, key: str, why: str) -> None:
        self.notes.append((key, why))

    def notes_of(self, given: Mapping[str, object], reasons: Mapping[str, str], prefix: str = "") -> None:
        """Adds a note for each key that has a value: its reason, or that it is not known."""
        for name, value in given.items():
            if value not in (None, "", False, "false", [], {}):
                self.note(f"{prefix}{name}", reasons.get(name, "not known here"))

    def name(self, text: str) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100]
        if name:
            self.values["name"] = name
        if name != text:
            self.note("name", f"{text!r} is no name of a job" + (f", so it is {name}" if name else ""))

    def gpus(self, key: str, count: int) -> None:
        if count > MOST_GPUS:
            raise ConfigError(f"{key} asks for {count} GPUs: {ONE_HOST}")
        if count:
            self.values["gpus"] = f"auto:{count}"

    def variable(self, key: str, name: str, value: str | None) -> None:
        """A variable of the job. Without a value it is a secret, which is taken from the shell."""
        if not ENV_NAME.fullmatch(name):
            self.note(f"{key}.{name}", "not a name of an environment variable")
        elif name in LAUNCHER_NAMES or name.startswith("TORCHFERRY_"):
            self.note(f"{key}.{name}", LAUNCHER_NAMES.get(name, "it is the launcher's own"))
        elif value is None:
            self.secret(name)
        else:
            self.values.setdefault("env", {})[name] = value

    def secret(self, name: str) -> None:
        names = self.values.setdefault("secrets", [])
        if name not in names and name not in self.values.get("env", {}):
            names.append(name)

    def program(self, text: str, *, stops_at_failures: bool = False, shell: str = "bash") -> None:
        text = text.strip("\n")
        if is_shell(text.strip()):
            text = (f"#!/bin/{shell}\n" if shell != "sh" else "") + ("set -e\n" if stops_at_failures else "") + text
        self.values["run"] = text

    def set_variables(self, known: Mapping[str, str], prefix: str, hints: Mapping[str, str]) -> None:
        """Sets the other tool's own variables that the texts use, if they have a fixed value on one host."""
        texts = "\n".join(str(self.values.get(key, "")) for key in ("setup", "run"))
        for name in sorted(set(re.findall(rf"\b{prefix}_[A-Z_]+\b", texts))):
            if name in known and name not in self.values.get("env", {}):
                self.values.setdefault("env", {})[name] = known[name]
                why = f"nobody sets it here, so env does, to {known[name]}, which holds on one host"
                self.note(f"${name}", f"{why}; with torchrun: true there are WORLD_SIZE and RANK")
            elif name not in self.values.get("env", {}):
                self.note(f"${name}", hints.get(name, "nobody sets it here"))

    def local_file(self, key: str, path: str, there: str, exists: Callable[[str], bool]) -> None:
        """A local file or folder that the other tool copies to `there`."""
        plain = os.path.normpath(path)
        if plain == ".":
            self.note(key, FOLDER)
        elif plain.startswith(("/", "~", "..")) or not exists(plain):
            self.note(key, f"{path} is not below the project: a link to it here, and include, send it")
        else:
            self.values.setdefault("include", []).append(plain)
            self.note(key, f"{plain} travels, and stands at {plain} in the job's folder, not at {there}")


def plain(value: object) -> Any:
    """A value of a YAML file as texts, lists and mappings; None for null."""
    if isinstance(value, Word):
        return None if value.text in NULL_WORDS else value.text
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def text_at(key: str, value: object) -> str:
    """The value as text. Raises ConfigError for a list or a mapping."""
    if isinstance(value, list | dict):
        raise ConfigError(f"{key} is a {'list' if isinstance(value, list) else 'mapping'}, expected text")
    return str(value)


def mapping_at(key: str, value: object) -> dict[str, Any]:
    """The value as a mapping; null becomes an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {shown(repr(value))[:60]}, expected a mapping")
    return value


def list_at(key: str, value: object) -> list[Any]:
    """The value as a list; a single value becomes a list of one."""
    if value is None:
        return []
    if isinstance(value, dict):
        raise ConfigError(f"{key} is a mapping, expected a list")
    return value if isinstance(value, list) else [value]


# --- as text ----------------------------------------------------------------------------------------------------------


def render(task: Written, head: str) -> str:
    """The text of the task file. Keys that could not be translated become comments."""
    lines = [f"# {shown(head)}"]
    for row in TASK_KEYS:
        if row.name in task.values:
            lines.append(_entry(row.name, task.values[row.name]))
    if task.notes:
        lines += ["", "# Not here, or not as it was:", *(f"#   {line}" for line in note_lines(task))]
    return "\n".join(lines) + "\n"


def note_lines(task: Written) -> Iterator[str]:
    return (f"{shown(key)}: {shown(why)}" for key, why in task.notes)


def _entry(name: str, value: object) -> str:
    import yaml

    if isinstance(value, str) and "\n" in value:
        block = f"{name}: |-\n" + "\n".join(f"  {line}" if line else "" for line in value.split("\n"))
        try:
            if yaml.safe_load(block) == {name: value}:
                return block
        except yaml.YAMLError:  # a text that cannot be a literal block
            pass
    return dump_yaml({name: value}).rstrip("\n")
