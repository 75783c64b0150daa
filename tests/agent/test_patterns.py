"""Patterns of paths: what they mean, with Python's own glob as the oracle."""

import glob
import random

import pytest

from deployer.agent.requests.files.names import covers, is_pattern, matching

NAMES = "a", "b.pt", "ab", ".hid", "[x]", "plots"
PATTERNS = (
    "*",
    "*.pt",
    "a*",
    "?",
    "[ab]*",
    "plots/*",
    "**",
    "**/*.pt",
    "a/**",
    "a/**/b.pt",
    "**/plots/**/ab",
    ".*",
    "[!a]*",
    "[x",
    "*/*/*",
)


def make_tree(folder, rng):
    for _ in range(60):
        path = folder.joinpath(*(rng.choice(NAMES) for _ in range(rng.randint(1, 4))))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue


def files_below(base, path):
    top = base / path
    files = [top] if top.is_file() else [found for found in top.rglob("*") if found.is_file()]
    return {file.relative_to(base).as_posix() for file in files}


@pytest.mark.parametrize("seed", range(5))
def test_patterns_bring_the_files_that_pythons_glob_finds(tmp_path, seed):
    make_tree(tmp_path, random.Random(seed))
    every = files_below(tmp_path, ".")
    for pattern in PATTERNS:
        found = glob.glob(pattern, root_dir=tmp_path, recursive=True)  # noqa: PTH207 (`Path.glob` hides no name with a dot)
        found = [".", *found] if pattern == "**" else found  # as it is with a folder before it
        found = [
            path for path in found if not (path.endswith("/") and (tmp_path / path[:-1]).is_file())
        ]  # a/** of a file
        meant = set().union(*(files_below(tmp_path, path) for path in found))
        ours = matching(str(tmp_path), pattern)
        assert set().union(*(files_below(tmp_path, path) for path in ours)) == meant, pattern
        assert {path for path in every if covers(pattern, path)} - meant <= {"a"}, pattern
        assert all(covers(pattern, path) for path in meant), pattern


def test_links_are_not_followed_and_a_ring_of_them_ends(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.pt").touch()
    (tmp_path / "a" / "ring").symlink_to(tmp_path)
    (tmp_path / "out").symlink_to("/etc")
    assert matching(str(tmp_path), "**/*.pt") == ["a/x.pt"]
    assert matching(str(tmp_path), "out/*") == []


def test_a_file_of_that_very_name_is_meant():
    assert is_pattern("[x]") and covers("[x]", "[x]") and covers("[x]", "[x]/below")
    assert not covers("[x]", "y") and not is_pattern("a.pt")


def test_many_stars_take_no_time():
    assert not covers("/".join(["**"] * 40 + ["x"]), "/".join("a" * 200))
    assert not covers("*a" * 60 + "/x", "a" * 150 + "/y")
