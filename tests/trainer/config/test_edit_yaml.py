"""A YAML config with other values of some keys: compared with PyYAML's own reading of the text before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.files import dump_yaml, edit_yaml
from trainer.config.load import config_to_yaml
from trainer.schema import Config

ODD = [
    "off",
    "1e-4",
    "010",
    "12:30",
    "~",
    "null",
    "a: b",
    "# a",
    "-y",
    "'",
    '"',
    "\u0085",
    "a\nb",
    " a ",
    "&a",
    "x" * 200,
    "word: " * 40,
]
TEXTS = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
ENTRIES = st.dictionaries(st.sampled_from(["path", "weight"]), SCALARS, max_size=2)
VALUES = st.one_of(SCALARS, st.lists(st.one_of(SCALARS, ENTRIES), max_size=4), ENTRIES)
NAMES = st.sampled_from(["a", "b", "train", "steps", "x_1", "off", "1"])
SECTIONS = st.dictionaries(NAMES, VALUES, max_size=4)
TREES = st.dictionaries(NAMES, st.one_of(SECTIONS, st.none()), max_size=4)
CHANGES = st.dictionaries(st.builds("{}.{}".format, NAMES, NAMES), VALUES, max_size=4)
WAYS = [{}, {"default_flow_style": True}, {"default_style": '"'}, {"default_style": "'"}, {"indent": 7, "width": 20}]


def changed(tree: Any, changes: dict[str, Any]) -> Any:
    """What the text should say then."""
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in (tree or {}).items()}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        inner = tree if not section else tree.get(section)
        if not isinstance(inner, dict):
            inner = tree[section] = {}
        inner[name] = value
    return tree


@given(TREES, CHANGES)
def test_text_of_ours_says_the_same_but_for_these_keys(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    text = dump_yaml(tree)
    assert edit_yaml(text, {}) == text
    assert yaml.safe_load(text) == tree
    assert yaml.safe_load(edit_yaml(text, changes)) == changed(tree, changes)


@given(TREES, CHANGES, st.sampled_from(WAYS))
def test_text_of_another_writer_says_the_same_but_for_these_keys(
    tree: dict[str, Any], changes: dict[str, Any], way: dict[str, Any]
) -> None:
    text = yaml.safe_dump(tree, **way)
    assert yaml.safe_load(edit_yaml(text, changes)) == changed(yaml.safe_load(text), changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "{}\n",
        "train:\n",
        "train: {}  # empty\n",
        "a: &a {steps: 1, seed: 2}\ntrain: *a\n",
        "a: &a {steps: 1}\ntrain: {<<: *a, seed: 3}\n",
        "train:\n- 1\n",
        "%YAML 1.1\n---\ntrain: !!map {steps: !!str 5, seed: 010, at: 12:30, when: 2026-01-01}\n",
        "train:\n  steps: |\n    some\n    text\n\n  seed: >-\n    more\n    of it\n",
    ],
)
def test_text_by_hand_says_the_same_but_for_these_keys(text: str) -> None:
    for changes in ({}, {"train.steps": 7}, {"train.seed": None, "new.key": ["a", 1], "script": "x.py"}):
        assert yaml.safe_load(edit_yaml(text, changes)) == changed(yaml.safe_load(text), changes)


def test_scalar_stays_the_word_that_it_is() -> None:
    """The trainer reads words by its own types: 010 is ten to it, and 1e-4 a number."""
    text = "train:\n  seed: 010\n  rate: 1e-4\n  name: 12:30\n  flag: yes\n  quoted: '1'\n  wide: \"a\\N\"\n"
    assert edit_yaml(text, {"train.steps": 7}) == text + "  steps: 7\n"


@pytest.mark.parametrize("text", [config_to_yaml(Config()), "836d9e4"])
def test_whole_config_changes_in_the_lines_of_these_keys_alone(text: str) -> None:
    if text == "836d9e4":
        old = Path(__file__).parents[2] / "compat" / "jobs" / "sft" / "config.yaml"
        text = old.read_text().replace("@PYTHON@", "/usr/bin/python3").replace("@ROOT@", "/tmp/root")
    edited = edit_yaml(text, {"train.steps": 4000, "target.gpu_ranks": [0, 1], "parallel.new": True}).splitlines()
    before = text.splitlines()
    assert [line for line in edited if line not in before] == ["  gpu_ranks: [0, 1]", "  steps: 4000", "  new: true"]
    assert [line.split(":")[0] for line in edited if line.split(":")[0] != "  new"] == [
        line.split(":")[0] for line in before
    ]
    assert edited.index("  new: true") == edited.index("run:") - 1
