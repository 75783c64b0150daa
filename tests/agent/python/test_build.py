"""Environments built from a project's files as they stand, and shared by jobs that each have a copy of the project."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Root
from deployer.agent.python.build import forms_of
from deployer.agent.python.editable import share_editables
from deployer.agent.python.find import resolve_python
from deployer.environment.choose import read_needs
from tests.deployer.environment.test_requirements_txt import tree_of
from tests.support.pythons import make_wheel

UV = shutil.which("uv")
INSTALLERS = [pytest.param("uv", marks=pytest.mark.skipif(UV is None, reason="no uv here")), "pip"]

BACKEND = """
import pathlib, zipfile
METADATA = "Metadata-Version: 2.1\\nName: own\\nVersion: 1.0\\nRequires-Dist: ferry-a\\n"
WHEEL = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "own-1.0.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder, "own-1.0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("own.pth", str(pathlib.Path.cwd() / "src"))
        wheel.writestr(name + "/METADATA", METADATA)
        wheel.writestr(name + "/WHEEL", WHEEL)
        wheel.writestr(name + "/RECORD", "")
    return "own-1.0-py3-none-any.whl"
build_wheel = build_editable
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "own"
version = "1.0"
dependencies = ["ferry-a"]
"""
LOCK = """version = 1
revision = 3
requires-python = ">=3.10"
[[package]]
name = "ferry-a"
version = "1.0"
source = { registry = "wheels" }
wheels = [{ path = "ferry_a-1.0-py3-none-any.whl" }]
[[package]]
name = "own"
version = "1.0"
source = { editable = "." }
dependencies = [{ name = "ferry-a" }]
[package.metadata]
requires-dist = [{ name = "ferry-a" }]
"""


class Host:
    def __init__(self, folder: Path, installer: str) -> None:
        self.folder, self.log = folder, io.BytesIO()
        path = ["/usr/bin", "/bin", *([str(Path(UV or "").parent)] if installer == "uv" else [])]
        self.env = {
            "PATH": ":".join(path),
            "HOME": str(folder),
            "TOKEN": "very-secret/word",
            "UV_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_RETRIES": "0",
        }

    def job(self, name: str, files: dict[str, str], wheels: str | None = None) -> str:
        """What a job prints that imports `own` and the distribution it needs, each with its place."""
        code = self.folder / "root/jobs" / name / "code"
        for path, text in files.items():
            (code / path).parent.mkdir(parents=True, exist_ok=True)
            (code / path).write_text(text)
        if not (self.folder / "wheels").is_dir():
            make_wheel(self.folder / "wheels", "ferry_a", "1.0")
        shutil.copytree(self.folder / "wheels", code / "wheels")
        spec = read_needs(tree_of(code), None).spec()._replace(wheels=wheels)
        self.log = io.BytesIO()
        python = resolve_python(spec, str(code), Root(str(self.folder / "root")), self.env, self.log)
        program = "import ferry_a, own; print(ferry_a.version, own.value)"
        env = {"TORCHFERRY_RUN_DIR": str(code.parent)}
        return subprocess.check_output([python, "-c", program], text=True, env=env, cwd="/").strip()

    @property
    def has_built(self) -> bool:
        return b"building the environment" in self.log.getvalue()


def own(value: int, **files: str) -> dict[str, str]:
    return {"src/own/__init__.py": f"value = {value}\n", "pyproject.toml": PROJECT, "backend.py": BACKEND, **files}


LINES = "--find-links ./wheels\n-r more.txt\t# ours\n-e \\\n  .\n"  # uv does not join lines after an option


@pytest.mark.parametrize("installer", INSTALLERS)
def test_an_editable_project_is_each_job_s_own_in_the_environment_they_share(tmp_path: Path, installer: str) -> None:
    host = Host(tmp_path, installer)
    lines = {"requirements.txt": LINES, "more.txt": "ferry-a\n"}
    assert host.job("one", own(1, **lines)) == "1.0 1" and host.has_built
    shutil.rmtree(tmp_path / "root/jobs/one")
    assert host.job("two", own(2, **lines)) == "1.0 2" and not host.has_built
    digest = hashlib.sha256(
        (tmp_path / "root/jobs/two/code/wheels/ferry_a-1.0-py3-none-any.whl").read_bytes()
    ).hexdigest()
    hashed = {"requirements.txt": f"-f wheels\nferry-a==1.0 \\\n    --hash=sha256:{digest}\n", "own.py": "value = 3\n"}
    code = tmp_path / "root/jobs/three/code"
    with pytest.raises(subprocess.CalledProcessError):
        host.job("three", hashed)  # `own` is not installed: there is none
    assert host.has_built and b"Installed" in host.log.getvalue().title() and code.is_dir()


@pytest.mark.skipif(UV is None, reason="no uv here")
def test_uv_installs_what_it_has_locked(tmp_path: Path) -> None:
    host = Host(tmp_path, "uv")
    assert host.job("one", own(1, **{"uv.lock": LOCK})) == "1.0 1" and host.has_built
    assert host.job("two", own(2, **{"uv.lock": LOCK})) == "1.0 2" and not host.has_built
    changed = own(3, **{"uv.lock": LOCK, "pyproject.toml": PROJECT + "[tool.ruff]\nline-length = 9\n"})
    assert host.job("three", changed) == "1.0 3" and not host.has_built


@pytest.mark.skipif(UV is None, reason="no uv here")
def test_a_lock_is_installed_from_wheels_of_one_s_own(tmp_path: Path) -> None:
    host = Host(tmp_path, "uv")
    make_wheel(tmp_path / "shipped", "ferry_a", "1.0")
    lock = LOCK.replace('registry = "wheels"', 'registry = "https://127.0.0.1:9/simple"')
    lock = "".join(line for line in lock.splitlines(keepends=True) if not line.startswith("wheels"))
    code = own(1, **{"uv.lock": lock})
    assert host.job("one", code, wheels=str(tmp_path / "shipped")) == "1.0 1"


def test_a_value_that_a_file_refers_to_stays_out_of_the_log(tmp_path: Path) -> None:
    host = Host(tmp_path, "pip")
    del host.env["PIP_NO_INDEX"]
    url = "https://u:${TOKEN}@127.0.0.1:9/${TOKEN}/ferry_a-1.0-py3-none-any.whl?t=${TOKEN}"
    with pytest.raises(AgentError) as caught:
        host.job("one", own(1, **{"requirements.txt": f"ferry-a @ {url}\n"}))
    assert b"secret" not in host.log.getvalue() and "secret" not in str(caught.value.message)
    assert b"****" in host.log.getvalue()


def test_each_line_of_a_value_is_hidden_however_it_is_written() -> None:
    value = 'first-line\n  a "quoted" one\r\nx\n'
    for said in (value, repr(value), json.dumps({"error": value}), quote(value, safe=""), "got a 'a \"quoted\" one'"):
        for line in said.encode().splitlines(keepends=True):
            for form in forms_of(value):
                line = line.replace(form, b"****")
            assert b"first" not in line and b"quoted" not in line, said
    assert b"x" not in forms_of(value) and forms_of("abc") == []


def test_a_finder_of_setuptools_finds_each_job_s_own(tmp_path: Path) -> None:
    site = tmp_path / "env/lib/python3/site-packages"
    site.mkdir(parents=True)
    first = tmp_path / "jobs/it's 1/code"
    for job in ("it's 1", "2"):
        (tmp_path / "jobs" / job / "code/lib").mkdir(parents=True)
        (tmp_path / "jobs" / job / "code/lib/own.py").write_text(f"value = {job[-1]}\n")
    make = "import sys; from setuptools.command.editable_wheel import _finder_template as made; sys.stdout.write(made("
    make += f"'__own_finder', {{'own': {str(first / 'lib/own.py')!r}}}, {{}}))"
    # in a process of its own: setuptools wants to be imported before distutils
    template = subprocess.check_output([sys.executable, "-c", make], text=True)
    (site / "__own_finder.py").write_text(template)
    (site / "own.pth").write_text("import __own_finder; __own_finder.install()\n")
    (tmp_path / "cache.py").hardlink_to(site / "__own_finder.py")
    share_editables(str(tmp_path / "env"), str(first), frozenset())
    program = f"import site; site.addsitedir({str(site)!r}); import own; print(own.value)"
    for job in ("it's 1", "2"):
        env = {"TORCHFERRY_RUN_DIR": str(tmp_path / "jobs" / job)}
        assert subprocess.check_output([sys.executable, "-c", program], env=env, text=True) == job[-1] + "\n"
    assert (tmp_path / "cache.py").read_text() == template


def test_an_editable_install_that_only_one_job_could_use_is_refused(tmp_path: Path) -> None:
    site, code = tmp_path / "env/lib/python3/site-packages", tmp_path / "jobs/1/code"
    site.mkdir(parents=True)
    code.mkdir(parents=True)
    (site / "odd.py").write_text(f"# built in {code}\n")
    with pytest.raises(AgentError, match=r"points to the folder of the first job in odd\.py") as caught:
        share_editables(str(tmp_path / "env"), str(code), frozenset())
    assert "without -e" in caught.value.hint
    (site / "odd.py").unlink()
    (code / "x.cpython-311.so").write_text("")
    share_editables(str(tmp_path / "env"), str(code), frozenset(["x.cpython-311.so"]))
    with pytest.raises(AgentError, match=r"builds x\.cpython-311\.so into the project's own folder"):
        share_editables(str(tmp_path / "env"), str(code), frozenset())
