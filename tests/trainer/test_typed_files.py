"""JSON becomes a value of its type, or a line that says what is where; a folder of any depth goes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from trainer.files import remove_tree
from trainer.typed import Count, InvalidData, Size, Within, from_json, parse_json, read_json


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[Count, ...] = ()


@dataclass(frozen=True)
class Outer:
    step: Count
    rate: Annotated[float, Within(0, 1)] = 0.5
    loss: float | None = None
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    pairs: dict[str, tuple[Size, Size]] | None = None
    rows: tuple[tuple[Count, str], ...] = ()
    flag: bool | str = False
    rest: Any = None


def test_value_of_its_type_is_read_and_what_the_type_lacks_is_passed_over() -> None:
    text = (
        b'{"step": 3, "rate": 1, "inner": {"name": "x", "sizes": [1, 2]}, "pairs": {"f": [1, 2]}, '
        b'"rows": [[0, "y"]], "flag": "z"}'
    )
    expected = Outer(3, 1.0, None, "a", Inner("x", (1, 2)), {"f": (1, 2)}, ((0, "y"),), "z")
    assert from_json(parse_json(text), Outer) == expected
    assert from_json(parse_json(b'\xef\xbb\xbf{"step": 0, "z": 1}'), Outer) == Outer(0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "step is missing"),
        ('{"step": null}', "step is None, not a whole number"),
        ('{"step": true}', "step is True, not a whole number"),
        ('{"step": "4"}', "step is '4', not a whole number"),
        ('{"step": 4.0}', "step is 4.0, not a whole number"),
        ('{"step": -1}', "step is -1, not at least 0"),
        ('{"step": 1' + "0" * 30 + "}", "step is 1000000000000000000000000000000, not a whole number"),
        ('{"step": 1, "rate": NaN}', "rate is nan, not at least 0 and at most 1"),
        ('{"step": 1, "rate": "1"}', "rate is '1', not a number"),
        ('{"step": 1, "loss": "1"}', "loss is '1', not a number or null"),
        ('{"step": 1, "kind": "c"}', "kind is 'c', not one of a, b"),
        ('{"step": 1, "inner": {"name": 5}}', "inner.name is 5, not a text"),
        ('{"step": 1, "inner": {"name": "x", "sizes": [1, -2]}}', "inner.sizes[1] is -2, not at least 0"),
        ('{"step": 1, "pairs": {"f": [1]}}', "pairs.f is [1], not a list of 2"),
        ('{"step": 1, "rows": [[0, 1]]}', "rows[0][1] is 1, not a text"),
        ('{"step": 1, "inner": {"name": "\\ud800"}}', "inner.name is '\\ud800', not a text of valid UTF-8"),
        ('{"step": 1, "rest": ' + "[" * 40 + "]" * 40 + "}", "rest is nested more than 32 deep"),
        ("[]", "it is [], not an object"),
        ("", "it is empty, not JSON"),
        ("[" * 100_000, "it is nested too deep"),
        ('"' + "x" * 99 + '"', f"it is '{'x' * 58}…, not an object"),
    ],
)
def test_damage_says_what_is_where(text: str, told: str) -> None:
    with pytest.raises(InvalidData) as caught:
        from_json(parse_json(text.encode()), Outer)
    assert str(caught.value) == told


def test_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(json.dumps({"step": 1, "rest": "x" * 5000}))
    assert read_json(tmp_path / "f", Outer).step == 1
    with pytest.raises(InvalidData, match="it is longer than 100 bytes"):
        read_json(tmp_path / "f", Outer, most=100)


def test_folder_of_a_thousand_levels_is_removed(tmp_path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    (tmp_path / "kept").write_text("x")
    (tmp_path / "deep").mkdir()
    try:
        os.chdir(tmp_path / "deep")
        for _ in range(1100):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.fchdir(here)
        os.close(here)
    remove_tree(tmp_path / "deep")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
