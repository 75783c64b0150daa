"""A host's disk that fills up while a launch is being sent: the cause is named, and what was half made is undone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ferry import Ferry


@pytest.fixture
def small(ferry: Ferry) -> Iterator[Ferry]:
    """A client of a host whose root has 120 MB and 2,000 inodes, and the agent in it."""
    ferry.root.mkdir()
    options = "size=120m,nr_inodes=2000"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", ferry.root], check=False).returncode:
        pytest.skip("mounting needs root")
    for number in range(150):
        ferry.write(f"f{number}", str(number))
    ferry.run("ps", *ferry.where())
    yield ferry
    subprocess.run(["umount", "-l", ferry.root], check=True)


def listing(root: Path) -> set[str]:
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if "agent" not in path.parts}
    return {
        name for name in found if "/" in name and not name.startswith(("filler", "store/"))
    }  # locks and empty folders


def leave_inodes(root: Path, count: int) -> None:
    (root / "filler").mkdir(exist_ok=True)
    for path in (root / "filler").iterdir():
        path.unlink()
    for number in range(os.statvfs(root).f_favail - count):
        (root / "filler" / str(number)).touch()


def test_launch_without_an_inode_left_says_so_and_leaves_nothing(small: Ferry) -> None:
    for count in (3, 75, 140):
        leave_inodes(small.root, count)
        before = listing(small.root)
        done = small.run("run", *small.where(), "--no-pull", "--", "true")
        said = done.stderr.decode()
        errors = [line for line in said.splitlines() if line.startswith("Error: ")]
        assert done.returncode == 125 and len(errors) == 1, (count, said)
        assert "inode" in errors[0] and f" on {small.root} (tmpfs)" in errors[0], (count, said)
        assert "Traceback" not in said and "--remote-root" in said
        assert (listing(small.root), small.job_ids()) == (before, []), count
    leave_inodes(small.root, 1000)
    assert small.run("run", *small.where(), "--no-pull", "--", "true").returncode == 0


def test_launch_of_more_than_the_disk_holds_says_how_much_and_leaves_nothing(small: Ferry) -> None:
    before = listing(small.root)
    (small.project / "big").write_bytes(os.urandom(90_000_000))  # the store takes it, and the job's copy has no room
    done = small.run("run", *small.where(), "--no-pull", "--", "true")
    said = done.stderr.decode()
    assert done.returncode == 125 and said.count("Error: ") == 1, said
    assert " MB are free" in said and f" on {small.root} (tmpfs)" in said, said
    assert (listing(small.root), small.job_ids()) == (before, [])
