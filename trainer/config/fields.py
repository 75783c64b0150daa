"""Converts a value to a field of the schema: strict types, and errors that name key, value, expectation and place.

Python values (a `.py` config, a decoded dump) must already have the field's type. Unquoted words (YAML, the command
line) are `Word`: the field's type decides their meaning. So `1e-4` is a number for `optim.learning_rate` and text for
`run.name`, whatever YAML 1.1 would have made of it.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from trainer.config.keys import Places, field_kinds, is_section, unknown_key
from trainer.errors import ConfigError, raise_all
from trainer.schema import Config

T = TypeVar("T")

NULL_WORDS = frozenset(("", "~", "null", "Null", "NULL"))
BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INT_WORD = re.compile(r"[-+]?[0-9](_?[0-9]){0,17}")
FLOAT_WORD = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Word:
    """An unquoted scalar as it was written."""

    text: str


class Misfit(ValueError):
    """A value that does not have the wanted type."""


class Wrong(dict[str, ConfigError]):
    """Collects errors by key."""


def build_config(tree: Mapping[str, object], places: Places, wrong: Wrong) -> Config:
    """A Config from nested values. Missing keys keep their defaults, and so do keys that end up in `wrong`."""
    return _build(Config, tree, "", places=places, wrong=wrong)


def _build(
    cls: Callable[..., T], tree: Mapping[str, object], prefix: str, *, places: Places, wrong: Wrong | None = None
) -> T:
    """Without `wrong`: raises ConfigError with all errors."""
    kinds, found, mistakes = field_kinds(cls), {}, Wrong()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        try:
            if name not in kinds:
                raise unknown_key(key, places, siblings=list(kinds) if "[" in prefix else ())
            found[name] = fit(value, kinds[name], key, places=places, wrong=wrong)
        except ConfigError as error:
            mistakes[key] = error
    for missing in (f.name for f in fields(cast(Any, cls)) if f.default is f.default_factory and f.name not in tree):
        told = ConfigError(f"{prefix}{missing} is missing", where=places.of(prefix.removesuffix(".")))
        mistakes[f"{prefix}{missing}"] = told
    if wrong is None:
        raise_all(mistakes.values())
    else:
        wrong.update(mistakes)
    return cls(**found)


def fit(value: object, kind: Any, key: str, *, places: Places, wrong: Wrong | None = None) -> Any:
    """The value in the field's type (int -> float, tuple -> list). Raises ConfigError, which names the key.

    `wrong`: collects the errors of a section; its other keys keep their given values.
    """
    entry = _entry_section(kind)
    if entry is not None and (isinstance(value, Mapping) or type(value) is entry):
        kind = entry
    if is_section(kind):
        return _build(kind, _section_tree(value, kind, key, places), f"{key}.", places=places, wrong=wrong)
    origin = get_origin(kind)
    if origin is list and _takes_text(get_args(kind)[0]) and isinstance(value, Word | str) and _is_one_word(value):
        value = [value]
    if origin is list and isinstance(value, (list, tuple, range)):
        (item,) = get_args(kind)
        return list(_fit_each({f"{key}[{i}]": v for i, v in enumerate(value)}, item, places).values())
    if origin is dict and isinstance(value, Mapping):
        inner = _fit_each({f"{key}.{k}": v for k, v in value.items()}, get_args(kind)[1], places)
        return dict(zip(map(str, value), inner.values(), strict=True))
    try:
        return fit_scalar(value, kind)
    except Misfit as misfit:
        message = f"{key} is {show(value)}, expected {describe(kind)}{misfit}"
        raise ConfigError(message, where=places.of(key), hint=_misfit_hint(value, kind)) from None


def _fit_each(values: Mapping[str, object], kind: Any, places: Places) -> dict[str, Any]:
    found, wrong = {}, Wrong()
    for key, value in values.items():
        try:
            found[key] = fit(value, kind, key, places=places)
        except ConfigError as error:
            wrong[key] = error
    raise_all(wrong.values())
    return found


def _entry_section(kind: Any) -> Any | None:
    """The section that may replace a text as an entry of a list, as in `str | SourceConfig`; None without one."""
    return next((member for member in get_args(kind) if is_section(member)), None) if _is_union(kind) else None


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _takes_text(kind: Any) -> bool:
    return kind is str or (_entry_section(kind) is not None and str in get_args(kind))


def _is_one_word(value: Word | str) -> bool:
    """Whether a text in place of a list can only mean its single element; `args: --lr 3` would be two."""
    text = value.text if isinstance(value, Word) else value
    return text not in NULL_WORDS and not re.search(r"[\s,]", text)


def _section_tree(value: object, kind: Any, key: str, places: Places) -> Mapping[str, object]:
    if isinstance(value, kind):
        return {name: getattr(value, name) for name in field_kinds(kind)}
    if isinstance(value, Word) and value.text in NULL_WORDS:
        return {}  # a section in which all lines are commented out
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    message = f"{key} is {show(value)}, expected a {kind.__name__} (a section with keys)"
    raise ConfigError(message, where=places.of(key))


def fit_scalar(value: object, kind: Any) -> Any:
    """The value as this scalar type; raises Misfit otherwise. In a union the most specific type that fits wins, text
    last."""
    if get_origin(kind) is Literal:
        return _as_choice(value, get_args(kind))
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if _is_union(kind):
        return _fit_union(value, set(get_args(kind)))
    raise Misfit


def _fit_union(value: object, members: set[Any]) -> Any:
    if int in members and str in members and isinstance(value, str) and INT_WORD.fullmatch(value):
        return int(value)  # a GPU index in quotes is the same GPU
    choices = [m for m in members if get_origin(m) is Literal]
    for member in [*(m for m in _SCALARS if m in members and m is not str), *choices, *(members & {str})]:
        try:
            return fit_scalar(value, member)
        except Misfit:
            continue
    raise Misfit


def _as_choice(value: object, choices: Sequence[str]) -> str:
    """The choice that matches a text. FSDP's constants (FULL_SHARD) match in any case, without leading underscore."""
    text = value.text if isinstance(value, Word) else value
    if isinstance(text, str):
        if text in choices:
            return text
        constants = {choice.strip("_"): choice for choice in choices if choice.isupper()}
        if text.upper().strip("_") in constants:
            return constants[text.upper().strip("_")]
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


# In the order in which a union tries them: text accepts every word, so it comes last.
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
    """The values that a field accepts, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is list:
        return f"a list, each {describe(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "a mapping of names to text"
    if _entry_section(kind) is not None:
        section = _entry_section(kind)
        return f"text or a mapping of {', '.join(field_kinds(section))}"
    if is_section(kind):
        return f"a mapping of {', '.join(field_kinds(kind))}"
    members = get_args(kind) or (kind,)
    return " or ".join(
        describe(m) if get_origin(m) is Literal else _SCALAR_WORDS[m]
        for m in sorted(members, key=lambda m: m is type(None))
    )


def show(value: object) -> str:
    """A value for an error message, at most 80 characters; a text in quotes."""
    if isinstance(value, Word):
        text = (value.text or "empty") if _says_no_text(value.text) else repr(value.text)
    elif isinstance(value, Mapping):
        text = "a mapping"
    elif value is None:
        text = "null"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(show(v) for v in value)}]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _says_no_text(word: str) -> bool:
    """Whether an unquoted word is null, a truth value or a number."""
    return word in NULL_WORDS or word.lower() in BOOL_WORDS or FLOAT_WORD.fullmatch(word) is not None


def _misfit_hint(value: object, kind: Any) -> str:
    text = value.text if isinstance(value, Word) else value
    choices = [c for m in (kind, *get_args(kind)) if get_origin(m) is Literal for c in get_args(m)]
    if choices and isinstance(text, str):
        if text.lower() == "gpu" and "cuda" in choices:  # the most similar spelling would be cpu
            return "did you mean cuda?"
        from difflib import get_close_matches

        near = get_close_matches(text.lower(), choices, n=1) or get_close_matches(text.upper(), choices, n=1)
        return f"did you mean {near[0]}?" if near else ""
    if get_origin(kind) is list and isinstance(text, (str, int)):
        return f"write it as a list: [{', '.join(re.split('[ ,]+', str(text)))}]"
    if _takes_text(kind) and isinstance(value, Word):
        return f'put it in quotes if you mean the text: "{value.text}"'
    return ""
