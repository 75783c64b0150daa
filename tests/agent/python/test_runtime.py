"""Which Python a job gets on the host: found by what is installed there, or built once for several launches."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from deployer.agent import checkpy
from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Root
from deployer.agent.python.find import candidates, find_python, resolve_python
from deployer.agent.python.spec import PythonSpec
from tests.support.pythons import make_python, make_wheel


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


def spec(*requires: str, **more: Any) -> PythonSpec:
    return PythonSpec(requires=requires, **more)


def test_the_session_s_environment_comes_first_when_it_has_what_is_needed(tmp_path: Path, root: Root) -> None:
    python = make_python(tmp_path / "own", ferry_a="1.5")
    env = {"PATH": "/usr/bin", "VIRTUAL_ENV": str(tmp_path / "own")}
    assert find_python(spec("ferry-a>=1.2,<2"), env=env, root=root) == python


def test_an_interpreter_that_lacks_something_is_passed_over(tmp_path: Path, root: Root) -> None:
    make_python(tmp_path / "old", ferry_a="1.1")
    python = make_python(tmp_path / "new", ferry_a="1.2")
    env = {"VIRTUAL_ENV": str(tmp_path / "old"), "CONDA_PREFIX": str(tmp_path / "new"), "PATH": ""}
    assert find_python(spec("ferry-a>=1.2"), env=env, root=root) == python


def test_python3_on_the_path_serves_a_job_without_requirements(tmp_path: Path, root: Root) -> None:
    make_python(tmp_path / "own")
    env = {"PATH": str(tmp_path / "own/bin")}
    found = resolve_python(spec(), str(tmp_path), root, env, io.BytesIO())
    assert found == str(tmp_path / "own/bin/python3")


def test_what_every_interpreter_lacks_is_told(tmp_path: Path, root: Root) -> None:
    python = make_python(tmp_path / "own", ferry_a="1.1")
    with pytest.raises(AgentError) as caught:
        find_python(spec("ferry-a>=2", "ferry_b"), env={"VIRTUAL_ENV": str(tmp_path / "own"), "PATH": ""}, root=root)
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"{python} (Python {version}) lacks ferry-a>=2 (has 1.1), ferry_b (not installed)" in caught.value.message
    assert "--python" in caught.value.hint and caught.value.kind == "host"


@pytest.mark.parametrize("form", ["own/bin/python", "own"])
def test_an_explicit_interpreter_may_be_named_by_its_environment_s_folder(
    tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    python = make_python(tmp_path / "own", ferry_a="1.0")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_python(spec("ferry-a", explicit=f"~/{form}"), "", root, {}, io.BytesIO()) == python


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        ("/nowhere/python", "/nowhere/python does not exist on this host"),
        ("/bin/true", "--python /bin/true does not run as Python 3.8 or newer"),
        (sys.executable, r"--python .* lacks ferry-none>=3 \(not installed\)"),
    ],
)
def test_an_explicit_interpreter_that_does_not_do_is_an_error(root: Root, explicit: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        find_python(spec("ferry-none>=3", explicit=explicit), env={"PATH": ""}, root=root)


@pytest.mark.parametrize(
    ("script", "env", "last"),
    [
        (None, {"PYTHONPATH": "{}"}, "'enum'"),  # the old backport
        (None, {"PYTHONHOME": "{}/nowhere"}, "ModuleNotFoundError: No module named 'encodings'"),
        ("#!/bin/sh\necho 'load a module first' >&2\nexit 1\n", {}, "load a module first"),
        ("#!/bin/sh\nexit 3\n", {}, "exit status 3, without a word"),
        ("#!/nowhere/python\n", {}, "No such file or directory"),
        (
            "#!/bin/sh\necho 'libpython3.11.so.1.0: cannot open shared object file' >&2\nexit 127\n",
            {},
            "libpython3.11.so",
        ),
        ("#!/bin/sh\necho 'it is Python 3.6.8' >&2\nexit 1\n", {}, "it is Python 3.6.8"),
    ],
)
def test_an_interpreter_that_does_not_run_is_told_with_its_last_words(
    tmp_path: Path, root: Root, script: str | None, env: dict[str, str], last: str
) -> None:
    (tmp_path / "enum.py").write_text("class Enum: pass\n")
    python = tmp_path / "python3"
    if script is None:
        python.symlink_to(sys.executable)
    else:
        python.write_text(script)
        python.chmod(0o755)
    here = {"PATH": "", **{name: value.format(tmp_path) for name, value in env.items()}}
    with pytest.raises(AgentError) as caught:
        find_python(spec(explicit=str(python)), env=here, root=root)
    assert last in caught.value.message and str(python) in caught.value.message


def test_host_whose_every_interpreter_is_broken_says_what_they_said(tmp_path: Path, root: Root) -> None:
    (tmp_path / "enum.py").write_text("class Enum: pass\n")
    with pytest.raises(AgentError, match=r"no Python 3.8 or newer runs .*AttributeError: module 'enum'"):
        resolve_python(spec(), str(tmp_path), root, {"PATH": "/usr/bin", "PYTHONPATH": str(tmp_path)}, io.BytesIO())


def test_a_marker_for_another_python_does_not_count(tmp_path: Path, root: Root) -> None:
    requires = ["ferry-none>=1; python_version < '3'", "pytest[extra]>=1"]
    assert find_python(spec(*requires, explicit=sys.executable), env={}, root=root) == sys.executable


def test_the_answer_of_last_time_serves_until_packages_change(tmp_path: Path, root: Root) -> None:
    make_python(tmp_path / "own", ferry_a="1.5")
    wanted, env = spec("ferry-a"), {"VIRTUAL_ENV": str(tmp_path / "own"), "PATH": ""}
    bin = tmp_path / "own" / "bin"
    (bin / "python").rename(bin / "python-itself")
    (bin / "python").write_text(f'#!/bin/sh\necho >> {tmp_path}/starts\nexec {bin}/python-itself "$@"\n')
    (bin / "python").chmod(0o755)
    found = find_python(wanted, env=env, root=root)
    starts = (tmp_path / "starts").read_text()
    assert find_python(wanted, env=env, root=root) == found
    assert (tmp_path / "starts").read_text() == starts
    next(tmp_path.glob("own/lib/*/site-packages/ferry_a*")).rename(tmp_path / "gone")
    with pytest.raises(AgentError):
        find_python(wanted, env=env, root=root)


def test_a_link_to_the_same_interpreter_is_asked_once(tmp_path: Path) -> None:
    make_python(tmp_path / "own")
    (tmp_path / "link").symlink_to("own")
    paths = candidates({"VIRTUAL_ENV": str(tmp_path / "own"), "PATH": str(tmp_path / "link/bin")})
    assert [p for p in paths if p.startswith(str(tmp_path))] == [str(tmp_path / "own/bin/python")]


def test_versions_compared_without_packaging_agree_with_packaging() -> None:
    versions = ["1", "1.2", "1.2.0", "1.10", "2.0.1", "0.4.3", "1.2.3"]
    operators = [">=", "<=", "==", "!=", ">", "<", "~="]
    for have, wanted, operator in itertools.product(versions, ["1.2", "1.2.3", "2.0"], operators):
        test = checkpy.parse_simply(f"Some.Name[x] {operator} {wanted}").fits
        assert test(have) == SpecifierSet(operator + wanted).contains(have), (have, operator, wanted)
    for have, clause in itertools.product(versions, ["==1.*", "!=1.2.*", ">=1,<2", ""]):
        assert checkpy.parse_simply(f"a{clause}").fits(have) == SpecifierSet(clause).contains(have), (have, clause)


@pytest.mark.parametrize(("version", "fits"), [("2.11.0a0+nv25", True), ("2.11.0+cu130", True), ("2.11.0rc1", False)])
def test_a_vendor_s_build_counts_as_its_release(version: str, fits: bool) -> None:
    assert checkpy.parse_requirement("torch>=2.11", checkpy.find_parser()).fits(version) == fits


def test_the_check_runs_on_python_3_8(tmp_path: Path) -> None:
    old = shutil.which("python3.8")
    if old is None or subprocess.run([old, "-V"]).returncode != 0:  # a shim may stand for none
        pytest.skip("no Python 3.8 here")
    requires = [
        "ferry-none>=1; python_version < '4'",
        "ferry-none; sys_platform == 'win32'",
        "a; python_version ~= '3.8'",
    ]
    question = json.dumps({"requires": requires, "constraints": requires, "python": ">=3.8"}).encode()
    answer = json.loads(
        subprocess.run([old, "-S", checkpy.__file__], input=question, check=True, capture_output=True).stdout
    )
    assert answer["unmet"] == [f"{requires[0]} (not installed)", f"{requires[2]} (cannot be checked)"]
    assert answer["python_fits"]


# --- building ---------------------------------------------------------------------------------------------------------


def build(folder: str, number: int) -> None:
    wanted = spec("ferry-b", lock="requirements.txt", wheels=folder + "/wheels")
    with Path(folder, f"log{number}").open("wb") as log:
        python = resolve_python(wanted, folder, Root(folder + "/root"), {"PATH": "/usr/bin:/bin"}, log)
    Path(folder, f"python{number}").write_text(python)


def test_three_launches_at_once_build_one_environment(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "ferry_a", "1.0")
    make_wheel(tmp_path / "wheels", "ferry_b", "2.0")
    (tmp_path / "requirements.txt").write_text("ferry-a==1.0  # pinned\n")
    context = multiprocessing.get_context("fork")
    launches = [context.Process(target=build, args=(str(tmp_path), n)) for n in range(3)]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join()
    pythons = {(tmp_path / f"python{n}").read_text() for n in range(3)}
    assert len(pythons) == 1
    program = "import ferry_a, ferry_b; print(ferry_a.version, ferry_b.version)"
    assert subprocess.check_output([pythons.pop(), "-c", program], text=True) == "1.0 2.0\n"
    logs = [(tmp_path / f"log{n}").read_text() for n in range(3)]
    assert sorted(log.count("building the environment") for log in logs) == [0, 0, 1]


def test_a_build_that_fails_says_what_is_missing_and_is_tried_again(tmp_path: Path, root: Root) -> None:
    (tmp_path / "wheels").mkdir()
    wanted, log = spec("ferry-none", wheels=str(tmp_path / "wheels")), io.BytesIO()
    with pytest.raises(AgentError) as caught:
        resolve_python(wanted, "", root, {"PATH": "/usr/bin:/bin"}, log)
    assert (
        "pip install ended with 1" in caught.value.message
        and "lacks ferry-none (not installed)" in caught.value.message
    )
    assert "--wheels" in caught.value.hint
    assert b"No matching distribution found for ferry-none" in log.getvalue()
    assert not list(Path(root.envs).glob("*/COMPLETE"))
