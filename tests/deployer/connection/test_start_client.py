"""What a launch loads and sends before it must wait: real clients, in processes of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.plan.options import is_plain
from tests.support.limits import HANG_S
from trainer.config.load import check_config
from trainer.schema import Config, RunConfig, TargetConfig

REPO = Path(__file__).resolve().parents[3]
DEPLOY = str(REPO / "deploy.py")
OPTIONS = ("--gpus", "0,1", "--name", "try", "--env", "A=b", "--secret", "HOME", "--max-restarts", "2")


def loaded_by(*words, folder):
    env = {**os.environ, "TORCHFERRY_STATE_DIR": str(folder / "state")}
    argv = [sys.executable, "-X", "importtime", DEPLOY, *words]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout, {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "import time" in line}


def of_the_trainer(modules):
    """Its modules and folders; the schema's sections count as the schema."""
    return {".".join(name.split(".")[:2]) for name in modules if name.partition(".")[0] == "trainer"}


@pytest.mark.parametrize("options", [(), OPTIONS], ids=["bare", "options"])
def test_dry_run_of_a_program_loads_the_schema_alone_of_the_trainer(tmp_path, options):
    _, modules = loaded_by("run", *options, "--dry-run", "--", "true", folder=tmp_path)
    assert of_the_trainer(modules) == {"trainer", "trainer.schema"}
    assert "deployer.plan.prepare" in modules and "yaml" not in modules


def test_job_of_a_program_loads_the_schema_alone_of_the_trainer(tmp_path):
    words = ("--remote-root", str(tmp_path / "root"), "--device", "cpu", "--no-pull", "--", "echo", "ran")
    output, modules = loaded_by("run", *words, folder=tmp_path)
    assert output == "ran\n"
    assert of_the_trainer(modules) == {"trainer", "trainer.schema"}


# --- the rules of a program's settings --------------------------------------------------------------------------------

names = st.one_of(
    st.text(max_size=8), st.sampled_from(["A", "a_1", "RANK", "LOCAL_RANK", "CUDA_DEVICE_ORDER", "TORCHFERRY_X"])
)
texts = st.one_of(st.none(), st.text(max_size=5))
targets = st.builds(
    TargetConfig,
    gpu_ranks=st.lists(st.one_of(st.integers(-2, 5), st.sampled_from(["auto:2", "auto:0", "1", "GPU-89"])), max_size=4),
    ssh=texts,
    python=texts,
    root=st.text(max_size=5),
    env=st.dictionaries(names, st.text(max_size=3), max_size=2),
    secrets=st.lists(names, max_size=3),
    max_restarts=st.integers(-1, 3),
    max_runtime_s=st.one_of(st.none(), st.floats(-1, 5)),
    stall_timeout_s=st.one_of(st.none(), st.floats(-1, 5)),
    log_max_gb=st.floats(-1, 5),
)


@given(st.text(max_size=6), targets)
def test_settings_that_are_plain_keep_every_rule(name, target):
    if is_plain(name, target):
        check_config(Config(run=RunConfig(name=name), target=target))


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "9"])
def test_names_that_a_rule_refuses_are_not_plain(variable):
    assert not is_plain("job", TargetConfig(env={variable: "1"}))
    assert not is_plain("job", TargetConfig(secrets=[variable]))


@pytest.mark.parametrize("gpus", [[], [-1], [0, 0], ["auto:2", 1], ["auto:0"], ["0"]], ids=str)
def test_gpus_that_a_rule_has_to_judge_are_not_plain(gpus):
    assert not is_plain("job", TargetConfig(gpu_ranks=gpus))


# --- the first packet -------------------------------------------------------------------------------------------------


def start_client(folder, port, **env):
    config = folder / "ssh_config"
    config.write_text(f"Host box\n  Hostname 127.0.0.1\n  Port {port}\n  User nobody\n  IdentityAgent none\n")
    env = {**os.environ, "TORCHFERRY_SSH_CONFIG": str(config), "TORCHFERRY_STATE_DIR": str(folder / "state"), **env}
    project = folder / "project"
    project.mkdir()
    argv = [sys.executable, DEPLOY, "run", "--ssh", "box", "--device", "cpu", "--", "true"]
    return subprocess.Popen(argv, cwd=project, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_first_packet_does_not_wait_for_the_ssh_library(tmp_path):
    library = tmp_path / "libraries" / "paramiko" / "__init__.py"  # one that never gets done with loading
    library.parent.mkdir(parents=True)
    library.write_text("import time\ntime.sleep(3600)\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = start_client(tmp_path, server.getsockname()[1], PYTHONPATH=str(library.parent.parent))
        server.settimeout(HANG_S)
        connection, _ = server.accept()
        connection.settimeout(HANG_S)
        with connection, connection.makefile("rb") as words:
            assert words.readline() == b"SSH-2.0-Torchferry\r\n"
            assert client.poll() is None
            client.kill()
        client.communicate()


def test_version_is_sent_once_and_the_key_exchange_follows_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = start_client(tmp_path, server.getsockname()[1])
        server.settimeout(HANG_S)
        connection, _ = server.accept()
        connection.settimeout(HANG_S)
        with connection, connection.makefile("rb") as words:
            assert words.readline() == b"SSH-2.0-Torchferry\r\n"
            connection.sendall(b"SSH-2.0-Server\r\n")
            length, padding, kind = (int.from_bytes(words.read(size), "big") for size in (4, 1, 1))
            assert length < 1 << 15 and padding >= 4 and kind == 20  # SSH_MSG_KEXINIT
            client.kill()
        client.communicate()
