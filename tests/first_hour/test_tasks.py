"""Task files through the real command line: what they run, and what an option changes of it."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deployer.cli import cli
from deployer.commands.launch.cli import run
from deployer.errors import UsageError
from tests.support.ferry import Ferry
from tests.support.jobs import wait_for
from trainer.config.kinds.task_keys import TASK_KEYS

PROGRAM = """\
import os, pathlib, sys
names = ("A", "B", "SECRET")
print("got", sys.argv[1:], [os.environ.get(name) for name in names], flush=True)
pathlib.Path("out.txt").write_text("home")
raise SystemExit(int(os.environ.get("CODE", "0")))
"""
SAVES = """\
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
time.sleep(600)
"""


def plan_of(ferry: Ferry, *words: str) -> dict[str, Any]:
    """The plan of a launch, without what is another one in each."""
    done = ferry.run("run", "--dry-run", "--json", *words)
    assert done.returncode == 0, done.stderr.decode()
    plan: dict[str, Any] = json.loads(done.stdout)["plan"]
    for role in plan["roles"]:
        del role["env"]["TORCHFERRY_JOB_ID"]
    return {name: value for name, value in plan.items() if name not in ("job_id", "created", "tree")}


def refused(*words: str) -> str:
    """What `run` says of these words, in the folder that the test stands in."""
    error = CliRunner().invoke(cli, ["run", "--dry-run", *words]).exception
    assert isinstance(error, UsageError)
    return "\n  in ".join((error.message, *error.where)) + f"\nhint: {error.hint}"


def test_every_key_of_a_task_is_an_option_of_run() -> None:
    words = {word for param in run.params for word in param.opts}
    assert [row.name for row in TASK_KEYS if row.option not in words] == ["run"]


def test_task_is_the_program_with_these_options(ferry: Ferry) -> None:
    ferry.env["TOKEN"] = "t"
    for name in ("train.py", "data.txt", "reqs.txt"):
        ferry.write(name, "")
    ferry.write(
        "task.yaml",
        "run: python train.py --lr 1e-4 'a b'\nname: mine\nhost: box\ngpus: 0,1\ntorchrun: true\nenv: {A: 1}\n"
        "secrets: [TOKEN]\npython: /p\nrequirements: reqs.txt\ninclude: [data.txt]\noutputs: [out, a/b]\nqueue: true\n"
        "allow_busy: true\nmax_restarts: 2\nmax_runtime: 1h30m\nstall_timeout: 10m\nidle_timeout: 5m\nafter: [a-1]\n"
        "log_max: 1GB\nsetup: make\nsetup_timeout: 5m\n",
    )
    options = shlex.split(
        "--name mine --ssh box --gpus 0,1 --torchrun --env A=1 --secret TOKEN --python /p --requirements reqs.txt "
        "--include data.txt --out out --out a/b --queue --allow-busy --max-restarts 2 --max-runtime 1h30m "
        "--stall-timeout 10m --idle-timeout 5m --after a-1 --log-max 1GB --setup make --setup-timeout 5m"
    )
    program = ("--", "python", "train.py", "--lr", "1e-4", "a b")
    assert plan_of(ferry, "task.yaml") == plan_of(ferry, *options, *program)
    changed = shlex.split("--name other --gpus auto:2 --env B=2 --out c --max-restarts 0 --max-runtime 2h")
    merged = [word.replace("mine", "other") for word in options]
    merged[merged.index("--gpus") + 1] = "auto:2"
    merged[merged.index("--max-restarts") + 1], merged[merged.index("--max-runtime") + 1] = "0", "2h"
    for word in ("out", "a/b"):
        del merged[merged.index(word) - 1 : merged.index(word) + 1]
    over = plan_of(ferry, "task.yaml", *changed, "--", "more")
    assert over == plan_of(ferry, *merged, "--env", "B=2", "--out", "c", *program, "more")
    by_key = plan_of(ferry, "task.yaml", "target.max_restarts=0", "target.env.B=2", "run.name=other")
    assert by_key["roles"][0]["max_restarts"] == 0 and by_key["env_names"] == ["A", "B"] and by_key["name"] == "other"


def test_program_of_a_task_runs_and_its_results_come_home(ferry: Ferry) -> None:
    ferry.env["SECRET"] = "s3cret"
    ferry.write("a.py", PROGRAM)
    task = "run: [python, a.py, $A && b]\ndevice: cpu\nenv: {A: 1, B: b}\nsecrets: [SECRET]\noutputs: [out.txt]\n"
    ferry.write("torchferry.yaml", task)
    done = ferry.run("run", "--env", "B=2", *ferry.where())
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "got ['$A && b'] ['1', '2', 's3cret']\n"
    assert done.stderr.decode().startswith("running torchferry.yaml of this folder\n")
    (home,) = (ferry.project / "results").iterdir()
    assert home.name.startswith("a-") and (home / "code" / "out.txt").read_text() == "home"
    assert json.loads(ferry.run("run", "--dry-run", "--json").stdout)["plan"]["roles"][0]["argv"][1:] == [
        "a.py",
        "$A && b",
    ]


def test_text_for_a_shell_has_the_jobs_python_its_arguments_and_its_code(ferry: Ferry) -> None:
    ferry.write("a.py", "import sys; print(sys.executable, sys.argv[1:]); sys.exit(7)")
    text = 'run: |\n  echo "$0 $#" | tr a-z A-Z\n  A=\'x  y\'\n  python a.py "$A" "$@"\ndevice: cpu\nname: shell\n'
    ferry.write("shell.yaml", text)
    done = ferry.run("shell.yaml", *ferry.where(), "--no-pull", "--", "it's", "$B")
    assert done.returncode == 7, done.stderr.decode()
    python = json.loads((ferry.job() / "status.json").read_text())["slots"]["python"]
    assert done.stdout.decode() == f"SH 2\n{python} ['x  y', \"it's\", '$B']\n"
    again = ferry.run("resume", ferry.job_ids()[0], "--no-pull")
    assert again.returncode == 7 and again.stdout == done.stdout


def test_stop_gives_a_program_in_a_shell_time_to_save(ferry: Ferry) -> None:
    ferry.write("a.py", SAVES)
    ferry.write("s.yaml", "run: |\n  true\n  python a.py\n  touch after\ndevice: cpu\n")
    assert ferry.run("run", "s.yaml", *ferry.where(), "--detach").returncode == 0
    code = ferry.job() / "code"
    wait_for(lambda: (code / "ready").exists())
    assert ferry.run("stop", ferry.job_ids()[0]).returncode == 0
    assert (code / "saved").exists() and not (code / "after").exists()


def test_signal_that_ends_the_program_is_in_the_code_of_its_shell(ferry: Ferry) -> None:
    ferry.write("s.yaml", "run: true; exec sh -c 'kill -KILL $$'\ndevice: cpu\n")
    assert ferry.run("s.yaml", *ferry.where(), "--no-pull").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        ("run: a\ngpus: 0,0", (), "gpus is [0, 0]: it names 0 twice\n  in task.yaml:2"),
        (
            "run: a\ngpus: 0-3",
            (),
            "gpus: 0-3 is a range, and each GPU must be named\n  in task.yaml:2\nhint: write 0,1,2,3",
        ),
        ("run: a\ngpus: many", (), "gpus holds 'many', expected an index such as 0"),
        ("run: a\ndevice: gpu", (), "device: 'gpu' is not one of"),
        ("run: a\nmax_runtime: 5", (), "max_runtime: '5' has no unit\n  in task.yaml:2"),
        ("run: a\nmax_restarts: -1", (), "max_restarts: -1 is not in the range x>=0\n  in task.yaml:2"),
        ("run: a\nenv:\n  RANK: 1", (), "env may not set RANK: torchrun sets it for every process\n  in task.yaml:3"),
        ("run: a\noutputs: [b, ../c]", (), "outputs holds ../c, must be a path below the project"),
        ("run: a\nname: a b", (), "name is 'a b', it may hold only"),
        ("run: a\ntorchrun: true", (), "torchrun needs gpus: it starts one process for each GPU\n  in task.yaml:2"),
        ("run: a && b\ntorchrun: true\ngpus: 0", (), "torchrun starts a Python file, and run is a text for a shell"),
        ("run: a && b", ("--", "c"), "run of task.yaml is a text for a shell, so c after -- would reach nobody"),
        ("run: a", ("model.name=b",), "model.name is for the trainer, and a task runs a program"),
        ("run: a", ("gpus=0",), "gpus is a key of the file, and no override\n  in the command line\nhint: --gpus"),
        ("run: a", ("target.max_restarts=x",), "target.max_restarts is 'x', expected a whole number"),
        ("run: a", ("target.max_restarts=-1",), "target.max_restarts is -1, must be 0 or more\n  in the command line"),
        ("run: a", ("--fsdp-config", "b"), "--fsdp-config goes with a config; a task runs a program"),
        ("run: a b.py\nsecrets: [NOT_SET]", (), "the secret NOT_SET is not set in this shell"),
        ("run: no.py", (), "no.py is no program"),
        ("run: a\nrecipe: sft", (), "task.yaml may be 2 things"),
        ("run: a\nenvs: {A: 1}", (), "deploy.py convert task.yaml -o torchferry.yaml"),
    ],
)
def test_mistake_in_a_task_is_told_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.yaml").write_text(task)
    assert said in refused("task.yaml", *words)


def test_without_anything_to_run_the_ways_to_say_it_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "init task" in refused()
    assert "is an override; the config file comes first" in refused("target.queue=true")
    Path("torchferry.yaml").write_text("run: a")
    assert "give a config or a program" in refused("torchferry.yaml", "--as", "config", "--", "a")
    shown = CliRunner().invoke(cli, ["run", "--dry-run", "--json", "target.queue=true"])
    assert json.loads(shown.stdout)["plan"]["policy"]["queue"] is True
    assert shown.stderr == "running torchferry.yaml of this folder\n"


def test_init_task_takes_the_program_of_the_folder_and_runs(ferry: Ferry) -> None:
    ferry.write("main.py", "print('ran')")
    assert b"torchferry.yaml is written. Next: " in ferry.run("init", "task").stdout
    text = (ferry.project / "torchferry.yaml").read_text()
    assert "\nrun: python main.py  #" in text and len(text.splitlines()) <= 16
    ferry.write("torchferry.yaml", text.replace("gpus: auto:1", "device: cpu"))
    done = ferry.run("run", *ferry.where(), "--no-pull")
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr.decode()
    whole = "\n".join(line.removeprefix("# ") for line in text.splitlines()[1:])
    ferry.write("whole.yaml", whole)  # what stands in comments is right as well
    ferry.env["HF_TOKEN"] = "t"
    (ferry.project / "data").mkdir()
    (ferry.project / "data" / "a").touch()
    assert plan_of(ferry, "whole.yaml")["policy"]["max_runtime_s"] == 12 * 3600


SKY = """\
name: sky
resources: {accelerators: A100:2, use_spot: true}
envs: {MODEL: gpt2}
run: |
  values=(a b)
  [[ ${values[1]} == b ]] && python a.py "$MODEL" $SKYPILOT_NUM_GPUS_PER_NODE
"""
DSTACK = """\
type: task
env: [MODEL=gpt2]
commands:
  - false || true
  - python a.py "$MODEL" $DSTACK_GPUS_NUM
  - false
  - echo never
resources: {gpu: 2}
"""


@pytest.mark.parametrize(("name", "text", "code"), [("sky.yaml", SKY, 0), (".dstack.yml", DSTACK, 1)])
def test_task_of_another_tool_runs_once_it_is_converted(ferry: Ferry, name: str, text: str, code: int) -> None:
    ferry.write("a.py", "import sys; print(sys.argv[1:])")
    ferry.write(name, text)
    assert ferry.run("convert", name, "-o", "torchferry.yaml").returncode == 0
    done = ferry.run("run", "--device", "cpu", *ferry.where(), "--no-pull")
    assert (done.returncode, done.stdout) == (code, b"['gpt2', '2']\n"), done.stderr.decode()


def test_train_says_which_command_takes_a_file_that_is_none_of_its(ferry: Ferry) -> None:
    ferry.write("task.yaml", "run: a")
    ferry.write("sky.yaml", SKY)
    for name, says in (("task.yaml", "run task.yaml runs it"), ("sky.yaml", "convert sky.yaml")):
        done = ferry.run("train", name)
        assert done.returncode == 2 and says in done.stderr.decode(), done
