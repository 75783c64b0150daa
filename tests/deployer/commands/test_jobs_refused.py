"""Launches and commands that are refused, or say more: one clear error, near names, what stays behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deployer import terminal
from deployer.agent.python.spec import PythonSpec
from deployer.plan.launch_plan import Command
from deployer.plan.prepare import python_spec
from tests.support.ferry import REPO
from tests.support.pythons import make_wheel
from trainer.schema import Config, OptimConfig, RunConfig


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("status", "nope"), 2, "no job nope"),
        (("stop", "nope"), 2, "no job nope"),
        (("logs", "../x"), 2, "not a job id"),
        (("run",), 2, "nothing to run"),
        (("missing.py",), 2, "missing.py"),
        (("run", "--pull-max", "lots", "--", "true"), 2, "is not a size"),
        (("run", "--env", "1A=x", "--", "true"), 2, "not of the form"),
        (("run", "--secret", "NOT_SET_ANYWHERE", "--", "true"), 2, "is not set"),
        (("run", "--gpus", "0,0", "--", "true"), 2, "gpu_ranks"),
        (("run", "--remote-root", "/proc/nowhere", "--", "true"), 125, "remote root"),
        (("run", "--include", "../x", "--", "true"), 2, "not below the project"),
        (("run", "--wheels", "/nope", "--", "true"), 2, "--wheels /nope is no folder"),
        (("run", "--remote-root", "tf", "--", "true"), 2, "relative path"),
        (("run", "--gpus", "0-3", "--", "true"), 2, "write 0,1,2,3"),
        (("run", "--", "python", "-u", "trian.py"), 2, "did you mean train.py?"),
        (("run", "--", "train.py", "--lr", "1"), 2, "-- python train.py --lr 1"),
        (("run", "--torchrun", "--gpus", "0", "--", "torchrun", "train.py"), 2, "--torchrun --gpus 0,1 -- train.py"),
        (("run", "--torchrun", "--gpus", "0", "--", "gone.py"), 2, "gone.py is not among the files that are sent"),
        (("stats", "nope"), 2, "deploy.py status nope\n"),
        (("kill", "nope"), 2, "deploy.py stop nope\n"),
        (("other", "nope"), 2, "other is neither a command nor a config file\nhint: "),
        (("run", "python", "train.py"), 2, "deploy.py run -- python train.py"),
        (("run", "python", "-u", "train.py"), 2, "deploy.py run -- PROGRAM"),
        (("doctor", "gpu"), 2, "doctor takes options only, not 'gpu'\nhint: did you mean --ssh gpu?"),
        (("exec", "nope", "ls", "-l"), 2, "deploy.py exec nope -- ls -l"),
    ],
)
def test_bad_input_one_clear_error_and_nothing_started(ferry, words, code, says):
    ferry.write("train.py", "")
    done = ferry.run(*words)
    assert done.returncode == code
    assert says in done.stderr.decode() and b"Traceback" not in done.stderr
    assert ferry.job_ids() == []


def test_id_that_matches_two_jobs_names_both(ferry):
    for _ in range(2):
        ferry.run("run", *ferry.where(), "--name", "twin", "--", "true")
    done = ferry.run("status", "twin")
    assert done.returncode == 2 and all(i.encode() in done.stderr for i in ferry.job_ids())


@pytest.mark.parametrize("where", ["by this client's record", "by the host"])
def test_id_is_known_by_its_beginning_or_its_end_in_any_case(ferry, where):
    ferry.run("run", *ferry.where(), "--name", "Lora", "--no-pull", "--", "true")
    (job_id,) = ferry.job_ids()
    place = ferry.where() if where == "by the host" else []
    for typed in ("Lora", job_id[-4:].upper()):
        done = ferry.run("status", typed, *place)
        assert done.stdout.decode().split()[0] == job_id, done.stderr
        assert f"logs {job_id}".encode() in done.stderr and b"status" not in done.stderr


def test_missing_gpu_refused_with_what_to_do(ferry):
    done = ferry.run(str(REPO / "configs" / "01_debug_sft.py"), *ferry.where())
    assert done.returncode == 125
    assert b"target.device=cpu" in done.stderr


def test_status_of_a_failed_job_rounds_its_metrics_and_says_what_to_do(ferry):
    metrics = '{"step": 123456, "loss": 0.123456789, "tokens_per_s": 12345.678}'
    code = f"echo '{metrics}' > $TORCHFERRY_RUN_DIR/metrics.jsonl; echo words; exit 5"
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "sh", "-c", code)
    assert b"failed: rank 0 exited with code 5\n" in done.stderr
    status = ferry.run("status", ferry.job_ids()[0])
    shown = dict(line.rsplit(None, 1) for line in status.stdout.decode().splitlines() if line.startswith("last"))
    assert shown == {"last step": "123456", "last loss": "0.1235", "last tokens_per_s": "12,346"}
    job_id = ferry.job_ids()[0].encode()
    assert b"logs %s --rank 0" % job_id in status.stderr and b"exec %s -- ls -l" % job_id in status.stderr


@pytest.mark.parametrize("line", ["torch", "torch==2.11.0+cpu  # ours", "torch[x]>=2"])
def test_torch_is_asked_for_once_whoever_names_it(tmp_path, line):
    def spec_of(text: str) -> PythonSpec:
        (tmp_path / "requirements.txt").write_text(text)
        files = {"requirements.txt": "hash"}
        return python_spec(Config(), Command(("train.py",), torchrun=True), project=tmp_path, files=files)

    assert spec_of("torch-geometric\ntorch.fx\n").requires == ("torch>=2.0",)
    assert spec_of(line + "\n")[1:5:3] == ((), (line.split("  #")[0],))


def test_trainers_environment_has_what_the_config_asks_for(tmp_path):
    config = Config(optim=OptimConfig(optimizer="adamw8bit"), run=RunConfig(trackers=["tensorboard"]))
    spec = python_spec(config, None, project=tmp_path, files={})
    assert spec.requires[-2:] == ("torchao>=0.14", "tensorboard")


def test_data_outside_the_project_is_said_to_stay_behind(ferry):
    config = str(REPO / "configs" / "01_debug_sft.py")
    done = ferry.run(config, "--ssh", "nobody@127.0.0.1:1", "--dry-run", "data.train=/mnt/rows.jsonl")
    assert (
        b"warning: /mnt/rows.jsonl is not part of the project and does not travel: the host must have it" in done.stderr
    )


def test_hints_name_the_program_as_it_was_called(ferry):
    checkout = ferry.run("logs", "nope")
    assert f"hint: {sys.executable} {REPO / 'deploy.py'} ps lists".encode() in checkout.stderr
    words = [sys.executable, "-c", "from deployer.cli import main; main()", "logs", "nope"]
    installed = subprocess.run(words, env=ferry.environment(), capture_output=True)
    assert b"hint: torchferry ps lists" in installed.stderr


def test_surprising_trees_are_not_sent_without_a_yes(ferry):
    home = {**ferry.environment(), "HOME": str(ferry.project)}
    words = ferry.argv("run", *ferry.where(), "--no-pull", "--", "true")
    asked = subprocess.run(words, cwd=ferry.project, env=home, stdin=subprocess.DEVNULL, capture_output=True)
    assert asked.returncode == 2 and b"everything in it would be sent" in asked.stderr
    with (ferry.project / "big").open("wb") as f:
        f.truncate(101_000_000)
    asked = ferry.run("run", *ferry.where(), "--no-pull", "--", "true")
    assert asked.returncode == 2 and b"big (101 MB)" in asked.stderr and b"--yes" in asked.stderr
    assert ferry.job_ids() == []


def test_wheels_sent_along_become_the_environment_of_a_host_that_lacks_them(ferry, tmp_path):
    make_wheel(tmp_path / "wheels", "ferry_lone", "1.0")
    ferry.write("requirements.txt", "ferry-lone==1.0\n")
    words = ("run", *ferry.where(), "--no-pull", "--wheels", str(tmp_path / "wheels"))
    program = ("--", "python", "-c", "import ferry_lone; print(ferry_lone.version)")
    shown = ferry.run(*words, "--dry-run=remote", *program).stdout.decode()
    assert "# $PYTHON  to be built there: " in shown and "lacks ferry-lone==1.0 (not installed)" in shown
    assert shown.splitlines()[-1].split(" -c ")[0].endswith(" $PYTHON")
    done = ferry.run(*words, *program)
    assert done.stdout == b"1.0\n", done.stderr.decode()


def test_launch_line_names_three_rules_that_left_out_most_and_counts_the_others(ferry):
    for number, rule in enumerate(("a", "b", "c", "d", "e")):
        (ferry.project / rule).mkdir()
        for file in range(9 - number):
            ferry.write(f"{rule}/{file}", "")
    ferry.write(".gitignore", "a/\nb/\nc/\nd/\ne/\n")
    shown = ferry.run("run", "--dry-run", "--", "true").stdout
    assert b"; left out a/, b/, c/ and 2 more rules (35 files)\n" in shown


def test_dry_run_says_that_a_python_config_was_executed(ferry):
    source = "from trainer.schema import Config, DataConfig\nopen('was-run', 'w')\n"
    ferry.write("c.py", source + "config = Config(data=DataConfig(train=['builtin:stdlib-docs']))\n")
    ferry.write("c.yaml", "data:\n  train: [builtin:stdlib-docs]\n")
    words = ("target.device=cpu", "model.family=qwen3", "--dry-run")
    done = ferry.run("c.py", *words)
    assert "# config   c.py: Python, executed here to read it\n" in done.stdout.decode(), done.stderr.decode()
    assert (ferry.project / "was-run").exists()
    done = ferry.run("c.yaml", *words)
    assert done.returncode == 0 and b"# config" not in done.stdout, done.stderr.decode()


def test_dry_run_without_the_host_says_that_its_interpreter_is_not_known(ferry):
    ferry.write("a.py", "")
    shown = ferry.run("run", "--dry-run", "--", "python", "a.py").stdout.decode()
    assert "Here python3 stands for it, --dry-run=remote asks the host\nPYTHON=python3\n" in shown
    named = ferry.run("run", "--dry-run", "--python", "/opt/my env/python", "--", "python", "a.py").stdout.decode()
    assert "PYTHON='/opt/my env/python'\n" in named and "stands for it" not in named


def test_single_file_is_counted_as_one(ferry):
    ferry.write("only.py", "print('done')")
    words = ("--no-pull", "--", "python", "only.py")
    assert "# files    1 file, " in ferry.run("run", "--dry-run", *words).stdout.decode()
    assert ": 1 file, " in ferry.run("run", *ferry.where(), *words).stderr.decode()
    assert terminal.counted(1200, "file") == "1,200 files"
