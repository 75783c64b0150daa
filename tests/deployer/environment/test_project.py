"""pyproject.toml and uv.lock as the answer to what a job needs, and the files of other tools."""

from __future__ import annotations

import pytest

from deployer.agent.python.foreign import FILES
from deployer.agent.python.spec import PythonSpec
from deployer.environment.choose import read_needs
from deployer.errors import UsageError
from tests.deployer.environment.test_requirements_txt import tree_of

PROJECT = """[project]
name = 'Own.Name'
requires-python = '>=3.10'
dependencies = ['numpy>=1', 'tomli; python_version<"3.11"']
"""
BUILD = "[build-system]\nrequires=['hatchling']\n"
LOCK = """version = 1
requires-python = ">=3.10"
[[package]]
name = "numpy"
version = "1.26.4"
source = { registry = "https://h.example/simple" }
[[package]]
name = "bee"
version = "0.1"
source = { git = "https://h.example/bee.git?rev=v1#0123" }
[[package]]
name = "two"
version = "1.0"
source = { registry = "https://h.example/simple" }
[[package]]
name = "two"
version = "2.0"
source = { registry = "https://h.example/simple" }
[[package]]
name = "member"
version = "0.0"
source = { editable = "packages/member" }
[[package]]
name = "lone"
version = "0.0"
source = { directory = "lone" }
"""


def spec_of(folder, files: dict[str, str], named: str | None = None) -> PythonSpec:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return read_needs(tree_of(folder), named).spec()


def test_a_project_s_dependencies_are_what_the_job_needs(tmp_path):
    spec = spec_of(tmp_path, {"pyproject.toml": PROJECT})
    assert spec == PythonSpec(requires=("numpy>=1", 'tomli; python_version < "3.11"'), python=">=3.10", paths=(".",))


def test_a_project_with_a_build_system_is_installed_from_its_src(tmp_path):
    spec = spec_of(tmp_path, {"pyproject.toml": BUILD + PROJECT, "src/own/__init__.py": ""})
    assert (spec.lock, spec.requires, spec.paths) == ("pyproject.toml", (), ("src",))
    assert spec.locked == ("numpy>=1", 'tomli; python_version < "3.11"') and not spec.unchecked


@pytest.mark.parametrize(
    "more", ["dynamic=['dependencies']\n", "dynamic=['optional-dependencies']\n", "[project.entry-points.x]\na='b'\n"]
)
def test_what_only_a_build_tells_counts_as_unmet(tmp_path, more):
    spec = spec_of(tmp_path, {"pyproject.toml": BUILD + "[project]\nname='a'\n" + more})
    assert spec.unchecked[0].endswith(": only a build tells what it needs)")


def test_settings_of_tools_alone_are_no_environment(tmp_path):
    assert spec_of(tmp_path, {"pyproject.toml": "[tool.ruff]\nx=1\n[tool.project]\n"}) == PythonSpec()
    with pytest.raises(UsageError, match=r"pyproject.toml has no \[project\]"):
        spec_of(tmp_path, {}, "pyproject.toml")


def test_requirements_txt_comes_first_and_an_option_decides(tmp_path):
    files = {"requirements.txt": "attrs\n", "gpu.txt": "click\n", "pyproject.toml": PROJECT, "uv.lock": LOCK}
    assert spec_of(tmp_path, files).locked == ("attrs",)
    chosen = {
        name: read_needs(tree_of(tmp_path), name).spec() for name in ("gpu.txt", "pyproject.toml", "uv.lock", "none")
    }
    assert {name: spec.lock for name, spec in chosen.items()} == {
        "gpu.txt": "gpu.txt",
        "pyproject.toml": "uv.lock",
        "uv.lock": "uv.lock",
        "none": None,
    }
    assert chosen["none"] == PythonSpec()


def test_what_uv_has_locked_is_what_is_asked_for(tmp_path):
    project = PROJECT.replace("'numpy>=1'", "'numpy[x]>=1', 'bee', 'two>1', 'member', 'lone', 'unknown'")
    member = "[project]\nname='member'\ndependencies=['numpy']\n"
    files = {
        "pyproject.toml": project,
        "uv.lock": LOCK,
        "packages/member/pyproject.toml": member,
        "packages/member/src/m.py": "",
    }
    spec = spec_of(tmp_path, files)
    assert spec.lock == "uv.lock" and spec.requires == () and spec.unchecked == ("uv.lock lone",)
    assert spec.paths == (".", "packages/member/src")
    assert spec.locked == (
        "numpy[x]==1.26.4",
        "bee @ git+https://h.example/bee.git@0123",
        "two>1",
        "numpy==1.26.4",
        "unknown",
        'tomli; python_version < "3.11"',
    )
    assert spec_of(tmp_path, {"pyproject.toml": project + "[tool.ruff]\na=1\n"}).key == spec.key
    assert spec_of(tmp_path, {"uv.lock": LOCK + "\n"}).key != spec.key


def test_extras_may_name_each_other(tmp_path):
    project = (
        PROJECT
        + "[project.optional-dependencies]\nall=['own-name[a,B_c]']\na=['click', 'own_name[all]']\nb-c=['rich']\n"
    )
    files = {"requirements.txt": "-e .[all]\n", "pyproject.toml": project}
    assert {"click", "rich"} < set(spec_of(tmp_path, files).locked)
    with pytest.raises(UsageError, match=r"pyproject.toml has no optional dependencies gone"):
        spec_of(tmp_path, {"requirements.txt": "-e .[gone]\n"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[project]\nname=\n", "pyproject.toml is no TOML: Invalid value (at line 2"),
        ("[project]\ndependencies='a'\n", "pyproject.toml: dependencies is 'a', not a list of texts"),
        ("[project]\ndependencies=['a', 'b c']\n", "pyproject.toml: project.dependencies[1]: b c is no requirement"),
        ("[project]\nrequires-python='three'\n", "pyproject.toml: project.requires-python is 'three'"),
        ("[project]\nrequires-python=3\n", "pyproject.toml: project.requires-python is 3"),
        ("[project]\na=" + "[" * 5000 + "\n", "pyproject.toml is no TOML"),
        ("[project]\n[tool]\nuv=1\n", "pyproject.toml: uv is 1, not a table"),
        (PROJECT + "[tool.uv.sources]\nnumpy={git='x'}\n", "pyproject.toml takes numpy from tool.uv.sources"),
    ],
)
def test_a_project_that_cannot_be_read_is_one_line(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        spec_of(tmp_path, {"pyproject.toml": text}, "pyproject.toml")
    assert message in caught.value.message and "\n" not in caught.value.message and len(caught.value.message) < 300


@pytest.mark.parametrize("text", ["", "package=1\n", "[[package]]\nname='a'\nsource=1\n", "package=[1]\n"])
def test_a_lock_that_is_none_is_said(tmp_path, text):
    spec = None
    try:
        spec = spec_of(tmp_path, {"pyproject.toml": PROJECT, "uv.lock": text})
    except UsageError as error:
        assert error.message == "uv.lock is no lock of uv" and error.hint == "uv lock writes it anew"
    assert (spec is not None) == (text == "")


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_tools_are_refused_by_name_with_advice(tmp_path, name):
    assert spec_of(tmp_path, {name: "x"}) == PythonSpec()  # left alone until they are named, or a module is missing
    with pytest.raises(UsageError, match=f"^{name} is a .*, which is not read here$") as caught:
        spec_of(tmp_path, {}, name)
    assert "--python" in caught.value.hint or "requirements.txt" in caught.value.hint
