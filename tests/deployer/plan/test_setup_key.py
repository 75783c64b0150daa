"""Which of the project's files a setup command names: when one changes, the setup runs again."""

from __future__ import annotations

import pytest

from deployer.plan.setup import make_setup, named_paths

FILES = {
    path: f"hash of {path}"
    for path in (
        *("Makefile", "requirements.txt", "other.txt", "train.py", "pyproject.toml", "csrc/fast.cu", "csrc/notes.md"),
        *("scripts/get.sh", "scripts/lib/common.sh", "wheels/a.whl", "wheels/b.txt", "with space.txt"),
    )
}
SCRIPTS = ["scripts/get.sh", "scripts/lib/common.sh"]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("pip install torch", []),
        ("pip install -r requirements.txt", ["requirements.txt"]),
        ("pip install -rrequirements.txt", ["requirements.txt"]),
        ("pip install --requirement=./requirements.txt", ["requirements.txt"]),
        ("bash scripts/get.sh data", ["scripts/get.sh"]),
        (". scripts/get.sh", ["scripts/get.sh"]),
        ("cd scripts && bash get.sh", SCRIPTS),
        ("bash scripts/", SCRIPTS),
        ("pip install wheels/*.whl", ["wheels/a.whl"]),
        ("cat 'with space.txt'", ["with space.txt"]),
        ("sh -c 'pip install -r requirements.txt'", ["requirements.txt"]),
        ("x=$(cat other.txt)", ["other.txt"]),
        ("sort <other.txt>sorted", ["other.txt"]),
        ("python -m get  # train.py", ["train.py"]),
        ("make data", ["Makefile"]),
        ("A=1 make", ["Makefile"]),
        ("true\nmake", ["Makefile"]),
        ("echo make", []),
        ("pip install .", sorted(FILES)),
        ("pip install -e .", ["csrc/fast.cu", "pyproject.toml"]),
        ("pip install -e '.[dev]'", ["csrc/fast.cu", "pyproject.toml"]),
        ("echo 'no end of the quote other.txt", ["other.txt"]),
        ("cat ../outside.txt /etc/hosts", []),
    ],
)
def test_words_name_files_and_folders(command: str, named: list[str]) -> None:
    assert named_paths(command, FILES) == named


def test_key_changes_with_the_command_and_what_it_names_alone() -> None:
    command = "pip install -r requirements.txt"
    key = make_setup(command, 60.0, FILES).key
    assert make_setup(command, 90.0, {**FILES, "train.py": "another"}).key == key
    assert make_setup(command, 60.0, {**FILES, "requirements.txt": "another"}).key != key
    assert make_setup(command + " ", 60.0, FILES).key != key
    without = {path: digest for path, digest in FILES.items() if path != "requirements.txt"}
    assert make_setup(command, 60.0, without).key != key
