"""The house: which folder may need which, and how large folders, files and functions may be.

What each folder needs is a line of `house.txt`; docs/parts.md draws it. Another name there is a decision, not a
repair: look first whether what is imported stands in the wrong folder.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.ferry import REPO

HOUSE = Path(__file__).with_name("house.txt")
MODULES_A_FOLDER, TESTS_A_FOLDER = 14, 25
ENTRIES = "deployer/cli.py", "deployer/agent/serve.py"
"""They stand above every folder, beside modules that stand below: each counts as a folder."""
LINES_A_FILE, LINES_A_TEST, LINES_A_FUNCTION = 400, 500, 60


@functools.cache
def trees(*tops: str) -> dict[str, ast.Module]:
    """Path below the repository -> the module's syntax tree."""
    paths = [path for top in tops for path in sorted((REPO / top).rglob("*.py"))]
    return {path.relative_to(REPO).as_posix(): ast.parse(path.read_text()) for path in paths}


def needed_modules(path: str, tree: ast.Module) -> set[str]:
    """The modules of ours that a file imports, anywhere in it, as paths below the repository."""
    here = path.split("/")[:-1]
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names] + [module]
    files = [name.replace(".", "/") + end for name in names for end in (".py", "/__init__.py")]
    return {file for file in files if file in trees("deployer", "trainer")}


def folder_of(path: str) -> str:
    return path.removesuffix(".py") if path in ENTRIES else path.rpartition("/")[0]


@functools.cache
def needs() -> dict[str, set[str]]:
    """Folder -> the other folders whose modules it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees("deployer", "trainer").items():
        found[folder_of(path)] |= {folder_of(file) for file in needed_modules(path, tree)} - {folder_of(path)}
    return dict(found)


def allowed() -> dict[str, set[str]]:
    lines = [line for line in HOUSE.read_text().splitlines() if line and not line.startswith("#")]
    return {folder: set(others.split()) for folder, _, others in (line.partition(":") for line in lines)}


def test_folders_need_exactly_what_house_txt_says():
    assert needs() == allowed()


def test_no_folders_need_each_other_in_a_circle():
    left = {folder: set(others) for folder, others in needs().items()}
    while left:
        ground = [folder for folder, others in left.items() if not others & left.keys()]
        assert ground, left
        for folder in ground:
            del left[folder]


def drawn_lines(half: str) -> dict[str, int]:
    """Folder -> the line that it stands on in the picture of docs/parts.md, from above."""
    picture = re.search(rf"```house {half}\n(.*?)```", (REPO / "docs" / "parts.md").read_text(), re.DOTALL)
    assert picture
    lines = [line.split()[:1] if line.startswith(". ") else line.split() for line in picture[1].splitlines()]
    return {half if name == "." else f"{half}/{name}": i for i, names in enumerate(lines) for name in names}


@pytest.mark.parametrize("half", ["deployer", "deployer/agent", "trainer"])
def test_picture_of_the_house_shows_each_folder_above_what_it_needs(half):
    drawn = drawn_lines(half)
    agent = half == "deployer/agent"
    inside = {f for f in needs() if f"{f}/".startswith(f"{half}/") and f.startswith("deployer/agent") == agent}
    assert drawn.keys() == inside
    assert [(f, other) for f in inside for other in needs()[f] & inside if drawn[f] >= drawn[other]] == []


def test_kinds_of_models_are_known_to_recipes_alone():
    kinds = "trainer/models/families"
    assert [folder for folder, others in needs().items() if kinds in others] == ["trainer/recipes"]


def test_deployer_and_trainer_meet_in_the_schema_and_the_config_alone():
    across = {
        (a.split("/")[0], b) for a, others in needs().items() for b in others if a.split("/")[0] != b.split("/")[0]
    }
    config = {"trainer/config", "trainer/config/kinds", "trainer/schema"}
    assert across == {("deployer", folder) for folder in config}


@pytest.mark.parametrize(("tops", "most"), [(("deployer", "trainer"), MODULES_A_FOLDER), (("tests",), TESTS_A_FOLDER)])
def test_folder_is_not_a_bag(tops, most):
    counts: dict[str, int] = defaultdict(int)
    for path in trees(*tops):
        folder, _, name = path.rpartition("/")
        counts[folder] += name != "__init__.py"
    assert {folder: count for folder, count in counts.items() if count > most} == {}


@pytest.mark.parametrize(("tops", "most"), [(("deployer", "trainer"), LINES_A_FILE), (("tests",), LINES_A_TEST)])
def test_file_is_read_in_one_sitting(tops, most):
    lines = {path: len((REPO / path).read_text().splitlines()) for path in trees(*tops)}
    assert {path: count for path, count in lines.items() if count > most} == {}


def test_function_fits_on_a_screen():
    sizes = {
        f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in trees("deployer", "trainer").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > LINES_A_FUNCTION} == {}
