"""Turns JSON from an untrusted file into a typed value, or raises InvalidData.

A type is a frozen dataclass whose fields are of str, bool, int, float, Literal, tuple[T, ...], tuple[T, U], list[T],
dict[str, T], Any, unions of these, and further dataclasses; `Within` in an Annotated number is its range. Nothing is
converted, except whole numbers to float. A missing key takes the field's default; unknown keys are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.files import read_up_to
from trainer.words import shortened

T = TypeVar("T")

MAX_BYTES = 16 << 20
MAX_DEPTH = 32
"""The deepest nesting accepted in a value of type Any."""
MOST = (1 << 63) - 1
SHOWN = 60
SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates: valid in JSON, but no file name contains them, and no terminal shows them."""


class InvalidData(Exception):
    """A value does not have the expected type: `r is "x", not a whole number`."""

    def __init__(self, words: str, *, place: str = "", expected: str = "") -> None:
        super().__init__(words)
        self.words, self.place, self.expected = words, place, expected

    def __str__(self) -> str:
        return f"{self.place or 'it'} {self.words}"

    def within(self, place: str) -> InvalidData:
        """The same error, with `place` put in front of its own."""
        dot = "." if self.place and not self.place.startswith("[") else ""
        return InvalidData(self.words, place=f"{place[:SHOWN]}{dot}{self.place}", expected=self.expected)


@dataclass(frozen=True)
class Within:
    """The range of a number."""

    least: float
    most: float = MOST


Count = Annotated[int, Within(0)]
Size = Annotated[int, Within(1)]


def read_json(path: Path, kind: type[T], *, most: int = MAX_BYTES) -> T:
    """The typed value in a file. Raises OSError if it cannot be read, InvalidData if it has no such value."""
    return from_json(parse_json(read_up_to(path, most), most=most), kind)


def parse_json(data: bytes, *, most: int = MAX_BYTES) -> Any:
    """Parses JSON text of any type. Raises InvalidData if it is not JSON, or is longer than `most` bytes."""
    if len(data) > most:
        raise InvalidData(f"is longer than {most:,} bytes")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise InvalidData("is nested too deep") from None
    except ValueError:
        raise InvalidData("is empty, not JSON" if not data.strip() else f"is {_shown(data)}, not JSON") from None


def from_json(value: Any, kind: type[T]) -> T:
    """Turns parsed JSON into a value of type `kind`. Raises InvalidData if it does not have this type."""
    wanted: Any = kind
    parsed: T = _parser(wanted)(value)
    return parsed


# --- one parser for each type -----------------------------------------------------------------------------------------

_Parser = Callable[[Any], Any]


@cache
def _parser(kind: Any) -> _Parser:
    if is_dataclass(kind):
        return _record_parser(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _range_parser(_parser(args[0]), args[1])
    if origin in (Union, UnionType):
        return _union_parser([_parser(member) for member in args])
    if origin is Literal:
        return _literal_parser(args)
    if origin is tuple:
        is_list = args[-1] is Ellipsis
        return _list_parser(_parser(args[0]), tuple) if is_list else _fixed_parser([_parser(one) for one in args])
    if origin is list:
        return _list_parser(_parser(args[0]), list)
    if origin is dict:
        return _dict_parser(_parser(args[1]))
    return _PLAIN[kind]


def _fail(value: Any, expected: str) -> NoReturn:
    raise InvalidData(f"is {_shown(value)}, not {expected}", expected=expected)


def _shown(value: Any) -> str:
    """The value's repr, shortened; works for any value and depth."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # Python refuses to print integers of thousands of digits
        text = f"a {type(value).__name__}"
    return shortened(text, SHOWN)


def _record_parser(kind: Any) -> _Parser:
    hints = get_type_hints(kind, include_extras=True)
    parsers = {field.name: _parser(hints[field.name]) for field in fields(kind)}
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def parse_record(value: Any) -> Any:
        if not isinstance(value, dict):
            _fail(value, "an object")
        for name in required:
            if name not in value:
                raise InvalidData("is missing", place=name)
        return kind(**{name: _at(name, parser, value[name]) for name, parser in parsers.items() if name in value})

    return parse_record


def _at(place: str, parser: _Parser, value: Any) -> Any:
    try:
        return parser(value)
    except InvalidData as damage:
        raise damage.within(place) from None


def _union_parser(parsers: list[_Parser]) -> _Parser:
    def parse_union(value: Any) -> Any:
        expected = []
        for parser in parsers:
            try:
                return parser(value)
            except InvalidData as damage:
                if damage.place or not damage.expected:  # the value has this type, but something inside it is wrong
                    raise
                expected.append(damage.expected)
        _fail(value, " or ".join(expected))

    return parse_union


def _range_parser(parser: _Parser, within: Within) -> _Parser:
    def parse_range(value: Any) -> Any:
        number = parser(value)
        if number is not None and not within.least <= number <= within.most:
            top = "" if within.most == MOST else f" and at most {within.most:,}"
            _fail(number, f"at least {within.least:g}{top}")
        return number

    return parse_range


def _literal_parser(words: tuple[Any, ...]) -> _Parser:
    def parse_literal(value: Any) -> Any:
        return value if isinstance(value, str) and value in words else _fail(value, f"one of {', '.join(words)}")

    return parse_literal


def _list_parser(parser: _Parser, make: Callable[[Any], Any]) -> _Parser:
    def parse_list(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            _fail(value, "a list")
        return make(_at(f"[{number}]", parser, element) for number, element in enumerate(value))

    return parse_list


def _fixed_parser(parsers: list[_Parser]) -> _Parser:
    def parse_fixed(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(parsers):
            _fail(value, f"a list of {len(parsers)}")
        return tuple(_at(f"[{n}]", parser, value[n]) for n, parser in enumerate(parsers))

    return parse_fixed


def _dict_parser(parser: _Parser) -> _Parser:
    def parse_dict(value: Any) -> Any:
        if not isinstance(value, dict):
            _fail(value, "an object")
        return {_parse_str(key): _at(key, parser, element) for key, element in value.items()}

    return parse_dict


def _parse_str(value: Any) -> str:
    if isinstance(value, str) and not SURROGATE.search(value):
        return value
    _fail(value, "a text of valid UTF-8" if isinstance(value, str) else "a text")


def _parse_bool(value: Any) -> bool:
    return value if isinstance(value, bool) else _fail(value, "true or false")


def _parse_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST:
        return value
    _fail(value, "a whole number")


def _parse_float(value: Any) -> float:
    if isinstance(value, float):
        return value  # a loss may be NaN; numbers with a range may not
    is_number = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
    return float(value) if is_number else _fail(value, "a number")


def _parse_none(value: Any) -> None:
    return value if value is None else _fail(value, "null")


def _parse_any(value: Any) -> Any:
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [e for v in layer if isinstance(v, (dict, list)) for e in (v.values() if isinstance(v, dict) else v)]
        if not layer:
            return value
    raise InvalidData(f"is nested more than {MAX_DEPTH} deep")


_PLAIN: dict[Any, _Parser] = {
    str: _parse_str,
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    type(None): _parse_none,
    Any: _parse_any,
}
