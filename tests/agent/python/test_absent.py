"""A module that was missing at a job's end: the project's file that asks for it is named, with what makes it count."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.agent.python.absent import explain_module
from deployer.agent.python.spec import PythonSpec

NOTHING = PythonSpec()


@pytest.mark.parametrize(
    ("files", "module", "spec", "line", "hint"),
    [
        (
            {},
            "yaml",
            NOTHING,
            "/py has no pyyaml, and no file of the project asks for it",
            "add pyyaml to requirements.txt",
        ),
        (
            {"environment.yml": "- PyYAML=6"},
            "yaml",
            NOTHING,
            "environment.yml names pyyaml, but",
            "conda env create -f environment.yml",
        ),
        ({"Pipfile": "flash_attn = '*'"}, "flash_attn.ops", NOTHING, "Pipfile names flash-attn", "pipenv requirements"),
        (
            {"requirements-gpu.txt": "wandb"},
            "wandb",
            NOTHING,
            "requirements-gpu.txt names wandb",
            "--requirements requirements-gpu.txt asks",
        ),
        (
            {"requirements.txt": "wandb"},
            "wandb",
            PythonSpec(requires=("torch>=2",), lock="requirements.txt"),
            "requirements.txt names wandb, but",
            "--requirements requirements.txt asks",
        ),
        (
            {"requirements.txt": "Wandb[x]"},
            "wandb",
            PythonSpec(locked=("Wandb[x]",), lock="requirements.txt"),
            "requirements.txt asks for wandb, and /py has",
            "add the one that holds it",
        ),
        (
            {"pyproject.toml": "dev = ['wandb']"},
            "wandb",
            PythonSpec(lock="pyproject.toml"),
            "pyproject.toml names wandb, but not among project.dependencies",
            "-e .[EXTRA]",
        ),
        (
            {"pyproject.toml": "dependencies = ['wandb']"},
            "wandb",
            NOTHING,
            "pyproject.toml names wandb, but what it lists was not asked",
            "--requirements pyproject.toml asks for what its project.dependencies list",
        ),
        (
            {"requirements.txt": "a", "uv.lock": 'name = "wandb"'},
            "wandb",
            PythonSpec(lock="requirements.txt"),
            "uv.lock names wandb",
            "--requirements uv.lock asks",
        ),
        ({"requirements.txt": "# wandb\nwandb-core\nmy-wandb\n"}, "wandb", NOTHING, "/py has no wandb", "add wandb"),
        (
            {"tools/lib/own.py": ""},
            "own",
            NOTHING,
            "own is the project's own, at tools/lib/own",
            "--env PYTHONPATH=tools/lib ",
        ),
        ({"own/x.py": ""}, "own", NOTHING, "own is the project's own, at own,", "--env PYTHONPATH=. "),
    ],
)
def test_why_a_module_was_missing(tmp_path: Path, files, module, spec, line, hint) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    absent = explain_module(module, str(tmp_path), spec, "/py")
    assert absent is not None
    assert absent.line.startswith(line) and hint in absent.hint + " ", absent


def test_what_a_found_package_lacks_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("")
    assert explain_module("own.gone", str(tmp_path), NOTHING, "/py") is None
    assert explain_module("own", str(tmp_path), NOTHING, "/py") is not None
