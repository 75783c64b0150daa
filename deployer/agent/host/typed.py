"""Turns the bytes of a file or a message into a typed value, or raises InvalidData.

A type is a NamedTuple whose fields are of str, bool, int (0 or more), float, Literal, Optional, Union, Tuple[T, ...],
List, Dict[str, T], Any, and further NamedTuples; values are not converted. A missing or null key gets the field's
default. A key that the type does not have is ignored, unless the reader is `strict`. A NamedTuple with `as_row` is
written as a list of all its fields.
Stdlib only, Python 3.8: both sides use it.
"""

import json
import types
from functools import lru_cache
from typing import (
    Any,
    Callable,
    Dict,
    ForwardRef,
    Hashable,
    List,
    Literal,
    NoReturn,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from .files import read_whole

T = TypeVar("T")

MAX_BYTES = 4 << 20
MAX_DEPTH = 32
"""Maximum depth of a value without a type (Any)."""
MAX_INT = (1 << 63) - 1
"""A time in ns is larger than the whole numbers that a float represents exactly."""
_AS_ROW = "is_written_as_a_row"


class InvalidData(Exception):
    """A value does not have its type; as text: which value is where, and what was expected."""

    def __init__(self, words: str, *, place: str = "", expected: str = "") -> None:
        """`words`: the text after the `place`, if there is one: "is 5, not a text"."""
        super().__init__(words, place, expected)
        self.words = words
        self.place = place
        self.expected = expected

    def __str__(self) -> str:
        return "%s %s" % (self.place, self.words) if self.place else self.words

    def within(self, place: str) -> "InvalidData":
        """The same error, with its place inside this outer place."""
        dot = "." if self.place and not self.place.startswith("[") else ""
        words = self.words[3:] if not self.place and self.words.startswith("it is ") else self.words
        return InvalidData(words, place=place + dot + self.place, expected=self.expected)


def as_row(kind: Type[T]) -> Type[T]:
    """Marks a NamedTuple that is written as a list of its fields, in their order."""
    setattr(kind, _AS_ROW, True)
    return kind


def parse(data: bytes, kind: Type[T], *, most: int = MAX_BYTES) -> T:
    """The value of JSON text. Raises InvalidData if it does not have this type or is longer than `most` bytes."""
    return from_json(load_json(data, most=most), kind)


def read_typed(path: str, kind: Type[T], *, most: int = MAX_BYTES) -> T:
    """The value in a file. Raises OSError if the file cannot be read, and InvalidData if the value does not have this
    type."""
    return parse(read_whole(path, most + 1), kind, most=most)


def load_json(data: bytes, *, most: int = MAX_BYTES) -> Any:
    """The value of JSON text of any type. Raises InvalidData if it is not JSON or is longer than `most` bytes."""
    if len(data) > most:
        raise InvalidData("it is %d bytes long, not at most %d" % (len(data), most))
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise InvalidData("it is %.60r, not JSON" % data) from None


def from_json(value: Any, kind: Type[T], *, strict: bool = False) -> T:
    """The typed value of parsed JSON. Raises InvalidData if it does not have this type."""
    wanted: Any = kind
    parsed: T = _parser(wanted, strict)(value)
    return parsed


def to_json(value: Any, *, sparse: bool = False) -> Any:
    """The JSON value from which `from_json` makes this value. `sparse`: without fields at their default."""
    if hasattr(value, "_asdict") and not hasattr(value, _AS_ROW):
        defaults = value._field_defaults if sparse else {}
        fields: Dict[str, Any] = value._asdict()
        return {k: to_json(v, sparse=sparse) for k, v in fields.items() if k not in defaults or v != defaults[k]}
    if isinstance(value, (tuple, list)):
        return [to_json(element, sparse=sparse) for element in value]
    if isinstance(value, dict):
        return {key: to_json(element, sparse=sparse) for key, element in value.items()}
    return value


# --- one parser for each type -----------------------------------------------------------------------------------------

_Parser = Callable[[Any], Any]
_UNIONS = (Union, getattr(types, "UnionType", Union))  # `X | Y` too


@lru_cache(maxsize=None)
def _parser(kind: Hashable, strict: bool) -> _Parser:
    if hasattr(kind, "_field_defaults"):
        return _record_parser(kind, strict)
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return _union_parser([_parser(member, strict) for member in args])
    if origin is Literal:
        return _literal_parser(args)
    if origin is tuple and args[1:] == (Ellipsis,):
        return _list_parser(_parser(args[0], strict), tuple)
    if origin is list:
        return _list_parser(_parser(args[0], strict), list)
    if origin is dict and args[0] is str:
        return _dict_parser(_parser(args[1], strict))
    return _PLAIN[kind]


def _fail(value: Any, expected: str) -> NoReturn:
    raise InvalidData("it is %.60r, not %s" % (value, expected), expected=expected)


def _record_parser(kind: Any, strict: bool) -> _Parser:
    hints: Dict[str, Any] = kind.__annotations__
    if any(isinstance(hint, (str, ForwardRef)) for hint in hints.values()):  # asking it of all takes twice as long
        hints = get_type_hints(kind)
    parsers: Dict[str, _Parser] = {name: _parser(hints[name], strict) for name in kind._fields}
    if hasattr(kind, _AS_ROW):
        return _row_parser(kind, parsers)
    nullable = frozenset(name for name, hint in hints.items() if hint is Any or type(None) in get_args(hint))
    defaults = kind._field_defaults
    required = frozenset(kind._fields) - frozenset(defaults)

    def parse_record(value: Any) -> Any:
        if not isinstance(value, dict):
            _fail(value, "an object")
        found: Dict[str, Any] = {}
        for name, given in value.items():
            parser = parsers.get(name)
            if parser is None:
                if strict:
                    raise InvalidData("is not known here", place=name)
            elif given is not None:
                try:
                    found[name] = parser(given)
                except InvalidData as damage:
                    raise damage.within(name) from None
            elif name in required and name in nullable:
                found[name] = None
        for name in required:
            if name not in found:
                raise InvalidData("is %s" % ("null" if name in value else "missing"), place=name)
        return kind(**found)

    return parse_record


def _row_parser(kind: Any, parsers: Dict[str, _Parser]) -> _Parser:
    names, own = list(parsers), list(parsers.values())

    def parse_row(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(own):
            _fail(value, "a list of " + ", ".join(names))
        found: List[Any] = []
        try:
            for parser, given in zip(own, value):  # noqa: B905 - as Python 3.8 has it
                found.append(parser(given))
        except InvalidData as damage:
            raise damage.within(names[len(found)]) from None
        return kind(*found)

    return parse_row


def _union_parser(parsers: List[_Parser]) -> _Parser:
    def parse_union(value: Any) -> Any:
        expected: List[str] = []
        for parser in parsers:
            try:
                return parser(value)
            except InvalidData as damage:
                if damage.place or not damage.expected:  # it is of that kind, and something in it is wrong
                    raise
                expected.append(damage.expected)
        _fail(value, " or ".join(word for word in expected if word != "null"))

    return parse_union


def _literal_parser(words: Tuple[Any, ...]) -> _Parser:
    def parse_literal(value: Any) -> Any:
        if not isinstance(value, str) or value not in words:
            _fail(value, "one of " + ", ".join(words))
        return value

    return parse_literal


def _list_parser(parser: _Parser, make: Callable[[Any], Any]) -> _Parser:
    def parse_list(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            _fail(value, "a list")
        elements: List[Any] = []
        try:
            for element in value:
                elements.append(parser(element))
        except InvalidData as damage:
            raise damage.within("[%d]" % len(elements)) from None
        return make(elements)

    return parse_list


def _dict_parser(parser: _Parser) -> _Parser:
    def parse_dict(value: Any) -> Any:
        if not isinstance(value, dict):
            _fail(value, "an object")
        found: Dict[str, Any] = {}
        for key, element in value.items():
            try:
                found[key] = parser(element)
            except InvalidData as damage:
                raise damage.within(key) from None
        return found

    return parse_dict


def _parse_str(value: Any) -> str:
    return value if isinstance(value, str) else _fail(value, "a text")


def _parse_bool(value: Any) -> bool:
    return value if isinstance(value, bool) else _fail(value, "true or false")


def _parse_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT:
        return value
    _fail(value, "a whole number of 0 or more")


def _parse_float(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_INT:
        return value  # neither infinite nor NaN
    _fail(value, "a number")


def _parse_none(value: Any) -> None:
    if value is not None:
        _fail(value, "null")


def _parse_any(value: Any) -> Any:
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [e for v in layer if isinstance(v, (dict, list)) for e in (v.values() if isinstance(v, dict) else v)]
        if not layer:
            return value
    raise InvalidData("it is nested more than %d deep" % MAX_DEPTH)


_PLAIN: Dict[Any, _Parser] = {
    str: _parse_str,
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    type(None): _parse_none,
    Any: _parse_any,
}
