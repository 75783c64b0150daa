"""A job's config.yaml, which its own trainer reads: an older or a newer version than this client, or somebody's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import fit
from trainer.config.files import parse_yaml, read_override
from trainer.config.keys import DROPPED, Places, field_kinds, get_key, known_keys, limits
from trainer.config.load import AT_COMMAND, COMMAND_LINE, NO_CHANGES, ConfigError, Draft, config_to_dict, key_of
from trainer.config.rules import broken_rules
from trainer.schema import Config


@dataclass(frozen=True)
class Kept:
    """A config.yaml whose own reader may be of another version; `read_kept` gives it."""

    config: Config
    """What it says of this schema's keys."""
    strange: Mapping[str, object]
    """What it says of other keys, by dotted key."""
    places: Places

    @property
    def keys(self) -> frozenset[str]:
        """Dotted keys of the file."""
        return frozenset(key for key in (*known_keys(), *self.strange) if key in self.places.by_key)

    def changed(
        self,
        overrides: Sequence[str] = (),
        *,
        changes: Mapping[str, Any] = NO_CHANGES,
        tell: Callable[[str], None] = lambda note: None,
    ) -> Changed:
        """What it comes to with `a.b=c` overrides, and then `changes` for `with_changes`. ConfigError for a mistake
        in these. What breaks a rule without them is let be, but for `target`: the file's own reader has taken it."""
        own = [override for override in overrides if key_of(override) in self.strange]
        draft = Draft(self.config, self.places)
        draft.override([override for override in overrides if override not in own])
        draft.change(changes)
        standing = [broken for broken in broken_rules(self.config) if not broken.key.startswith("target.")]
        config = draft.finish(tell=tell, standing=standing)
        given = {key for key, place in draft.places.by_key.items() if place == COMMAND_LINE}
        other = [key for key in known_keys() if key in given or get_key(config, key) != get_key(self.config, key)]
        values = {key: _plain(config, key) for key in other}
        return Changed(config, {**values, **{key_of(text): _strange_value(text, self.strange) for text in own}})


@dataclass(frozen=True)
class Changed:
    """A `Kept` with what was given over it."""

    config: Config
    values: Mapping[str, Any]
    """The keys that were given, or are another value now, with their plain values."""


def _plain(config: Config, key: str) -> Any:
    value: Any = config_to_dict(config)
    for name in key.split("."):
        value = value[name]
    return value


def read_kept(text: str, file: str, beside: Mapping[str, Mapping[str, object]] = NO_CHANGES) -> Kept:
    """A config.yaml as far as this schema has its keys, and sections of keys that are kept `beside` it.

    It may be an older or a newer version's, or that of a trainer with other keys. A key that this schema lacks, or
    has with other values, is that trainer's affair: it stands in `strange`, and is no mistake. But of `target` each
    value must be one of this schema's: the client acts by it.
    """
    tree, places = parse_yaml(text.encode(), file)
    known, strange = _own_part(tree, places)
    for section, values in beside.items():
        inner = known.get(section)
        known[section] = {**(inner if isinstance(inner, Mapping) else {}), **values}
    return Kept(Draft.of_tree(known, places).typed(), strange, places)


def _own_part(tree: Mapping[str, object], places: Places) -> tuple[dict[str, object], dict[str, object]]:
    """What a tree says of the schema's keys, nested, and what else it says, by dotted key."""
    known: dict[str, Any] = {}
    strange: dict[str, object] = {}
    for name, value in tree.items():
        for leaf, leaf_value in (value if isinstance(value, Mapping) else {"": value}).items():
            key = f"{name}.{leaf}" if leaf else name
            if not _takes(key, leaf_value, places):
                strange[key] = leaf_value
            elif leaf:
                known.setdefault(name, {})[leaf] = leaf_value
            else:
                known[name] = leaf_value
    return known, strange


def _takes(key: str, value: object, places: Places) -> bool:
    """Whether this schema has the key, or a section of this name, with such a value."""
    kind = known_keys().get(key, field_kinds(Config).get(key))
    if kind is None:
        return False
    try:
        fitted = fit(value, kind, key, places=places)
    except ConfigError:
        if key.startswith("target."):
            raise
        return False
    return key.startswith("target.") or key not in limits() or not limits()[key].broken_by(fitted)


def _strange_value(override: str, strange: Mapping[str, object]) -> object:
    """The plain value that an override gives a key of another schema: as YAML reads it, a list where one stands."""
    import yaml

    key, text = key_of(override), override.partition("=")[2].strip()
    if key in DROPPED:
        value: object = fit(read_override(text, DROPPED[key].kind, key), DROPPED[key].kind, key, places=AT_COMMAND)
        return value
    if isinstance(strange[key], list) and not text.startswith("["):
        text = f"[{text}]"
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key} is {text}, which is no YAML", where=COMMAND_LINE, hint="put it in quotes") from None
