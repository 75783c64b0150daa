"""Values of the user's arrive byte for byte or are refused; none is ever read by a shell."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from deployer.commands.values import parse_assignment, parse_gpus
from deployer.connection.command import build_command, build_word
from deployer.errors import FerryError, UsageError
from deployer.plan.launch_plan import new_job_id
from deployer.plan.options import Options, read_config
from deployer.transport.ssh.ssh_config import ssh_argv
from deployer.transport.ssh.target import parse_target
from tests.support.ferry import Ferry
from tests.support.hostile import CANARY, hostile_strings

STRINGS = hostile_strings()
SHORT = [text for text in STRINGS if len(text) <= 3000]
ECHO = "import base64, json, os, sys\nprint(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))\n"


def canaries(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob(CANARY)]


@pytest.fixture(autouse=True)
def nothing_was_executed(ferry: Ferry, tmp_path: Path):
    yield
    assert not canaries(tmp_path, Path.cwd()) and not (Path.home() / CANARY).exists()


def test_strings_are_500_and_each_once() -> None:
    assert len(set(STRINGS)) == len(STRINGS) == 500


def test_arguments_arrive_byte_for_byte(ferry: Ferry) -> None:
    (ferry.project / "echo.py").write_text(ECHO)
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "python", "echo.py", *STRINGS)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(done.stdout)["argv"] == STRINGS


def test_values_of_the_environment_arrive_byte_for_byte(ferry: Ferry) -> None:
    (ferry.project / "echo.py").write_text(ECHO)
    given = {f"V{number}": text for number, text in enumerate(STRINGS)}
    words = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    done = ferry.run("run", *ferry.where(), *words, "--no-pull", "--", "python", "echo.py")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    env = json.loads(done.stdout)["env"]
    assert {name: env.get(name) for name in given} == given


def test_names_of_the_environment_are_plain_or_refused() -> None:
    taken = []
    for text in STRINGS:
        try:
            name, value = parse_assignment(f"{text}=value")
            read_config(Options(command=("true",), keys={f"target.env.{name}": value}))
        except UsageError:
            continue
        taken.append(name)
    assert [name for name in taken if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)] == []


def test_hosts_and_users_reach_ssh_as_one_word_or_are_refused() -> None:
    for text in (*STRINGS, *(f"{user}@host" for user in STRINGS), *(f"host:{port}" for port in STRINGS)):
        try:
            target = parse_target(text)
        except UsageError:
            continue
        query = ssh_argv("-G", target=target, config_file=None)
        assert query[-2:] == ["--", target.host] and CANARY not in " ".join(query)
        assert not re.search(r"[\s'\"`$;&|<>(){}\\]", target.host), text


def test_hostile_host_on_the_command_line_is_one_clear_error(ferry: Ferry) -> None:
    for host in (f"$(touch {CANARY})", f"-oProxyCommand=touch {CANARY}", f"a;touch {CANARY}", "a\nb", "ü host"):
        done = ferry.run("run", f"--ssh={host}", "--", "true")
        assert done.returncode == 2 and b"Traceback" not in done.stderr, (host, done.stderr)


def test_names_of_runs_become_plain_ids_or_are_refused() -> None:
    for text in STRINGS:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,79}", new_job_id(text)), text
        try:
            config = read_config(Options(command=("true",), keys={"run.name": text})).config
        except UsageError:
            continue
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", config.run.name), text


def test_remote_folders_are_taken_literally(ferry: Ferry, tmp_path: Path) -> None:
    names = [
        text for text in SHORT if len(text.encode()) < 100 and not set("/\0") & set(text) and text not in (".", "..")
    ]
    for name in names[:10]:
        root = tmp_path / "roots" / name
        done = ferry.run("run", "--remote-root", str(root), "--no-pull", "--", "sh", "-c", 'printf %s "$PWD"')
        assert done.returncode == 0, (name, done.stderr.decode())
        (job,) = (root / "jobs").iterdir()
        assert done.stdout == os.fsencode(job / "code") + b"\n"


def test_file_names_arrive_byte_for_byte(ferry: Ferry) -> None:
    names = {text.encode()[:200] for text in SHORT if "/" not in text and text not in (".", "..")}
    for name in names:
        (ferry.project / os.fsdecode(name)).write_bytes(name)
    program = "import os, sys; print(b'\\0'.join(os.listdir(b'.')).hex())"
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "python", "-c", program)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert set(bytes.fromhex(done.stdout.decode()).split(b"\0")) == names


@pytest.mark.parametrize(
    "option", ["--python", "--include", "--wheels", "--ssh-key", "--gpus", "--name", "--max-runtime"]
)
def test_hostile_values_of_other_options_end_in_one_clear_error(ferry: Ferry, option: str) -> None:
    for text in (f"$(touch {CANARY})", "x" * 100_000, "\x1b]0;title\x07\x1b[31m", "-rf"):
        done = ferry.run("run", *ferry.where(), f"{option}={text}", "--", "true")
        assert done.returncode in (2, 125), (text[:80], done.stderr.decode()[-500:])
        assert b"Traceback" not in done.stderr and b"\x1b" not in done.stderr and len(done.stderr) < 10_000


def test_configs_text_arrives_byte_for_byte_or_is_refused(ferry: Ferry) -> None:
    config = {"script": "echo.py", "args": STRINGS, "target": {"device": "cpu", "python": sys.executable}}
    (ferry.project / "echo.py").write_text(ECHO)
    (ferry.project / "job.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    done = ferry.run("job.yaml", *ferry.where(), "--no-pull")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert json.loads(done.stdout)["argv"] == STRINGS


def test_command_line_sent_is_one_constant_text_and_one_plain_word() -> None:
    constant = build_command("")
    for text in SHORT:
        message = {"nonce": text, "agent": text, "root": text, "request": {"op": text, "plan": {text: [text]}}}
        command = build_command(build_word(message))
        assert command.startswith(constant) and re.fullmatch(r"[A-Za-z0-9+/=]+", command[len(constant) :])
        assert base64.b64decode(command[len(constant) :])


def test_ids_that_are_none_are_refused_everywhere(ferry: Ferry) -> None:
    for command in ("status", "logs", "stop", "pull"):
        for text in (f"$(touch {CANARY})", "../../etc", "\x1b[31m", "a/b"):
            done = (
                ferry.run(command, *ferry.where(), "--", text)
                if text.startswith("-")
                else ferry.run(command, text, *ferry.where())
            )
            assert done.returncode == 2 and b"Traceback" not in done.stderr and b"\x1b" not in done.stderr


def config_on_gpus(text: str) -> object:
    return read_config(Options(command=("true",), keys={"target.gpu_ranks": parse_gpus(text)}))


def test_errors_are_ours() -> None:
    for text in STRINGS:
        for make in (parse_target, config_on_gpus):
            try:
                make(text)
            except FerryError as error:
                assert error.exit_code == 2
