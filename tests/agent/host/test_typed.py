"""Values at the edges: of their type, or an InvalidData that says which one is not."""

import json
import os
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agent.host.typed import MAX_INT, InvalidData, from_json, parse, read_typed, to_json
from tests.agent.typed_values import values_of


class Inner(NamedTuple):
    word: Literal["a", "b"]
    size: int = 1


class Outer(NamedTuple):
    name: str
    inner: Inner
    parts: tuple[str | Inner, ...] = ()
    rows: tuple[Inner, ...] = ()
    seconds: float | None = None
    by_name: dict[str, int] = {}  # noqa: RUF012
    flag: bool = False
    names: list[str] = []  # noqa: RUF012


class Named(NamedTuple):
    name: str


GOOD: dict[str, Any] = {"name": "x", "inner": {"word": "a"}}


@given(values_of(Outer))
def test_a_value_written_and_read_is_the_same(value: Outer) -> None:
    for sparse in (False, True):
        assert parse(json.dumps(to_json(value, sparse=sparse)).encode(), Outer) == value


def test_a_missing_key_takes_its_default_and_so_does_null() -> None:
    assert from_json({**GOOD, "flag": None, "other": 5}, Outer) == Outer("x", Inner("a"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 5}, "name is 5, not a text"),
        ({"name": None}, "name is null"),
        ({"inner": {"word": "c"}}, "inner.word is 'c', not one of a, b"),
        ({"inner": {}}, "inner.word is missing"),
        ({"inner": []}, "inner is [], not an object"),
        ({"inner": {"word": "a", "size": "1"}}, "inner.size is '1', not a whole number of 0 or more"),
        ({"inner": {"word": "a", "size": True}}, "inner.size is True, not a whole number of 0 or more"),
        ({"inner": {"word": "a", "size": -1}}, "inner.size is -1, not a whole number of 0 or more"),
        (
            {"inner": {"word": "a", "size": MAX_INT + 1}},
            f"inner.size is {MAX_INT + 1}, not a whole number of 0 or more",
        ),
        ({"seconds": float("nan")}, "seconds is nan, not a number"),
        ({"seconds": False}, "seconds is False, not a number"),
        ({"rows": {"word": "a"}}, "rows is {'word': 'a'}, not a list"),
        ({"rows": [{"word": "a"}, 3]}, "rows[1] is 3, not an object"),
        ({"parts": ["x", 3]}, "parts[1] is 3, not a text or an object"),
        ({"parts": [{"word": "z"}]}, "parts[0].word is 'z', not one of a, b"),
        ({"by_name": {"k": "v"}}, "by_name.k is 'v', not a whole number of 0 or more"),
        ({"flag": 1}, "flag is 1, not true or false"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidData) as damage:
        from_json({**GOOD, **changes}, Outer)
    assert str(damage.value) == words


def test_a_strict_reader_refuses_an_unknown_key_at_any_depth() -> None:
    with pytest.raises(InvalidData, match=r"inner\.more is not known here"):
        from_json({**GOOD, "inner": {"word": "a", "more": 1}}, Outer, strict=True)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_is_a_value_or_a_damage(value: Any) -> None:
    try:
        assert isinstance(parse(json.dumps(value).encode(), Outer), Outer)
    except InvalidData as damage:
        assert str(damage)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"name": ' + b"[" * 900 + b"]" * 900 + b"}"])
def test_bytes_that_are_no_value_are_a_damage(data: bytes) -> None:
    with pytest.raises(InvalidData):
        parse(data, Outer)


def test_what_is_too_large_is_not_read(tmp_path: Any) -> None:
    (tmp_path / "big").write_bytes(b'{"name": "' + b"x" * 100 + b'"}')
    with pytest.raises(InvalidData, match="101 bytes long, not at most 100"):
        read_typed(str(tmp_path / "big"), Named, most=100)


def test_what_has_no_type_may_not_be_deep() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(InvalidData, match="nested more than 32 deep"):
        from_json(deep, Any)


def test_a_folder_and_a_pipe_are_no_file(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(OSError):
            read_typed(str(path), Named)
