"""What every test has: state, results and homes of its own, never the user's."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import setuptools  # noqa: F401  # torch's compiler imports it, and late in some workers that fails

from tests.support.ferry import Ferry
from tests.support.notes import (  # noqa: F401 - hooks of pytest
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_protocol,
    pytest_sessionstart,
    pytest_testnodedown,
    pytest_unconfigure,
)
from tests.support.sshd import ALIAS, SshServer, make_key, start_sshd
from trainer.config.load import (
    ConfigError,
    load_config,
)
from trainer.schema import (
    Config,
)

# a shell starts what it runs in the background deaf to Ctrl-C, and a child inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)

# how long an example takes says something of the machine, and nothing of the code
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# the developer's own hosts are no test's; here, for fixtures of a whole file start clients too
os.environ.pop("TORCHFERRY_SSH_CONFIG", None)
# a workplace's, which most users do not have: it hides what is lost in a buffer
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TORCHFERRY_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("TORCHFERRY_LEASE_DIR", str(tmp_path / "leases"))


@pytest.fixture
def ferry(tmp_path: Path) -> Ferry:
    """A client with an empty project, on this machine as host."""
    project = tmp_path / "project"
    project.mkdir()
    return Ferry(project, tmp_path / "state", tmp_path / "root")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A JSONL of questions and answers of many lengths, for the tests of the trainer."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    pairs = [{"question": f"what is {n}?", "answer": "na " * (1 + n * n % 13) + str(n)} for n in range(60)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A real sshd, for the tests of one file."""
    with start_sshd(tmp_path_factory.mktemp("ssh")) as running:
        yield running


@pytest.fixture
def remote(ferry: Ferry, server: SshServer) -> Ferry:
    """The client of `ferry` with a host behind sshd."""
    ferry.ssh = ALIAS
    ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
    return ferry


@pytest.fixture(scope="module")
def foreign_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key that nobody knows."""
    return make_key(tmp_path_factory.mktemp("foreign") / "key")


@pytest.fixture(scope="module")
def hop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Another one, as a jump host."""
    with start_sshd(tmp_path_factory.mktemp("hop"), key_type="ecdsa") as running:
        yield running


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """An ssh-agent's socket."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    yield path
    process.terminate()
    process.wait()


@pytest.fixture
def load_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a config file into an empty current folder and load it; returns the Config or the rendered error."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(name: str, text: str | bytes, *overrides: str) -> Config | str:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            return load_config(name, overrides)
        except ConfigError as error:
            return error.render()

    return write_and_load
