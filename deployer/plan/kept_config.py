"""A job's config.yaml. The job's own trainer reads it: an older or a newer version than this client, or another
program."""

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
    """A config.yaml whose trainer may have another version; see `read_kept`."""

    config: Config
    """The values of this schema's keys."""
    strange: Mapping[str, object]
    """Dotted key -> value, of other keys."""
    places: Places

    @property
    def keys(self) -> frozenset[str]:
        """The dotted keys in the file."""
        return frozenset(key for key in (*known_keys(), *self.strange) if key in self.places.by_key)

    def changed(
        self,
        overrides: Sequence[str] = (),
        *,
        changes: Mapping[str, Any] = NO_CHANGES,
        tell: Callable[[str], None] = lambda note: None,
    ) -> Changed:
        """The config with `a.b=c` overrides and then `changes` (see `with_changes`). Raises ConfigError for a mistake
        in these. A value of the file itself that breaks a rule is accepted, except in `target`: the file's own trainer
        has accepted it."""
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
    """A `Kept` with changes."""

    config: Config
    values: Mapping[str, Any]
    """Key -> plain value, of the keys that were given or have another value now."""


def _plain(config: Config, key: str) -> Any:
    value: Any = config_to_dict(config)
    for name in key.split("."):
        value = value[name]
    return value


def read_kept(text: str, file: str, beside: Mapping[str, Mapping[str, object]] = NO_CHANGES) -> Kept:
    """Reads a config.yaml as far as this schema has its keys, with sections of keys that are stored `beside` it.

    The file may be of an older or newer version, or of a trainer with other keys. A key that this schema does not have,
    or has with other values, goes to `strange`; it is no mistake, because that trainer checks it. But the values of
    `target` must fit this schema: the client uses them.
    """
    tree, places = parse_yaml(text.encode(), file)
    known, strange = _own_part(tree, places)
    for section, values in beside.items():
        inner = known.get(section)
        known[section] = {**(inner if isinstance(inner, Mapping) else {}), **values}
    return Kept(Draft.of_tree(known, places).typed(), strange, places)


def _own_part(tree: Mapping[str, object], places: Places) -> tuple[dict[str, object], dict[str, object]]:
    """The values of this schema's keys, nested, and the values of other keys, by dotted key."""
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
    """Whether this schema has the key, or a section of this name, and accepts the value."""
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
    """The plain value of an override of another schema's key, as YAML reads it; a list if the file has a list there."""
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
