"""Configs of any size and depth: one quick line, and what is large but plain is read."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.limits import patient
from trainer.config.load import ConfigError, load_config

DEEP, LARGE = "nested too deeply", "not a config: more than"
CASES = {
    "50 MB": ("a.yaml", b"a: 1\n" * 10_000_000, LARGE),
    "lists in lists": ("a.yaml", b"a: " + b"[" * 100_000, "nest"),
    "few lists in lists": ("a.yaml", b"a: " + b"[" * 4000, DEEP),
    "maps in maps": ("a.yaml", b"{" * 100_000, "nest"),
    "dashes": ("a.yaml", b"- " * 1_500_000, DEEP),
    "values": ("a.yaml", b"a: [" + b"1, " * 1_000_000 + b"]", "more than 100,000 values"),
    "python of 50 MB": ("a.py", b"#" * 50_000_000, LARGE),
    "python in brackets": ("a.py", b"[" * 100_000, "nested"),
    "python in signs": ("a.py", b"-" * 200_000 + b"1", "nested"),
    "python in words": ("a.py", b"if 1:\n " + b"not " * 60_000 + b"1", "nested"),
}


@pytest.mark.parametrize("case", CASES)
def test_config_beyond_all_bounds_is_one_quick_line(tmp_path: Path, case: str) -> None:
    name, text, words = CASES[case]
    (tmp_path / name).write_bytes(text)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tmp_path / name)
    assert "\n" not in caught.value.message and len(caught.value.message) < 200
    assert time.monotonic() - begun < patient(15)  # 30 s and more without the bounds


@pytest.mark.parametrize("text", [b"a: " + b"[" * 4000, b"- " * 4000, b"{" * 4000], ids=["lists", "dashes", "maps"])
def test_depth_is_bounded_whatever_python_allows(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(text)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)  # as a library that needs it leaves it
    try:
        with pytest.raises(ConfigError, match=DEEP):
            load_config(tmp_path / "a.yaml")
    finally:
        sys.setrecursionlimit(before)


def test_pipe_in_the_place_of_a_config_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="no regular file"):
        load_config(tmp_path / "a.yaml")


def test_large_plain_config_is_read(tmp_path: Path) -> None:
    paths = "".join(f"    - part-{number}.jsonl\n" for number in range(2000))
    (tmp_path / "a.yaml").write_text(f"data:\n  train:\n{paths}")
    assert len(load_config(tmp_path / "a.yaml").data.train) == 2000
