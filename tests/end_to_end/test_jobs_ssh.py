"""The whole way over a real sshd: login shells, noise, cuts of the connection, the trainer with two ranks."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO, Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.sshd import ALIAS, SshServer, login_user, start_sshd


@pytest.fixture(params=["fabric", "openssh"])
def both(remote: Ferry, request: pytest.FixtureRequest) -> Ferry:
    """`remote`, once over each transport."""
    remote.transport = request.param
    return remote


def test_program_over_ssh_output_code_and_results(both):
    (both.project / "hello.py").write_text("import sys; print('hello', sys.argv[1:]); sys.exit(3)")
    done = both.run("run", *both.where(), "--", "python", "hello.py", "a b", "$HOME;'")
    assert done.stdout == b"hello ['a b', \"$HOME;'\"]\n"
    assert done.returncode == 3
    assert list((both.project / "results").glob("*/logs/attempt_1/rank_0.log"))


def test_second_deploy_sends_only_what_changed(remote):
    for i in range(30):
        (remote.project / f"f{i}.txt").write_text(f"content {i}\n" * 200)
    first = remote.run("run", *remote.where(), "--no-pull", "--", "true")
    (remote.project / "f3.txt").write_text("changed\n")
    second = remote.run("run", *remote.where(), "--no-pull", "--", "cat", "f3.txt")
    third = remote.run("run", *remote.where(), "--no-pull", "--", "true")
    assert b"sent: 64.0 kB" in first.stderr
    assert b"sent: 8 B" in second.stderr and second.stdout == b"changed\n"
    assert b"sent:" not in third.stderr


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash", "/usr/bin/fish", "/bin/tcsh"])
def test_login_shell_of_any_kind_and_a_noisy_one(ferry, tmp_path_factory, shell):
    with login_user(shell) as user, start_sshd(tmp_path_factory.mktemp("s"), user=user) as server:
        noise = "echo 'Welcome!   enjoy'; printf '\\033[1mbold\\033[0m\\n'\n"
        for name in (".bashrc", ".tcshrc", ".config/fish/config.fish"):
            path = server.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(noise)
        subprocess.run(["chown", "-R", user, str(server.home)], check=True)
        ferry.ssh, ferry.root = ALIAS, Path("~/tf")
        ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
        (ferry.project / "a.py").write_text("import os, sys; print(sys.argv[1], os.environ['V'])")
        words = ("--env", "V=$(touch /tmp/pwned) `x` \"'", "--", "python3", "a.py", "it's ${X:-y} && <b>")
        done = ferry.run("run", *ferry.where(), *words)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"it's ${X:-y} && <b> $(touch /tmp/pwned) `x` \"'\n"


def test_connection_cut_while_following_no_byte_lost_or_twice(both, server):
    (both.project / "write.py").write_text(
        "import itertools, os, time\nfor i in itertools.count():\n    print('line', i, flush=True)\n"
        "    time.sleep(0.01)\n    if os.path.exists(os.environ['TORCHFERRY_RUN_DIR'] + '/enough'): break\n"
    )
    client = both.start("run", *both.where(), "--no-pull", "--", "python", "write.py")
    assert client.stdout.readline() == b"line 0\n"
    for _ in range(2):
        cut = set(_sessions(server))
        for pid in cut:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda cut=cut: set(_sessions(server)) - cut or client.poll() is not None)  # the client is back
        assert client.poll() is None, client.communicate()[1].decode()
    (both.job() / "enough").touch()
    out, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 0, err.decode()
    assert b"line 0\n" + out == b"".join(b"line %d\n" % i for i in range(out.count(b"\n") + 1))
    assert b"line 0\n" + out == (both.job() / "logs" / "attempt_1" / "rank_0.log").read_bytes()
    assert b"trying again" in err


def test_connection_cut_while_files_are_sent_one_job_and_it_is_followed(both, server):
    (both.project / "data").write_bytes(os.urandom(90_000_000))
    client = both.start("run", *both.where(), "--no-pull", "--", "sh", "-c", "echo ran")
    wait_for(lambda: list((both.root / "tmp").glob("blob-*")))
    for pid in _sessions(server):
        os.kill(pid, signal.SIGKILL)
    out, err = client.communicate(timeout=HANG_S)
    assert (client.returncode, out) == (0, b"ran\n"), err.decode()
    assert b"trying again" in err and len(both.job_ids()) == 1


def test_64_mib_up_and_down_at_once_arrive_whole(both):
    size = 64 << 20
    cat = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer, 1 << 16)"
    data = random.Random(1).randbytes(1 << 20) * (size >> 20)
    done = both.run("exec", *both.where(), "--", "python3", "-c", cat, stdin=data)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data


@pytest.mark.parametrize("stdin", ["closed", "pipe"])
def test_launch_without_an_input_or_with_somebody_elses_leaves_it_alone(both, stdin):
    reading, writing = os.pipe()
    os.write(writing, b"not for you\n")
    words = both.argv("run", *both.where(), "--no-pull", "--", "cat")
    argv = ["sh", "-c", 'exec "$@" <&-', "sh", *words] if stdin == "closed" else words
    done = subprocess.run(argv, cwd=both.project, env=both.environment(), stdin=reading, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    assert os.read(reading, 100) == b"not for you\n"
    os.close(reading)
    os.close(writing)


def test_later_commands_connect_as_the_launch_did(remote, tmp_path):
    spy = tmp_path / "bin" / "ssh"
    spy.parent.mkdir()
    spy.write_text(f'#!/bin/sh\necho "$@" >> "$0.log"\nexec {shutil.which("ssh")} "$@"\n')
    spy.chmod(0o755)
    remote.run("run", *remote.where(), "--transport", "openssh", "--no-pull", "--name", "kept", "--", "true")
    remote.env["PATH"] = f"{spy.parent}:{os.environ['PATH']}"
    assert remote.run("status", "kept").returncode == 0
    assert "ControlMaster=yes" in (tmp_path / "bin" / "ssh.log").read_text()


def test_connect_timeout_of_the_command_line_ends_a_silent_port(remote, tmp_path):
    (tmp_path / "patient").write_text("ConnectTimeout 3600\n")
    remote.env["TORCHFERRY_SSH_CONFIG"] = str(tmp_path / "patient")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        done = remote.run("doctor", "--ssh", place, "--connect-timeout", "0.5")
    assert done.returncode == 125 and b"no SSH handshake came within 0.5 s" in done.stderr


def test_pull_by_the_beginning_of_an_id_names_the_folder_by_the_whole(remote):
    remote.run("run", *remote.where(), "--no-pull", "--name", "short", "--", "true")
    assert remote.run("pull", "short", *remote.where()).returncode == 0
    assert [path.name for path in (remote.project / "results").iterdir()] == remote.job_ids()


def _sessions(server: SshServer) -> list[int]:
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_host_gone_during_the_launch_is_no_plain_refusal_and_stays_known(ferry, tmp_path):
    (ferry.project / "data").write_bytes(bytes(90_000_000))
    server = start_sshd(tmp_path)
    ferry.ssh, ferry.env["TORCHFERRY_SSH_CONFIG"] = ALIAS, str(server.client_config_path)
    client = ferry.start("run", *ferry.where(), "--", "true")
    wait_for(lambda: (ferry.root / "tmp").exists() and list((ferry.root / "tmp").iterdir()))
    server.stop()
    _, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 75 and b"if it was started" in err and b"goes on" not in err
    rows = json.loads(ferry.run("ps", "--json").stdout)
    assert [row["state"] for row in rows if row["where"] == ALIAS] == ["unreachable"]
    shown = ferry.run("ps")
    assert b"unreachable (never seen)" in shown.stdout and b"cannot be asked: 127.0.0.1:" in shown.stderr


def test_trainer_on_two_ranks_over_ssh_killed_client_stop_resume_and_pull(remote):
    words = (
        "target.device=cpu",
        "target.gpu_ranks=[0,1]",
        "train.steps=400",
        "model.num_layers=2",
    )
    config = str(REPO / "configs" / "02_debug_sft_fsdp.py")
    client = remote.start(config, *words, *remote.where(), "--python", sys.executable, "--name", "two")
    wait_for(lambda: b"step 3/400" in client.stdout.readline())
    client.send_signal(signal.SIGKILL)
    client.communicate()
    job_id = remote.job_ids()[0]
    stopped = remote.run("stop", job_id, "--grace", "60")
    assert stopped.returncode == 0, stopped.stderr.decode()
    status = json.loads(remote.run("status", job_id, "--json").stdout)
    assert (status["state"], status["code"]) == ("stopped", 0)
    assert remote.run("pull", job_id, "--checkpoints").returncode == 0
    (checkpoint,) = (remote.project / "results" / job_id / "checkpoints").iterdir()
    assert (checkpoint / "COMPLETE").exists()
    there = f"train.resume={remote.job(job_id) / 'checkpoints' / checkpoint.name}"
    resumed = remote.run(config, *words, there, "train.stop_after_steps=2", *remote.where(), "--python", sys.executable)
    assert resumed.returncode == 143, resumed.stderr.decode()
    (results,) = set((remote.project / "results").iterdir()) - {remote.project / "results" / job_id}
    first = json.loads((results / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == int(checkpoint.name.removeprefix("step_")) + 1


def test_host_without_anything_fit_for_the_job_says_what_is_missing(remote):
    config = str(REPO / "configs" / "01_debug_sft.py")
    done = remote.run(config, *remote.where(), "target.device=cpu", "--python", "/usr/bin/env")
    assert done.returncode == 125
    assert b"/usr/bin/env" in done.stderr and b"Traceback" not in done.stderr
    assert b" status debug-sft-" in done.stderr and b"--launcher" not in done.stderr  # there is no log to look at


def test_unknown_host_key_without_a_terminal_refused_and_accepted_when_asked(remote, server, tmp_path):
    known = tmp_path / "known_hosts"
    config = tmp_path / "config"
    config.write_text(server.client_config_path.read_text().replace(str(server.known_hosts_path), str(known)))
    remote.env["TORCHFERRY_SSH_CONFIG"] = str(config)
    refused = remote.run("run", *remote.where(), "--", "true")
    assert refused.returncode == 125 and b"SHA256:" in refused.stderr and b"--accept-new-host-key" in refused.stderr
    assert remote.run("run", *remote.where(), "--accept-new-host-key", "--", "true").returncode == 0
    known.write_text(known.read_text().replace(known.read_text().split()[2][-12:], "A" * 12))
    changed = remote.run("run", *remote.where(), "--accept-new-host-key", "--", "true")
    assert changed.returncode == 125 and b"ssh-keygen -f" in changed.stderr and b" -R " in changed.stderr


def test_doctor_over_ssh_examines_the_host_and_the_way_to_it(remote, server):
    (server.home / ".bashrc").write_text("echo noisy\n")
    try:
        done = remote.run("doctor", *remote.where(), "--json")
    finally:
        (server.home / ".bashrc").unlink()
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (found["login output"]["status"], found["login output"]["detail"]) == ("warn", "6 bytes: noisy")
    assert "to connect" in found["time to deploy"]["detail"] and found["root"]["status"] == "ok"


@pytest.mark.soak
def test_twelve_launches_at_once_on_a_crowded_server_all_start(both, tmp_path):
    with start_sshd(tmp_path, max_startups="3:50:5", max_sessions=2) as crowded:
        both.env["TORCHFERRY_SSH_CONFIG"] = str(crowded.client_config_path)
        words = ("run", *both.where(), "--detach", "--", "true")
        clients = [both.start(*words) for _ in range(12)]
        said = [client.communicate(timeout=HANG_S)[1].decode() for client in clients]
        assert [client.returncode for client in clients] == [0] * 12, said
    assert len(both.job_ids()) == 12
