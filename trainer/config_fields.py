"""The fields of the schema by dotted name, and how one value becomes a field: strict types, errors that name the place.

Values come from three sources. Python values (a `.py` config, a decoded dump) must have the field's type already.
Unquoted words (YAML, the command line) are `Word`: the field's type decides what they say, so `1e-4` is a number for
`optim.learning_rate` and text for `run.name`, whatever YAML 1.1 would have made of it.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.schema import Config

T = TypeVar("T")

COMMAND_LINE = "on the command line"
NULL_WORDS = frozenset(("", "~", "null", "Null", "NULL"))
BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INT_WORD = re.compile(r"[-+]?[0-9](_?[0-9]){0,17}")
FLOAT_WORD = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")

# What people write who come from transformers, TRL or torchrun.
ALIASES = {
    "lr": "optim.learning_rate",
    "clip_grad_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "max_steps": "train.steps",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "dtype": "train.precision",
    "logging_steps": "train.log_every",
    "eval_steps": "train.eval_every",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "max_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "dataset": "data.train",
    "gpus": "target.gpu_ranks",
    "devices": "target.gpu_ranks",
    "nproc_per_node": "target.gpu_ranks",
    "backend": "target.train_backend",
    "host": "target.ssh",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "output_dir": "run.dir",
}


class ConfigError(Exception):
    """The config is wrong and nothing was started: `message`, `where` it stands, and a `hint`."""

    exit_code = 2

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def render(self) -> str:
        """Up to three lines: what is wrong with which value, where, and what to do."""
        lines = [f"Error: {self.message}"]
        if self.where:
            lines.append(f"  {self.where}" if self.where == COMMAND_LINE else f"  in {self.where}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Word:
    """An unquoted scalar as it was written."""

    text: str


@dataclass(frozen=True)
class Places:
    """Where each key was given: `file:line` by dotted key, and the file for keys whose line is not known."""

    source: str = ""
    by_key: Mapping[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """The place of a key, of an element such as `data.train[1]`, or of what it belongs to."""
        while key:
            if key in self.by_key:
                return self.by_key[key]
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.source


class Misfit(ValueError):
    """A value does not have the wanted type."""


# --- names ------------------------------------------------------------------------------------------------------------


def is_section(kind: Any) -> bool:
    """Whether a field's type is a schema class with keys of its own."""
    return is_dataclass(kind)


@cache
def field_kinds(cls: Any) -> dict[str, Any]:
    """Type of every field of a schema class, in order."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def known_keys() -> dict[str, Any]:
    """Type of every key by its dotted name; sections themselves are not keys."""
    keys: dict[str, Any] = {}
    for name, kind in field_kinds(Config).items():
        if is_section(kind):
            keys.update({f"{name}.{leaf}": leaf_kind for leaf, leaf_kind in field_kinds(kind).items()})
        else:
            keys[name] = kind
    return keys


@cache
def section_of_class() -> dict[str, str]:
    """Prefix of the dotted names by the name of the class: `{"Config": "", "TargetConfig": "target.", …}`."""
    sections = {kind.__name__: f"{name}." for name, kind in field_kinds(Config).items() if is_section(kind)}
    return {"Config": "", **sections}


def nearest_keys(key: str, *, sections: bool = False) -> list[str]:
    """Up to three known keys that the writer may have meant, best first; with `sections` also names of sections."""
    from difflib import SequenceMatcher  # not needed by a config without mistakes

    section, _, leaf = key.rpartition(".")
    if leaf in ALIASES:
        return [ALIASES[leaf]]
    names = [*known_keys(), *(_section_names() if sections else ())]

    def score(name: str) -> float:
        own_section, _, own_leaf = name.rpartition(".")
        ratio = SequenceMatcher(None, leaf.lower(), own_leaf).ratio()
        return ratio + (0.1 if section == own_section else 0) if ratio >= 0.6 else 0

    scores = sorted(((score(name), name) for name in names), key=lambda pair: -pair[0])
    return [name for value, name in scores if value and value >= scores[0][0] - 0.08][:3]


def unknown_key(key: str, places: Places) -> ConfigError:
    """The error for a key that the schema lacks, with the nearest names."""
    where = places.of(key)
    if key in known_keys():
        section, _, leaf = key.partition(".")
        return ConfigError(f"{key} is not a key here", where=where, hint=f"nest it: {section}: {{{leaf}: …}}")
    near = nearest_keys(key, sections=where != COMMAND_LINE and "." not in key)
    if near:
        return ConfigError(f"{key} is not a key", where=where, hint=f"did you mean {' or '.join(near)}?")
    return ConfigError(f"{key} is not a key", where=where, hint=list_keys(key.partition(".")[0]))


def list_keys(section: str) -> str:
    """The keys of a section, or the sections if there is none of this name, as a hint."""
    leaves = [name.partition(".")[2] for name in known_keys() if name.startswith(f"{section}.")]
    return f"keys of {section}: {', '.join(leaves)}" if leaves else f"sections: {', '.join(_section_names())}"


def _section_names() -> list[str]:
    return [prefix[:-1] for prefix in section_of_class().values() if prefix]


# --- values -----------------------------------------------------------------------------------------------------------


def build_config(tree: Mapping[str, object], places: Places) -> Config:
    """A Config from nested values; keys left out keep their defaults. Raises ConfigError for the first wrong one."""
    return _build(Config, tree, "", places=places)


def _build(cls: Callable[..., T], tree: Mapping[str, object], prefix: str, *, places: Places) -> T:
    kinds = field_kinds(cls)
    for name in tree:
        if name not in kinds:
            raise unknown_key(f"{prefix}{name}", places)
    return cls(**{name: fit(value, kinds[name], f"{prefix}{name}", places=places) for name, value in tree.items()})


def fit(value: object, kind: Any, key: str, *, places: Places) -> Any:
    """The value as the field's type has it (int -> float, tuple -> list), or a ConfigError that names the key."""
    if is_section(kind):
        return _build(kind, _section_tree(value, kind, key, places), f"{key}.", places=places)
    origin = get_origin(kind)
    if origin is list and isinstance(value, (list, tuple, range)):
        (item,) = get_args(kind)
        return [fit(v, item, f"{key}[{i}]", places=places) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(k): fit(v, get_args(kind)[1], f"{key}.{k}", places=places) for k, v in value.items()}
    try:
        return fit_scalar(value, kind)
    except Misfit as misfit:
        message = f"{key} is {show(value)}, expected {describe(kind)}{misfit}"
        raise ConfigError(message, where=places.of(key), hint=_misfit_hint(value, kind)) from None


def _section_tree(value: object, kind: Any, key: str, places: Places) -> Mapping[str, object]:
    if isinstance(value, kind):
        return {name: getattr(value, name) for name in field_kinds(kind)}
    if isinstance(value, Word) and value.text in NULL_WORDS:
        return {}  # a section whose lines are all commented out
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    message = f"{key} is {show(value)}, expected a {kind.__name__} (a section with keys of its own)"
    raise ConfigError(message, where=places.of(key))


def fit_scalar(value: object, kind: Any) -> Any:
    """The value as this scalar type, or Misfit. Of a union the most specific type that fits wins, text last."""
    if get_origin(kind) is Literal:
        text = value.text if isinstance(value, Word) else value
        if isinstance(text, str) and text in get_args(kind):
            return text
        raise Misfit
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if get_origin(kind) in (Union, types.UnionType):
        return _fit_union(value, set(get_args(kind)))
    raise Misfit


def _fit_union(value: object, members: set[Any]) -> Any:
    if int in members and str in members and isinstance(value, str) and INT_WORD.fullmatch(value):
        return int(value)  # a GPU index in quotes is the same GPU
    for member in (m for m in _SCALARS if m in members):
        try:
            return _SCALARS[member](value)
        except Misfit:
            continue
    raise Misfit


def _as_none(value: object) -> None:
    if value is not None and not (isinstance(value, Word) and value.text in NULL_WORDS):
        raise Misfit


def _as_bool(value: object) -> bool:
    if isinstance(value, Word) and value.text.lower() in BOOL_WORDS:
        return BOOL_WORDS[value.text.lower()]
    if isinstance(value, bool):
        return value
    raise Misfit


def _as_int(value: object) -> int:
    if isinstance(value, Word) and INT_WORD.fullmatch(value.text):
        return int(value.text)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    raise Misfit


def _as_float(value: object) -> float:
    if isinstance(value, Word) and FLOAT_WORD.fullmatch(value.text):
        number = float(value.text.replace("_", ""))
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        number = float(value)
    else:
        raise Misfit
    if not math.isfinite(number):
        raise Misfit
    return number


def _as_text(value: object) -> str:
    if isinstance(value, Word) and value.text not in NULL_WORDS:
        text = value.text
    elif isinstance(value, (str, os.PathLike)):
        text = str(os.fspath(value))
    else:
        raise Misfit
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise Misfit(" without NUL and of valid UTF-8")
    return text


# In the order in which a union tries them: text takes every word, so it comes last.
_SCALARS: dict[Any, Callable[[object], Any]] = {
    type(None): _as_none,
    bool: _as_bool,
    int: _as_int,
    float: _as_float,
    str: _as_text,
}


# --- words for errors -------------------------------------------------------------------------------------------------

_SCALAR_WORDS = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def describe(kind: Any) -> str:
    """What a field takes, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is list:
        return f"a list, each {describe(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "a mapping of names to text"
    members = get_args(kind) or (kind,)
    return " or ".join(_SCALAR_WORDS[m] for m in sorted(members, key=lambda m: m is type(None)))


def show(value: object) -> str:
    """A value for an error message, at most 80 characters."""
    if isinstance(value, Word):
        text = value.text or "empty"
    elif isinstance(value, Mapping):
        text = "a mapping"
    elif value is None:
        text = "null"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(show(v) for v in value)}]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _misfit_hint(value: object, kind: Any) -> str:
    text = value.text if isinstance(value, Word) else value
    if get_origin(kind) is Literal and isinstance(text, str):
        from difflib import get_close_matches

        near = get_close_matches(text.lower(), get_args(kind), n=1)
        return f"did you mean {near[0]}?" if near else ""
    if get_origin(kind) is list and isinstance(value, (Word, str, int)):
        return f"write it as a list: [{show(value)}]"
    if kind is str and isinstance(value, Word):
        return f'put it in quotes if you mean the text: "{value.text}"'
    return ""


def scalar_texts(config: Config) -> Iterator[tuple[str, str]]:
    """Every text of a config with its dotted key (elements as `data.train[1]`, variables as `target.env.NAME`)."""
    for key in known_keys():
        value = get_key(config, key)
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}[{i}]", v) for i, v in enumerate(value) if isinstance(v, str))


def get_key(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
