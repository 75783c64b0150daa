"""Defaults of files: which table counts for which host, and what is refused with file and key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployer.commands.defaults import ENTRIES, Defaults, keys_of, read_defaults
from deployer.commands.options import host_of
from deployer.errors import UsageError
from tests.support.ferry import REPO, Ferry

PROJECT = """\
[tool.other]
python = 3
[tool.torchferry]
host = "gpu"
python = "project"
max_runtime = "2h"
gpus = "0,1"
env = {A = "project", N = 4}
[tool.torchferry.hosts.gpu]
python = "project for gpu"
[tool.torchferry.hosts."root@10.0.0.1"]
python = "the address"
"""
USER = """\
python = "user"
queue = true
remote_root = "/user"
[hosts.gpu]
python = "user for gpu"
remote_root = "/data"
env = {A = "gpu", B = "gpu"}
wheels = "wheels"
transport = "openssh"
[hosts."10.0.0.1"]
remote_root = "/by-address"
"""


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A project, and beside it the user's config folder as conftest.py names it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "config").mkdir()
    return tmp_path


def defaults(folders: Path, project: str = PROJECT, user: str = USER) -> Defaults:
    (folders / "project" / "pyproject.toml").write_text(project)
    (folders / "config" / "config.toml").write_text(user)
    return read_defaults(folders / "project")


def values(found: Defaults, ssh: str | None) -> dict[str, Any]:
    return {name: taken.value for name, taken in found.of(ssh).items()}


def test_hosts_table_comes_before_the_general_one_and_the_projects_before_the_users(folders: Path) -> None:
    found = defaults(folders)
    assert found.host == "gpu"
    assert values(found, "gpu") == {
        "host": "gpu",
        "python": "project for gpu",
        "remote_root": "/data",
        "queue": True,
        "max_runtime": 7200.0,
        "gpus": [0, 1],
        "env.A": "gpu",
        "env.B": "gpu",
        "env.N": "4",
        "transport": "openssh",
        "wheels": str(folders / "config" / "wheels"),
    }
    places = {name: taken.where for name, taken in found.of("gpu").items()}
    user = folders / "config" / "config.toml"
    assert places["python"] == "pyproject.toml [tool.torchferry.hosts.gpu]" and places["queue"] == str(user)
    assert places["env.A"] == f"{user} [hosts.gpu]" and places["env.N"] == "pyproject.toml [tool.torchferry]"
    assert keys_of(found.of("gpu"))["target.env.N"] == "4" and "target.wheels" not in keys_of(found.of("gpu"))


def test_table_counts_that_is_called_as_the_host_was_typed(folders: Path) -> None:
    found = defaults(folders)
    for typed, python, root in (
        ("root@10.0.0.1", "the address", "/by-address"),
        ("root@10.0.0.1:22", "the address", "/by-address"),
        ("ssh -p 22 root@10.0.0.1", "the address", "/by-address"),
        ("me@10.0.0.1", "project", "/by-address"),
        ("me@gpu:7", "project for gpu", "/data"),
        ("another", "project", "/user"),
        (None, "project", "/user"),
    ):
        assert (values(found, typed)["python"], values(found, typed)["remote_root"]) == (python, root), typed
    assert "transport" not in values(found, None)  # there is no way to this machine


def test_every_entry_names_an_option_of_a_launch_and_its_key() -> None:
    from deployer.commands.key_options import KeyOption
    from deployer.commands.launch.cli import run

    options = {option.opts[0]: getattr(option, "key", "") for option in run.params}
    assert any(isinstance(option, KeyOption) for option in run.params)
    flags = {"host": "--ssh"}
    for name, entry in ENTRIES.items():
        assert options[flags.get(name, "--" + name.replace("_", "-"))] == entry.key


@pytest.mark.parametrize(
    ("project", "message", "hint"),
    [
        ("pyhton = 1", "tool.torchferry.pyhton is no default that can be given", "did you mean python?"),
        ("max-restarts = 1", "tool.torchferry.max-restarts is no default", "did you mean max_restarts?"),
        ("host_s = 1", "tool.torchferry.host_s is no default", "did you mean host"),
        ("ssh = 'a'", "tool.torchferry.ssh is no default", "did you mean host?"),
        ("secrets = ['A']", "tool.torchferry.secrets is no default", "--secret says it for each job"),
        ("env_file = 'a'", "tool.torchferry.env_file is no default", "--env-file says it for each job"),
        ("queue = 1", "tool.torchferry.queue is '1', expected true or false", ""),
        ("max_restarts = true", "tool.torchferry.max_restarts is 'True', expected a whole number", ""),
        ("max_runtime = '2'", "tool.torchferry.max_runtime: '2' has no unit", "write 2s, 2m, 2h or 2d"),
        ("python = ['a']", "tool.torchferry.python is \"['a']\", expected text", ""),
        ("gpus = {}", "tool.torchferry.gpus is '{}', expected GPUs", ""),
        ("env = {A = true}", "tool.torchferry.env is ", ""),
        ("env = 'A=1'", "tool.torchferry.env is 'A=1', expected a table of variables", ""),
        ("device = 'tpu'", "tool.torchferry.device is 'tpu', expected auto or cuda or cpu", ""),
        ("hosts = 1", "tool.torchferry.hosts is no table", "[tool.torchferry.hosts.NAME] is a host's own"),
        ("[tool.torchferry.hosts.a]\nhost = 'b'", "tool.torchferry.hosts.a.host is no default", "the table's name"),
        ("[tool.torchferry.hosts]\na = 1", "tool.torchferry.hosts.a is no table", ""),
    ],
)
def test_what_is_no_default_is_named_with_file_and_key(folders: Path, project: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        defaults(folders, f"[tool.torchferry]\n{project}\n", "")
    assert raised.value.message.startswith(message) and raised.value.where == ("pyproject.toml",)
    assert raised.value.hint.startswith(hint)


def test_a_project_names_wheels_of_its_own_alone(folders: Path) -> None:
    (folders / "keys").mkdir()
    (folders / "project" / "link").symlink_to(folders / "keys")
    (folders / "project" / "wheels").mkdir()
    for named in (str(folders / "keys"), "../keys", "link", "~/.ssh"):
        for table in ("[tool.torchferry]", "[tool.torchferry.hosts.a]"):
            with pytest.raises(UsageError, match=r"wheels is .*, which is outside the project") as raised:
                defaults(folders, f"{table}\nwheels = '{named}'\n", "")
            assert raised.value.where == ("pyproject.toml",) and "config.toml" in raised.value.hint
    own = defaults(folders, "[tool.torchferry]\nwheels = 'wheels'\n", "")
    assert values(own, None)["wheels"] == str(folders / "project" / "wheels")
    assert values(defaults(folders, "", "wheels = '../keys'\n"), None)["wheels"].endswith("/keys")


def test_mistake_in_a_file_keeps_no_command_from_its_host(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders / "project")
    (folders / "project" / "pyproject.toml").write_text("[tool.torchferry]\npyhton = 1\n")
    access = {"ssh_key": None, "transport": None, "accept_new_host_key": False, "connect_timeout_s": None}
    host = host_of("gpu", "/r", **access)
    assert (host.ssh, host.root) == ("gpu", "/r")
    assert "no defaults are used: tool.torchferry.pyhton is no default" in capsys.readouterr().err
    (folders / "other").mkdir()
    (folders / "other" / "pyproject.toml").write_text("[tool.torchferry]\nremote_root = '/other'\n")
    assert host_of("gpu", None, project=folders / "other", **access).root == "/other"


def test_file_that_is_no_toml_is_told_with_its_line(folders: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.toml is no TOML: .*twice \(at line 3"):
        defaults(folders, "", "[hosts.a]\npython = 'p'\n[hosts.a]\n")
    assert defaults(folders, "[tool.other]\nbroken", "") == Defaults()  # another tool's affair


def test_launch_takes_them_below_its_command_line_and_its_config(ferry: Ferry, tmp_path: Path) -> None:
    config = tmp_path / "own-config"
    config.mkdir()
    ferry.env["TORCHFERRY_CONFIG_DIR"] = str(config)
    (config / "config.toml").write_text(
        f"remote_root = '{ferry.root}'\nmax_restarts = 1\nenv = {{A = 'user', B = '2'}}\n"
    )
    ferry.write("pyproject.toml", "[tool.torchferry]\nenv = {A = 'project', C = '3'}\nsetup = 'echo set up'\n")
    shown = "import os; print(*(os.environ[n] for n in 'ABC'))"
    done = ferry.run("run", "--env", "C=typed", "--no-pull", "--", "python", "-c", shown)
    assert done.returncode == 0 and done.stdout == b"project 2 typed\n", done.stderr.decode()
    assert b"\nset up\n" in done.stderr and len(ferry.job_ids()) == 1  # in the root that the file names
    ferry.write("a.yaml", "target: {device: cpu, env: {A: config}, max_restarts: 0}\n")
    ferry.write("train.py", "import os; print(*(os.environ[n] for n in 'ABC'))")
    (ferry.project / "trainer").mkdir()
    ferry.write("trainer/__init__.py", "")
    dry = ferry.run("a.yaml", "--dry-run").stdout.decode()
    assert f"# defaults remote_root, env.B from {config}/config.toml\n" in dry
    assert "# defaults env.C, setup from pyproject.toml [tool.torchferry]\n" in dry and "max_restarts" not in dry
    done = ferry.run("ps", "--remote-root", str(ferry.root))
    assert done.returncode == 0 and ferry.job_ids()[0].encode() in done.stdout


def test_roots_of_hosts_are_honoured_wherever_ssh_names_one(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployer.commands.options import host_of

    defaults(folders)
    monkeypatch.chdir(folders / "project")
    access = {"ssh_key": None, "accept_new_host_key": False, "transport": None, "connect_timeout_s": None}
    host = host_of("gpu", None, **access)
    assert (host.root, host.transport) == ("/data", "openssh")
    assert host_of("gpu", "/given", **{**access, "transport": "fabric"}).root == "/given"


def test_files_without_a_word_of_ours_load_no_parser(folders: Path) -> None:
    (folders / "project" / "pyproject.toml").write_text("[project]\nname = 'a'\n")
    words = "import sys, pathlib; from deployer.commands.defaults import read_defaults; "
    words += f"read_defaults(pathlib.Path({str(folders / 'project')!r})); print('tomllib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
