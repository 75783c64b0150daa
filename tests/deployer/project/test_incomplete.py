"""What is here in part only is told before it is sent: pointers, empty submodules, sparse checkouts, stray links."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from deployer.cli import cli
from deployer.project.manifest import scan

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4920706\n"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def warnings(project: Path, **more: object) -> list[str]:
    return list(scan(project, hash_cache=None, **more).warnings)


def test_pointer_in_place_of_a_file_is_told(tmp_path: Path) -> None:
    project = tmp_path
    write(project, **{f"m/{n}.safetensors": LFS.format(str(n) * 64) for n in range(5)})
    write(project, docs=LFS.format("a" * 64) + "x" * 1024, plain="version 1")
    lfs = "m/0.safetensors, m/1.safetensors, m/2.safetensors and 2 more: each only points to the content"
    assert warnings(project) == [f"{lfs}, which is not here: git lfs pull"]
    write(project, unlocked="/annex/objects/SHA256E-s31390--f50d.bin\n")
    assert warnings(project)[1] == "unlocked only points to the content, which is not here: git annex get"


def test_submodule_that_was_never_brought_is_told(tmp_path: Path) -> None:
    for name in ("inner", "outer"):
        git(tmp_path, "init", "-q", name)
        write(tmp_path / name, a="")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", "a")
    git(tmp_path / "outer", "submodule", "add", "-q", str(tmp_path / "inner"), "libs/inner")
    git(tmp_path / "outer", "commit", "-qm", "b")
    assert warnings(tmp_path / "outer") == []
    git(tmp_path, "clone", "-q", str(tmp_path / "outer"), "clone")
    assert warnings(tmp_path / "clone") == ["libs/inner is an empty submodule: git submodule update --init"]
    git(tmp_path / "clone", "submodule", "update", "--init")
    assert warnings(tmp_path / "clone") == []


def test_sparse_checkout_is_told_and_a_deleted_file_is_not(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", ".")
    write(tmp_path, a="", b="", **{"in/a": "", "out/a": "", "out/b": ""})
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    (tmp_path / "b").unlink()
    assert warnings(tmp_path) == []
    git(tmp_path, "checkout", "b")
    git(tmp_path, "sparse-checkout", "set", "in")
    (told,) = warnings(tmp_path)
    assert told == "out/a, out/b: each is not here: a sparse checkout (git sparse-checkout disable brings all)"
    git(tmp_path, "sparse-checkout", "disable")
    assert warnings(tmp_path) == []


def test_link_to_what_does_not_travel_is_told(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", ".")
    write(tmp_path, **{".gitignore": "data/\n", "data/rows": "", "src/a.py": "", ".git/annex/objects/x": ""})
    links = {"to_file": "src/a.py", "to_folder": "src", "src/up": "..", "through": "to_folder/a.py"}
    stray = {"locked.bin": ".git/annex/objects/x", "nowhere": "gone", "rows": "data/rows", "src/data": "../data"}
    for name, target in (links | stray).items():
        (tmp_path / name).symlink_to(target)
    assert warnings(tmp_path) == ["locked.bin, nowhere, rows and 1 more: each is a link to what does not travel"]
    assert warnings(tmp_path, included=["data"]) == ["locked.bin, nowhere: each is a link to what does not travel"]
    (tmp_path / "out").symlink_to("/nowhere")
    assert "out is a link out of the project, to /nowhere; only the link goes" in warnings(tmp_path)
    assert len(warnings(tmp_path, included=["out"])) == 1, "its target travels"


def test_warning_comes_with_a_dry_run_and_names_the_include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q", ".")
    write(
        tmp_path,
        **{".gitignore": "model/\n", "model/w.safetensors": LFS.format("a" * 64), "w.bin": LFS.format("b" * 64)},
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["run", "--dry-run", "--include", "model", "--", "true"])
    points = "only points to the content, which is not here: git lfs pull"
    assert result.stderr.splitlines() == [
        f"warning: w.bin {points}",
        f"warning: --include model: w.safetensors {points}",
    ]
