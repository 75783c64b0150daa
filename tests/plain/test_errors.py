"""The most common errors, word by word, in `errors/NAME.txt`: a change of wording is seen and read.

Each comes from the real command line. `TORCHFERRY_WRITE_TEXTS=1 python -m tests.run tests/plain` writes the files anew:
read the difference before you commit it.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.ferry import REPO, Ferry
from tests.support.limits import HANG_S
from tests.support.smi import fake_smi
from tests.support.sshd import ALIAS, SshServer, start_sshd
from tests.support.ways import known_hosts_config, public

TEXTS = Path(__file__).with_name("errors")
WRITES = os.environ.get("TORCHFERRY_WRITE_TEXTS") == "1"
MOST_WORDS = 30
"""Of a sentence."""
FILES = {
    "t.py": "print('runs')\n",
    "fails.py": "raise ValueError('no rows')\n",
    "needs.py": "import no_such_package\n",
    "key.yaml": "data: {train: [rows.jsonl]}\ntrain:\n  step: 5\n",
    "type.yaml": "data: {train: [rows.jsonl]}\ntrain:\n  steps: many\n",
    "data.yaml": "model: {name: Qwen/Qwen2.5-0.5B-Instruct}\ndata: {train: [rows.jsonl]}\n",
    "model.yaml": "model: {name: ./my-model}\ndata: {train: [t.py]}\n",
    "open.yaml": "train:\n  steps: [1\n",
    "two.yaml": "run: python t.py\nmodel: {name: my-model}\n",
}
"""The project of every case."""
PROGRAM = ("--", "python", "t.py")
GPU = "0, GPU-0, NVIDIA H100 80GB HBM3, 81559, 70300\n"
NO_PID = 4_194_999
"""More than Linux counts to."""


class Scene(NamedTuple):
    """What a case may need beside the project."""

    ferry: Ferry
    folder: Path
    server: Callable[[], SshServer]
    foreign_key: Callable[[], Path]


def nothing(scene: Scene) -> None:
    pass


def two_jobs(scene: Scene) -> None:
    for _ in range(2):
        scene.ferry.run("run", *scene.ferry.where(), "--no-pull", "--name", "twin", *PROGRAM)


def no_gpu(scene: Scene) -> None:
    scene.ferry.env["PATH"] = "/usr/bin:/bin"


def busy_gpu(scene: Scene) -> None:
    scene.ferry.env.update(fake_smi(scene.folder, gpus=GPU, apps=f"GPU-0, {NO_PID}, 70300\n"))


def unknown_key(scene: Scene) -> None:
    scene.ferry.env["TORCHFERRY_SSH_CONFIG"] = known_hosts_config(scene.server(), scene.folder, "")[0]


def changed_key(scene: Scene) -> None:
    line = f"{scene.server().host_name} {public(scene.foreign_key())}\n"
    scene.ferry.env["TORCHFERRY_SSH_CONFIG"] = known_hosts_config(scene.server(), scene.folder, line)[0]


def login_refused(scene: Scene) -> None:
    config = scene.server().client_config_path.read_text()
    (scene.folder / "ssh").write_text(re.sub(r"IdentityFile .*", f"IdentityFile {scene.foreign_key()}", config))
    scene.ferry.env["TORCHFERRY_SSH_CONFIG"] = str(scene.folder / "ssh")


class Case(NamedTuple):
    """A command line that fails. `train` as its first word is `train.py`; ROOT is the remote root's options."""

    name: str
    line: str
    prepare: Callable[[Scene], None] = nothing


CASES = [
    # the command line
    Case("option_unknown", "ps --al"),
    Case("option_unknown_far", "run --frobnicate -- python t.py"),
    Case("option_without_value", "run --gpus"),
    Case("option_not_a_number", "run --max-restarts many -- python t.py"),
    Case("option_not_a_choice", "ps --transport telnet"),
    Case("option_not_a_duration", "run --max-runtime 10 -- python t.py"),
    Case("option_env_without_value", "run --env HF_HOME -- python t.py"),
    Case("option_gpus_range", "run --gpus 0-3 -- python t.py"),
    Case("option_secret_not_set", "run --secret NOT_SET_ANYWHERE -- python t.py"),
    Case("command_unknown", "frobnicate"),
    Case("command_misspelt", "statsu job-1"),
    Case("word_too_many", "shell a b"),
    Case("stop_without_id", "stop"),
    Case("torchrun_without_gpus", "run --torchrun -- t.py"),
    Case("nothing_to_run", "run"),
    Case("program_misspelt", "run -- python tt.py"),
    # the config
    Case("config_missing", "missing.yaml"),
    Case("config_unknown_key", "key.yaml"),
    Case("config_wrong_type", "type.yaml"),
    Case("config_two_mistakes", "key.yaml train.lr"),
    Case("config_not_yaml", "open.yaml"),
    Case("config_two_kinds", "two.yaml"),
    Case("config_gpu_twice", "data.yaml target.gpu_ranks=0,0"),
    Case("data_missing", "data.yaml"),
    Case("model_missing", "model.yaml"),
    # jobs
    Case("job_unknown", "status nope"),
    Case("job_unknown_on_host", "status nope ROOT"),
    Case("job_ambiguous", "status twin", two_jobs),
    # the host
    Case("host_unknown", "gpus --ssh no-such-host.invalid"),
    Case("host_refuses", "gpus --ssh me@127.0.0.1:1"),
    Case("host_key_unknown", f"gpus --ssh {ALIAS}", unknown_key),
    Case("host_key_changed", f"gpus --ssh {ALIAS}", changed_key),
    Case("host_login_refused", f"gpus --ssh {ALIAS}", login_refused),
    Case("host_without_gpu", "run ROOT --gpus 0 -- python t.py", no_gpu),
    Case("gpu_busy", "run ROOT --gpus 0 -- python t.py", busy_gpu),
    Case("gpu_absent", "run ROOT --gpus 3 -- python t.py", busy_gpu),
    # what ends a job
    Case("setup_fails", "run ROOT --no-pull --setup 'echo no such wheel; exit 7' -- python t.py"),
    Case("python_missing", "run ROOT --no-pull --python /no/such/python -- python t.py"),
    Case("program_fails", "run ROOT --no-pull -- python fails.py"),
    Case("package_missing", "run ROOT --no-pull -- python needs.py"),
    # the trainer
    Case("train_without_config", "train"),
    Case("train_option_unknown", "train --inspekt data.yaml"),
    Case("train_option_elsewhere", "train data.yaml --samples 2"),
    Case("train_unknown_key", "train key.yaml"),
    Case("train_init_kind", "train init lorra"),
    Case("train_no_such_key", "train keys micro_batch_sise"),
]
JOB_ENDS = ("setup_fails", "python_missing", "program_fails", "package_missing")
"""Cases in which Torchferry reports the end of a job, not an error of its own command."""


@pytest.fixture
def scene(ferry: Ferry, tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    for name, text in FILES.items():
        ferry.write(name, text)
    folder = tmp_path / "scene"
    folder.mkdir()
    (folder / "empty").write_text("")
    ferry.env.update({"TORCHFERRY_SSH_CONFIG": str(folder / "empty"), "COLUMNS": "120"})
    ferry.env.pop("CUDA_VISIBLE_DEVICES", None)
    return Scene(
        ferry, folder, lambda: request.getfixturevalue("server"), lambda: request.getfixturevalue("foreign_key")
    )


def said(scene: Scene, line: str) -> str:
    """What a command line says on stderr, and its exit code, without what differs from run to run."""
    ferry = scene.ferry
    words = [part for word in shlex.split(line) for part in (ferry.where() if word == "ROOT" else [word])]
    if words[0] == "train":
        argv = [sys.executable, str(REPO / "train.py"), *words[1:]]
        done = subprocess.run(
            argv,
            cwd=ferry.project,
            env=ferry.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANG_S,
        )
        typed = f"python train.py {line.partition(' ')[2]}".rstrip()
    else:
        done, typed = ferry.run(*words), f"torchferry {line}"
    return f"$ {typed}\n{fixed(scene, done.stderr.decode())}exit code {done.returncode}\n"


def fixed(scene: Scene, text: str) -> str:
    """The text with placeholders for paths, names of this machine, ids, ports and figures."""
    text = re.sub(r"\S*python\S* \S*deploy\.py", "torchferry", text)
    for value, name in (
        (str(scene.ferry.project), "PROJECT"),
        (str(scene.ferry.root), "ROOT"),
        (str(scene.folder), "FOLDER"),
        (sys.executable, "PYTHON"),
        (f"host {socket.gethostname()}", "host HOST"),
        (f"({socket.gethostname()}): ", "(HOST): "),
        (f"{getpass.getuser()}@", "USER@"),
        (f"'{getpass.getuser()}'", "'USER'"),
    ):
        text = text.replace(value, name)
    for pattern, name in (
        (r"\b([a-z]+)-\d{4}-\d{4}-[0-9a-f]{4}\b", r"\1-ID"),
        (r"SHA256:[\w+/]+", "FINGERPRINT"),
        (r"127\.0\.0\.1\]:\d{2,}", "127.0.0.1]:PORT"),
        (r"127\.0\.0\.1:\d{2,}", "127.0.0.1:PORT"),
        (r"-p \d{2,}", "-p PORT"),
        (r"\d+ files?, [\d.]+ k?B", "N files, SIZE"),
        (r"(cannot be resolved): .*", r"\1: REASON"),
        (r"\S*/foreign\d*/key", "KEY"),
        (r"(?m)^(sent|pulled): .*\n", ""),
    ):
        text = re.sub(pattern, name, text)
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_error_says_what_its_file_has(scene: Scene, case: Case) -> None:
    case.prepare(scene)
    now, file = said(scene, case.line), TEXTS / f"{case.name}.txt"
    if WRITES:
        file.write_text(now)
    assert now == file.read_text()


def test_error_of_a_host_without_python(scene: Scene) -> None:
    with start_sshd(scene.folder, first_config="ForceCommand echo torchferry-no-python; exit 127") as server:
        scene.ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
        now, file = said(scene, f"gpus --ssh {ALIAS}"), TEXTS / "host_without_python.txt"
    if WRITES:
        file.write_text(now)
    assert now == file.read_text()


NAMES = [*(case.name for case in CASES), "host_without_python"]
WITHOUT_HINT = ("config_wrong_type", "config_two_mistakes")
"""Each of their lines says what is expected."""


def test_every_file_has_its_case() -> None:
    assert sorted(path.stem for path in TEXTS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_error_has_two_parts_and_short_sentences(name: str) -> None:
    lines = (TEXTS / f"{name}.txt").read_text().splitlines()[1:-1]
    if name not in JOB_ENDS:
        assert [line.startswith("Error: ") for line in lines].count(True) == 1
        assert lines[-1].startswith("hint: ") or name in WITHOUT_HINT
    sentences = [sentence for line in lines for sentence in re.split(r"(?<=[.!?]) ", line)]
    assert [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS] == []
