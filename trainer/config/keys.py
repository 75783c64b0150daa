"""The schema's keys by dotted name, former keys too; the places where a config sets them; the error for a wrong key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_type_hints

from trainer.config.dropped import Becomes, Dropped
from trainer.config.fsdp1 import DROPPED_WORDS
from trainer.errors import COMMAND_LINE, ConfigError
from trainer.schema import Config
from trainer.schema.key import Facts, Limit, facts_of

DROPPED: dict[str, Dropped] = {
    "train.nonfinite": Dropped(Literal["skip", "abort"], "skip", {"abort": Becomes("train.max_nonfinite_steps", 1)}),
    **DROPPED_WORDS,
}
"""Keys that were removed from the schema."""


@dataclass(frozen=True)
class Places:
    """Where each key was set: `file:line` by dotted key, and the file for keys without a known line."""

    source: str = ""
    by_key: Mapping[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """The place of a key, of an element such as `data.train[1]`, or of the section or list that contains it."""
        while key:
            if key in self.by_key:
                return self.by_key[key]
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.source


def is_section(kind: Any) -> bool:
    """Whether a field's type is a schema class, which has keys."""
    return is_dataclass(kind)


@cache
def field_kinds(cls: Any) -> dict[str, Any]:
    """The type of every field of a schema class, in order."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def known_keys() -> dict[str, Any]:
    """The type of every key by its dotted name; sections themselves are not keys."""
    keys: dict[str, Any] = {}
    for name, kind in field_kinds(Config).items():
        if is_section(kind):
            keys.update({f"{name}.{leaf}": leaf_kind for leaf, leaf_kind in field_kinds(kind).items()})
        else:
            keys[name] = kind
    return keys


@cache
def known_facts() -> dict[str, Facts]:
    """The facts that the schema states beside each key's field, by dotted name."""
    prefixed = [(f"{name}.", kind) for name, kind in field_kinds(Config).items() if is_section(kind)]
    return {
        f"{prefix}{leaf.name}": facts_of(leaf) for prefix, kind in [("", Config), *prefixed] for leaf in fields(kind)
    }


@cache
def limits() -> dict[str, Limit]:
    """Limits of the keys that have one."""
    return {key: facts.limit for key, facts in known_facts().items() if facts.limit is not None}


@cache
def aliases() -> dict[str, str]:
    """Our key for each name that another tool uses for it."""
    return {alias: key for key, facts in known_facts().items() for alias in facts.aliases}


@cache
def section_of_class() -> dict[str, str]:
    """The prefix of dotted names by class name: `{"Config": "", "TargetConfig": "target.", …}`."""
    sections = {kind.__name__: f"{name}." for name, kind in field_kinds(Config).items() if is_section(kind)}
    return {"Config": "", **sections}


def nearest_keys(key: str, *, sections: bool = False) -> list[str]:
    """Up to three known keys with similar names, best first; with `sections` also names of sections."""
    from difflib import SequenceMatcher  # unnecessary for a config without mistakes

    section, _, leaf = key.rpartition(".")
    if leaf in aliases():
        return [aliases()[leaf]]
    names = [*known_keys(), *(_section_names() if sections else ())]

    def score(name: str) -> float:
        own_section, _, own_leaf = name.rpartition(".")
        ratio = SequenceMatcher(None, leaf.lower(), own_leaf).ratio()
        return ratio + (0.1 if section == own_section else 0) if ratio >= 0.6 else 0

    scores = sorted(((score(name), name) for name in names), key=lambda pair: -pair[0])
    return [name for value, name in scores if value and value >= scores[0][0] - 0.08][:3]


def unknown_key(key: str, places: Places, *, siblings: Sequence[str] = ()) -> ConfigError:
    """The error for an unknown key, with the most similar names; `siblings`: the keys of an entry of a list."""
    where = places.of(key)
    if siblings:
        return ConfigError(f"{key} is not a key", where=where, hint=f"keys here: {', '.join(siblings)}")
    for name, dropped in DROPPED.items():
        if key in (name, name.rpartition(".")[2]):
            return ConfigError(f"{key} is no key any more", where=where, hint=f"drop it; {dropped.render()}")
    if key in known_keys():
        section, _, leaf = key.partition(".")
        return ConfigError(f"{key} is not a key here", where=where, hint=f"nest it: {section}: {{{leaf}: …}}")
    near = nearest_keys(key, sections=where != COMMAND_LINE and "." not in key)
    if near:
        return ConfigError(f"{key} is not a key", where=where, hint=f"did you mean {' or '.join(near)}?")
    return ConfigError(f"{key} is not a key", where=where, hint=list_keys(key.partition(".")[0]))


def list_keys(section: str) -> str:
    """A hint that lists the keys of a section, or all sections if no section has this name."""
    leaves = [name.partition(".")[2] for name in known_keys() if name.startswith(f"{section}.")]
    return f"keys of {section}: {', '.join(leaves)}" if leaves else f"sections: {', '.join(_section_names())}"


def _section_names() -> list[str]:
    return [prefix[:-1] for prefix in section_of_class().values() if prefix]


def scalar_texts(config: Config) -> Iterator[tuple[str, str]]:
    """Every text of a config with its dotted key (elements as `data.train[1]`, variables as `target.env.NAME`)."""
    for key in known_keys():
        value = get_key(config, key)
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}[{i}]", v) for i, v in enumerate(value) if isinstance(v, str))
            yield from ((f"{key}[{i}].path", v.path) for i, v in enumerate(value) if hasattr(v, "path"))


def get_key(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@dataclass(frozen=True)
class Broken:
    """A broken rule: the key to look at first, the problem, the solution, and the other keys involved."""

    key: str
    message: str
    hint: str = ""
    others: tuple[str, ...] = ()

    def place(self, places: Places) -> str:
        """The place of the first key; the command line if any of the keys was set there, since it comes last."""
        found = [places.of(key) for key in (self.key, *self.others)]
        return COMMAND_LINE if COMMAND_LINE in found else found[0]
