"""The wheel, built and installed elsewhere: everything that the command needs is in it, agent and trainer too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

WHERE = """
import deployer, torchferry, trainer
from torchferry import launch
print(deployer.__file__, trainer.__file__, torchferry.__file__)
"""

CONFIG = """
from trainer.schema import Config, DataConfig, ModelConfig, RunConfig, TargetConfig, TrainConfig

config = Config(
    run=RunConfig(name="wheel"),
    target=TargetConfig(gpu_ranks=[0], device="cpu"),
    model=ModelConfig(family="qwen3", hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1),
    data=DataConfig(train=["rows.jsonl"], eval_fraction=0.0, seq_len=32),
    train=TrainConfig(steps=2, micro_batch_size=1, precision="fp32"),
)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's project whose own ignored .venv has the wheel; what it requires is lent from this interpreter."""
    built, source = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("source") / "torchferry"
    for name in ("deployer", "trainer"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("deploy.py", "torchferry.py", "train.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    _check(subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True))
    (wheel,) = built.glob("*.whl")

    folder = tmp_path_factory.mktemp("elsewhere") / "project"
    venv.create(folder / ".venv", with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / ".venv"), "--quiet", "--disable-pip-version-check"]
    install = ["install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    _check(subprocess.run([*pip, *install], cwd=built, env=_clean(), capture_output=True, text=True))
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (_site(folder) / "lent.pth").write_text("\n".join(lent))
    (folder / ".gitignore").write_text(".venv/\n")
    (folder / "hello.py").write_text("import sys; print('hello from', *sys.argv[1:])")
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    return folder


def test_installed_command_runs_a_program_from_another_project(project: Path, tmp_path: Path) -> None:
    assert "Usage: torchferry" in _torchferry(project, tmp_path, "--help")
    assert f" {(_site(project) / 'deploy.py').resolve()} 2>" in _torchferry(project, tmp_path, "completion", "bash")
    where = subprocess.run(
        [project / ".venv/bin/python", "-c", WHERE],
        cwd=tmp_path,
        env=_clean(),
        capture_output=True,
        text=True,
    )
    assert all(Path(path).is_relative_to(_site(project)) for path in _check(where).split())

    said = _torchferry(project, tmp_path, "run", "--remote-root", "root", "--", "python", "hello.py", "afar")
    assert "hello from afar" in said
    (job,) = (tmp_path / "root" / "jobs").iterdir()
    assert sorted(path.name for path in (job / "code").iterdir()) == [".gitignore", "hello.py"]


def test_installed_command_ships_its_trainer(project: Path, tmp_path: Path) -> None:
    (project / "config.py").write_text(CONFIG)
    (project / "rows.jsonl").write_text('{"prompt": "one two", "completion": "three"}\n' * 8)
    python = str(project / ".venv/bin/python")
    said = _torchferry(project, tmp_path, "config.py", "--remote-root", "root", "--no-pull", "--python", python)
    (job,) = (tmp_path / "root" / "jobs").iterdir()
    assert (job / "checkpoints" / "step_000002" / "COMPLETE").exists(), said
    assert _modules(job / "lib" / "trainer") == _modules(_site(project) / "trainer") == _modules(REPO / "trainer")


def _torchferry(project: Path, tmp_path: Path, *words: str) -> str:
    """What the installed command says. `root` among its words is a folder of this test's."""
    words = tuple(str(tmp_path / "root") if word == "root" else word for word in words)
    env = {**_clean(), "TORCHFERRY_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    command = [str(project / ".venv/bin/torchferry"), *words]
    return _check(subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=HANG_S))


def _clean() -> dict[str, str]:
    """This environment without what would lead to the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _site(project: Path) -> Path:
    (site,) = (project / ".venv").glob("lib/python*/site-packages")
    return site


def _modules(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
