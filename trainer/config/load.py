"""Loads a config (`.py` or YAML, then `a.b=c` overrides) into the schema, checks it, and writes it out again.

Every Config that this module returns has the right types and keeps the rules. Everything else is a ConfigError that
names the key, the value, the place and a solution. Imports no torch, and yaml only when there is a YAML text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

from trainer.config.accelerate import Accelerate, Setting, check_processes, read_fsdp_config
from trainer.config.data import is_pattern, matching
from trainer.config.dropped import Becomes, Refused, take_out, text_of
from trainer.config.fields import Wrong, build_config, fit
from trainer.config.files import YAML_SUFFIXES, dump_yaml, parse_yaml, read_override, read_python, read_yaml
from trainer.config.keys import (
    DROPPED,
    Broken,
    Places,
    field_kinds,
    get_key,
    is_section,
    known_keys,
    list_keys,
    unknown_key,
)
from trainer.config.rules import LOCAL_SUFFIXES, check_config, config_notes, rule_errors
from trainer.config.target import ANY_WORLD, World, num_processes
from trainer.errors import COMMAND_LINE, ConfigError, raise_all
from trainer.schema import Config, as_sources, with_changes, with_key

__all__ = [
    "ANY_WORLD",
    "COMMAND_LINE",
    "ConfigError",
    "Draft",
    "World",
    "check_config",
    "config_from_dict",
    "config_notes",
    "config_to_dict",
    "config_to_yaml",
    "key_of",
    "known_keys",
    "load_config",
    "load_given",
    "local_data_paths",
    "num_processes",
    "raise_all",
]

LOCAL_STARTS = ("./", "../", "/", "~")
STEPS, EPOCHS = "train.steps", "train.epochs"
AT_COMMAND = Places(COMMAND_LINE)
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    fsdp_config: str | Path | None = None,
    changes: Mapping[str, Any] = NO_CHANGES,
    tell: Callable[[str], None] = lambda note: None,
    world: World | None = None,
) -> Config:
    """The checked Config of a `.py` or YAML file, with `a.b=c` overrides applied in order; the last one for a key wins.

    `fsdp_config`: a file as `accelerate config` writes it, applied after the config and before the overrides.
    `changes`: values of further command-line options, for `with_changes`; applied last. `tell`: called with one line
    for each value that has no effect or is converted to another key. A source (YAML or the command line) that gives
    only one of train.steps and train.epochs drops the other. `world`: the ranks of the run; None: those on one node.
    Raises ConfigError.
    """
    config, _ = load_given(path, overrides, fsdp_config=fsdp_config, changes=changes, tell=tell, world=world)
    return config


def load_given(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    fsdp_config: str | Path | None = None,
    changes: Mapping[str, Any] = NO_CHANGES,
    tell: Callable[[str], None] = lambda note: None,
    text: str | None = None,
    world: World | None = None,
) -> tuple[Config, frozenset[str]]:
    """The result of `load_config`, and the dotted keys that were given: those with a known place, and those that are
    not at their default (a `.py` file may set keys in ways that its text does not show).

    `text`: the text of a YAML config that is not in a file; `path` is then its name in errors.
    """
    if text is not None:
        draft = Draft.of_tree(*parse_yaml(text.encode(), str(path)))
    elif (path := Path(path)).suffix in YAML_SUFFIXES:
        draft = Draft.of_tree(*read_yaml(path))
    else:
        written, places = read_python(path)
        wrong = Wrong()
        draft = Draft(
            build_config({name: getattr(written, name) for name in field_kinds(Config)}, places, wrong), places, wrong
        )
    accelerate = read_fsdp_config(fsdp_config) if fsdp_config is not None else Accelerate()
    draft.set_all(accelerate.settings)
    draft.override(overrides)
    draft.change(changes)
    config = draft.finish(accelerate.notes, tell=tell, world=world)
    check_processes(accelerate, num_processes(config))
    return config, frozenset(key for key in known_keys() if key in draft.places.by_key or _differs(key, config))


def _differs(key: str, config: Config) -> bool:
    return bool(get_key(config, key) != get_key(Config(), key))


def config_from_dict(
    values: Mapping[str, object],
    where: str = "",
    *,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Any] = NO_CHANGES,
    world: World | None = None,
) -> Config:
    """The checked Config of nested plain values, as from `config_to_dict`; `where` names them in errors.

    `overrides` (`a.b=c`) and `changes`, for `with_changes`: from the command line. `world`: see `load_config`.
    """
    draft = Draft.of_tree(values, Places(where))
    draft.override(overrides)
    draft.change(changes)
    return draft.finish(world=world)


def config_to_dict(config: Config) -> dict[str, Any]:
    """All fields as nested plain values, in the schema's order."""
    return asdict(config)


def config_to_yaml(config: Config, keys: Collection[str] | None = None) -> str:
    """All fields, or these dotted keys, as YAML in the schema's order: one line for each key, lists on one line. Loads
    back as an equal config."""
    return dump_yaml(_part_of(config, known_keys() if keys is None else keys))


def _part_of(config: Config, keys: Collection[str]) -> dict[str, Any]:
    """The values of these dotted keys, nested and plain."""
    part: dict[str, Any] = {}
    for name, value in config_to_dict(config).items():
        if name in known_keys():
            part |= {name: value} if name in keys else {}
        elif inner := {leaf: leaf_value for leaf, leaf_value in value.items() if f"{name}.{leaf}" in keys}:
            part[name] = inner
    return part


def local_data_paths(config: Config, *, root: str | Path = ".") -> list[str]:
    """Data, model and template entries that are local paths, as written: they exist below `root` or look like paths."""
    data, model = config.data, config.model
    entries = [*(s.path for s in as_sources([*data.train, *data.eval])), model.name, config.lora.adapter]
    entries += [data.tokenizer, data.chat_template]
    local = [entry for entry in entries if entry is not None and _is_local(entry, Path(root))]
    return list(dict.fromkeys(path for entry in local for path in matching(entry, Path(root))))


def _is_local(entry: str, root: Path) -> bool:
    if entry == "auto" or entry.startswith("builtin:") or "://" in entry:
        return False
    looks_so = entry.startswith(LOCAL_STARTS) or entry.endswith(LOCAL_SUFFIXES) or is_pattern(entry)
    return looks_so or (root / entry).exists()


# --- a config on the way ----------------------------------------------------------------------------------------------


@dataclass
class Draft:
    """The values given so far, not yet checked."""

    config: Config
    places: Places
    wrong: Wrong = field(default_factory=Wrong)
    """Values of the wrong type and unknown keys: reported together at the end."""
    dropped: dict[str, object] = field(default_factory=dict)
    """Values of former keys of the schema: their effect is decided after all values are known."""

    @classmethod
    def of_tree(cls, tree: Mapping[str, object], places: Places) -> Draft:
        kept, taken = take_out(tree, DROPPED)
        wrong = Wrong()
        draft = cls(build_config(kept, places, wrong), places, wrong)
        for key, value in taken.items():
            with draft.noting(key):
                draft.dropped[key] = fit(value, DROPPED[key].kind, key, places=places)
        train = tree.get("train")
        draft._one_length({f"train.{name}" for name in train} if isinstance(train, Mapping) else set())
        return draft

    @contextmanager
    def noting(self, key: str) -> Iterator[None]:
        """Keeps an error in the value of a key, to be reported at the end."""
        try:
            yield
        except ConfigError as error:
            self.wrong[key] = error

    def typed(self) -> Config:
        """The config so far. Raises ConfigError if a value in it is wrong."""
        raise_all(self.wrong.values())
        return self.config

    def set_all(self, settings: Sequence[Setting]) -> None:
        """Apply the settings of another file, each value in its key's type."""
        own = {setting.key: setting.place for setting in settings}
        for setting in settings:
            with self.noting(setting.key):
                self._put(setting.key, fit(setting.value, _kind_of(setting.key), setting.key, places=Places("", own)))
        self._add_places(own)

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `a.b=c` overrides in order."""
        given = set()
        for override in overrides:
            with self.noting(f"{key_of(override)} "):  # kept beside an error of a file for the same key
                key, value = _parse_override(override)
                self._put(key, value)
                given.add(key)
                self.wrong.pop(key, None)  # the last value counts
        self._one_length(given)
        self._add_places(dict.fromkeys(given, COMMAND_LINE))

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply the values of further command-line options."""
        names, self.config = len(self.config.target.secrets), with_changes(self.config, changes)
        added = [f"target.secrets[{i}]" for i in range(names, len(self.config.target.secrets))]
        given = [*added, *(key for key in changes if key != "target.secrets")]
        self._add_places(dict.fromkeys(given, COMMAND_LINE))

    def finish(
        self,
        notes: Iterable[str] = (),
        *,
        tell: Callable[[str], None] = lambda note: None,
        standing: Collection[Broken] = (),
        world: World | None = None,
    ) -> Config:
        """The checked config. Calls `tell` with each note, then with each line from `_answer`. Raises ConfigError, but
        not for rules in `standing`, which were broken before."""
        answers = []
        for key, value in self.dropped.items():
            with self.noting(key):
                answers.append(self._answer(key, value))
        wrong = {key.strip() for key in self.wrong}
        rules = rule_errors(self.config, places=self.places, standing=standing, wrong=wrong, world=world)
        raise_all([*self.wrong.values(), *rules])
        for line in (*notes, *filter(None, answers)):
            tell(line)
        return self.config

    def _answer(self, key: str, value: object) -> str | None:
        """Apply the answer to a dropped key's value. Returns the line to report, or None if there is nothing to
        report."""
        said, answer = f"{key} is {text_of(value)}", DROPPED[key].answer(value)
        if isinstance(answer, Refused):
            raise ConfigError(f"{said}: {answer.why}", where=self.places.of(key), hint=answer.hint)
        if isinstance(answer, Becomes):
            is_later, other_is_later = (self.places.of(name) == COMMAND_LINE for name in (key, answer.key))
            if other_is_later and not is_later:
                return None
            present = get_key(self.config, answer.key)
            if is_later == other_is_later and present not in (answer.value, get_key(Config(), answer.key)):
                other = f"{answer.key} is {text_of(present)}"
                broken = Broken(
                    key, f"{said}, which is {answer.setting} now, and {other}", f"drop {key}", (answer.key,)
                )
                raise ConfigError(broken.message, where=broken.place(self.places), hint=broken.hint)
            self._put(answer.key, answer.value)
            return f"{said}, which is {answer.setting} now"
        if answer is None:
            return None
        if answer.needs and get_key(self.config, answer.needs.key) != answer.needs.value:
            there = f"{answer.needs.key} is {text_of(get_key(self.config, answer.needs.key))}"
            broken = Broken(key, f"{said}, {answer.needs.what}, but {there}", answer.needs.hint, (answer.needs.key,))
            raise ConfigError(broken.message, where=broken.place(self.places), hint=broken.hint)
        return f"{key}: no effect{answer.why}"

    def _put(self, key: str, value: object) -> None:
        if key in DROPPED:
            self.dropped[key] = value
        else:
            self.config = with_key(self.config, key, value)

    def _add_places(self, places: Mapping[str, str]) -> None:
        self.places = Places(self.places.source, {**self.places.by_key, **places})

    def _one_length(self, given: set[str]) -> None:
        """Of steps and epochs, drop the one that this source does not give, if it gives the other."""
        for own, other in ((STEPS, EPOCHS), (EPOCHS, STEPS)):
            if own in given and other not in given and get_key(self.config, own) is not None:
                self.config = with_key(self.config, other, None)


# --- overrides --------------------------------------------------------------------------------------------------------


def key_of(override: str) -> str:
    """The dotted key of `a.b=c`."""
    return override.partition("=")[0].strip()


def _parse_override(override: str) -> tuple[str, object]:
    """The dotted key of `a.b=c` and its value in the field's type."""
    key, (_, equals, text) = key_of(override), override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not an override", where=COMMAND_LINE, hint="write KEY=VALUE, as in train.steps=50"
        )
    kind = _override_kind(key)
    return key, fit(read_override(text.strip(), kind, key), kind, key, places=AT_COMMAND)


def _kind_of(key: str) -> Any:
    """The type of a key, also of a dropped one."""
    return DROPPED[key].kind if key in DROPPED else known_keys()[key]


def _override_kind(key: str) -> Any:
    kinds = known_keys()
    if key in kinds or key in DROPPED:
        return _kind_of(key)
    parent, _, name = key.rpartition(".")
    if name and get_origin(kinds.get(parent)) is dict:
        return get_args(kinds[parent])[1]
    if is_section(field_kinds(Config).get(key)):
        raise ConfigError(f"{key} is a section, not a key", where=COMMAND_LINE, hint=list_keys(key))
    raise unknown_key(key, Places(COMMAND_LINE))
