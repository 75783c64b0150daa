"""Keys that were removed from the schema, and the answer to a config that still sets them.

Each config.yaml of an earlier version holds every key of its schema. So the former default is accepted silently, and
any other value gets an answer. The table is `DROPPED` in `trainer.config.keys`: to drop a key, add a line there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NoEffect:
    """The run goes on after one line, `KEY: no effect{why}`."""

    why: str
    needs: Needs | None = None


@dataclass(frozen=True)
class Needs:
    """For this, another key must have `value`. Otherwise an error, `KEY is VALUE, {what}, but {key} is …`."""

    key: str
    value: object
    what: str
    hint: str


@dataclass(frozen=True)
class Becomes:
    """A value of another key has the same meaning: that key gets it, and one line reports it."""

    key: str
    value: object

    @property
    def setting(self) -> str:
        return f"{self.key}={text_of(self.value)}"


@dataclass(frozen=True)
class Refused:
    """An error, `KEY is VALUE: {why}`."""

    why: str
    hint: str


Answer = NoEffect | Becomes | Refused


@dataclass(frozen=True)
class Dropped:
    """A former key: its type, its default, and an answer to each of its other values."""

    kind: Any
    default: object
    answers: Mapping[object, Answer] = field(default_factory=dict)
    otherwise: Answer = Refused("nothing does that any more", "drop it")
    """For values that are not in `answers`."""

    def answer(self, value: object) -> Answer | None:
        """The answer to a value of the right type; None for the former default."""
        if value == self.default:
            return None
        return next((answer for known, answer in self.answers.items() if known == value), self.otherwise)

    def render(self) -> str:
        """The effect of each value, in words; values with the same answer are listed together."""
        parts = [] if self.default is None else [f"{text_of(self.default)}: always so"]
        for answer in dict.fromkeys(self.answers.values()):
            values = ", ".join(text_of(value) for value, own in self.answers.items() if own == answer)
            parts.append(f"{values}: {_words(answer)}")
        return "; ".join(parts)


def take_out(tree: Mapping[str, object], keys: Collection[str]) -> tuple[dict[str, object], dict[str, object]]:
    """The nested values of a config without these dotted keys, and the values that it sets for those keys."""
    kept: dict[str, object] = dict(tree)
    taken: dict[str, object] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        inner = kept.get(section) if section else kept
        if isinstance(inner, Mapping) and name in inner:
            taken[key] = inner[name]
            left = {other: value for other, value in inner.items() if other != name}
            kept = {**kept, section: left} if section else left
    return kept, taken


def text_of(value: object) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _words(answer: Answer) -> str:
    if isinstance(answer, Becomes):
        return f"{answer.setting} instead"
    if isinstance(answer, Refused):
        return f"refused, {answer.why}"
    needs = f"needs {answer.needs.key}={text_of(answer.needs.value)}, " if answer.needs else ""
    return f"{needs}no effect{answer.why}"
