"""Load a config (`.py` or YAML, then `a.b=c` overrides) into the schema, check it, and write it out again.

Every Config that this module returns has the right types and keeps the rules; everything else is a ConfigError that
names the key, the value, the place and the way out. Imports neither torch nor (before a YAML text is met) yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

from trainer.config.accelerate import Accelerate, check_processes, read_fsdp_config
from trainer.config.fields import NULL_WORDS, Word, build_config, fit
from trainer.config.files import YAML_SUFFIXES, parse_yaml, read_python, read_yaml, read_yaml_text
from trainer.config.keys import (
    Places,
    field_kinds,
    get_key,
    is_section,
    known_keys,
    list_keys,
    unknown_key,
)
from trainer.config.rules import LOCAL_SUFFIXES, check_config, config_notes
from trainer.config.target import num_processes
from trainer.errors import COMMAND_LINE, ConfigError
from trainer.schema import Config, as_sources, with_changes, with_key

__all__ = [
    "ConfigError",
    "check_config",
    "config_from_dict",
    "config_notes",
    "config_from_yaml",
    "config_to_dict",
    "config_to_yaml",
    "load_config",
    "local_data_paths",
    "num_processes",
]

LOCAL_STARTS = ("./", "../", "/", "~")
STEPS, EPOCHS = "train.steps", "train.epochs"
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    fsdp_config: str | Path | None = None,
    changes: Mapping[str, Any] = NO_CHANGES,
) -> Config:
    """The checked Config of a `.py` or YAML file with `a.b=c` overrides applied in order; the last one of a key wins.

    `fsdp_config`: a file as `accelerate config` writes it; what it says goes before the config and after the overrides.
    `changes`: what further options of the command line say, for `with_changes`; they come last.
    Whoever gives only one of train.steps and train.epochs, in YAML or on the command line, thereby drops the other.
    Raises ConfigError.
    """
    path = Path(path)
    if path.suffix in YAML_SUFFIXES:
        tree, places = read_yaml(path)
        config = _config_from_tree(tree, places)
    else:
        written, places = read_python(path)
        config = build_config({name: getattr(written, name) for name in field_kinds(Config)}, places)
    accelerate = read_fsdp_config(fsdp_config) if fsdp_config is not None else Accelerate()
    config, places = _apply_settings(config, accelerate, places=places)
    config, places = _apply_overrides(config, overrides, places=places)
    config, places = _apply_changes(config, changes, places=places)
    check_config(config, places=places)
    check_processes(accelerate, num_processes(config))
    return config


def config_from_yaml(text: str, file: str, overrides: Sequence[str] = ()) -> Config:
    """The checked Config of a YAML text with overrides, as `load_config` gives it; `file` names the text in errors."""
    tree, places = parse_yaml(text.encode(), file)
    config, places = _apply_overrides(_config_from_tree(tree, places), overrides, places=places)
    check_config(config, places=places)
    return config


def config_from_dict(values: Mapping[str, object], where: str = "") -> Config:
    """The checked Config of nested plain values, as `config_to_dict` gives them; `where` names them in errors."""
    places = Places(where)
    config = _config_from_tree(values, places)
    check_config(config, places=places)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """All fields as nested plain values, in the schema's order."""
    return asdict(config)


def config_to_yaml(config: Config) -> str:
    """All fields as YAML in the schema's order: a section's keys one a line, lists on one line. Loads back equal."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def flow_list(dumper: yaml.SafeDumper, values: list[object]) -> yaml.Node:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)

    def text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        # Quoted singly, PyYAML writes U+0085 as a line break, which reads back as a blank.
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    Dumper.add_representer(list, flow_list)
    Dumper.add_representer(str, text_node)
    text: str = yaml.dump(config_to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def local_data_paths(config: Config, *, root: str | Path = ".") -> list[str]:
    """Data, model and template entries that are local paths, as written: they exist below `root` or look like paths."""
    data, model = config.data, config.model
    entries = [*(s.path for s in as_sources([*data.train, *data.eval])), model.name, config.lora.adapter]
    entries += [data.tokenizer, data.chat_template]
    return list(dict.fromkeys(entry for entry in entries if entry is not None and _is_local(entry, Path(root))))


def _is_local(entry: str, root: Path) -> bool:
    if entry == "auto" or entry.startswith("builtin:") or "://" in entry:
        return False
    return entry.startswith(LOCAL_STARTS) or entry.endswith(LOCAL_SUFFIXES) or (root / entry).exists()


def _config_from_tree(tree: Mapping[str, object], places: Places) -> Config:
    config = build_config(tree, places)
    section = tree.get("train")
    given = {f"train.{name}" for name in section} if isinstance(section, Mapping) else set()
    return _one_length(config, given)


def _one_length(config: Config, given: set[str]) -> Config:
    """Of steps and epochs, drop the one that this source leaves out when it gives the other."""
    for own, other in ((STEPS, EPOCHS), (EPOCHS, STEPS)):
        if own in given and other not in given and get_key(config, own) is not None:
            config = with_key(config, other, None)
    return config


# --- overrides --------------------------------------------------------------------------------------------------------


def _apply_settings(config: Config, accelerate: Accelerate, *, places: Places) -> tuple[Config, Places]:
    """The config with what another file says, each value in its field's type."""
    own = {setting.key: setting.place for setting in accelerate.settings}
    for setting in accelerate.settings:
        value = fit(setting.value, known_keys()[setting.key], setting.key, places=Places("", own))
        config = with_key(config, setting.key, value)
    return config, Places(places.source, {**places.by_key, **own})


def _apply_overrides(config: Config, overrides: Sequence[str], *, places: Places) -> tuple[Config, Places]:
    given = set()
    for override in overrides:
        key, value = _parse_override(override)
        config = with_key(config, key, value)
        given.add(key)
    config = _one_length(config, given)
    return config, Places(places.source, {**places.by_key, **dict.fromkeys(given, COMMAND_LINE)})


def _apply_changes(config: Config, changes: Mapping[str, Any], *, places: Places) -> tuple[Config, Places]:
    changed, names = with_changes(config, changes), len(config.target.secrets)
    added = [f"target.secrets[{i}]" for i in range(names, len(changed.target.secrets))]
    own = dict.fromkeys([*added, *(key for key in changes if key != "target.secrets")], COMMAND_LINE)
    return changed, Places(places.source, {**places.by_key, **own})


def _parse_override(override: str) -> tuple[str, object]:
    """The dotted key of `a.b=c` and its value in the field's type."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not an override", where=COMMAND_LINE, hint="write KEY=VALUE: train.steps=50"
        )
    kind, places = _override_kind(key), Places(COMMAND_LINE)
    return key, fit(_read_override(text.strip(), kind, key), kind, key, places=places)


def _override_kind(key: str) -> Any:
    kinds = known_keys()
    if key in kinds:
        return kinds[key]
    parent, _, name = key.rpartition(".")
    if name and get_origin(kinds.get(parent)) is dict:
        return get_args(kinds[parent])[1]
    if is_section(field_kinds(Config).get(key)):
        raise ConfigError(f"{key} is a section, not a key", where=COMMAND_LINE, hint=list_keys(key))
    raise unknown_key(key, Places(COMMAND_LINE))


def _read_override(text: str, kind: Any, key: str) -> object:
    """What the text says before the type has its word: a Word, a quoted text, a list (also `0,1`), or a mapping."""
    if get_origin(kind) is list:
        if text.startswith(("[", '"', "'")):
            value = read_yaml_text(text, key, COMMAND_LINE)
            return [value] if isinstance(value, str) else value
        return [] if text in NULL_WORDS else [Word(part.strip()) for part in text.split(",")]
    if get_origin(kind) is dict:
        return read_yaml_text(text, key, COMMAND_LINE)
    if text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1:
        return read_yaml_text(text, key, COMMAND_LINE)
    if kind is str and not text:
        return ""
    return Word(text)
