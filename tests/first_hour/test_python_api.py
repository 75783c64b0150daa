"""`import torchferry`: jobs launched, followed, asked and stopped from Python, in this very process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import torchferry
from deployer.api.keywords import NOT_OF_A_LAUNCH, as_overrides, read_keywords
from deployer.commands.launch.cli import resume, run
from deployer.exit_codes import NOT_HOME
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.sshd import ALIAS, SshServer

STAYS = ["sh", "-c", "echo up; exec sleep 1000"]


@pytest.fixture
def place(ferry: Ferry, server: SshServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where `launch` is to go: over a real sshd, from the project's folder."""
    monkeypatch.setenv("TORCHFERRY_SSH_CONFIG", str(server.client_config_path))
    monkeypatch.chdir(ferry.project)
    return {"host": ALIAS, "remote_root": str(ferry.root), "python": sys.executable}


def test_import_is_light() -> None:
    code = "import torchferry, sys; print(*sorted({'click', 'torch', 'paramiko', 'fabric', 'yaml'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    assert {*torchferry.__all__} <= {*dir(torchferry)} and all(hasattr(torchferry, name) for name in torchferry.__all__)


# --- keyword arguments -----------------------------------------------------------------------------------------------


def test_options_of_run_are_keyword_arguments_with_values_of_either_kind() -> None:
    given = {
        "host": "gpu",
        "gpus": [0, 2],
        "env": {"A": "b=c", "N": 1},
        "outputs": "out/",
        "max_restarts": 3,
        "max_runtime": 90,
        "stall_timeout": "10m",
        "log_max": "2GB",
        "queue": True,
        "torchrun": False,
        "include": [Path("data")],
        "name": None,
    }
    keys, others = read_keywords(run, given, function="launch", refused={})
    assert keys == {
        "target.ssh": "gpu",
        "target.gpu_ranks": [0, 2],
        "target.env.A": "b=c",
        "target.env.N": "1",
        "target.outputs": ["out"],
        "target.max_restarts": 3,
        "target.max_runtime_s": 90.0,
        "target.stall_timeout_s": 600.0,
        "target.log_max_gb": 2.0,
        "target.queue": True,
    }
    assert others == {"torchrun": False, "include": ("data",)}
    assert as_overrides({"train.steps": 3, "model.name": "a b", "data.train": ["x"], "train.resume": None}) == (
        "train.steps=3",
        "model.name=a b",
        'data.train=["x"]',
        "train.resume=null",
    )


@pytest.mark.parametrize(
    ("command", "given", "says"),
    [
        (run, {"max_restart": 3}, "unexpected option 'max_restart'; did you mean 'max_restarts'?"),
        (run, {"output": "x"}, "did you mean 'outputs'?"),
        (run, {"dry_run": True}, "it is for the command line"),
        (run, {"queue": "yes"}, "queue is True or False"),
        (run, {"gpus": True}, "gpus takes a value"),
        (resume, {"include": "x"}, "unexpected option 'include'"),
    ],
)
def test_option_that_there_is_not_is_a_type_error_with_the_nearest(command, given, says) -> None:
    with pytest.raises(TypeError) as error:
        read_keywords(command, given, function="launch", refused=NOT_OF_A_LAUNCH)
    assert says in str(error.value)


def test_mistake_is_an_error_with_its_hint_and_nothing_is_started(ferry: Ferry, place: dict[str, str]) -> None:
    ferry.write("train.py", "")
    with pytest.raises(torchferry.UsageError, match="max_restarts"):
        torchferry.launch(["true"], **place, max_restarts=-1)
    with pytest.raises(torchferry.UsageError) as error:
        torchferry.launch(["python", "trian.py"], **place)
    assert (error.value.code, error.value.hint) == ("usage", "did you mean train.py?")
    assert "hint: did you mean train.py?" in str(error.value)
    with pytest.raises(torchferry.UsageError, match="a list of words"):
        torchferry.launch("train", **place)
    with pytest.raises(torchferry.UnknownJob):
        torchferry.job("nope")
    assert ferry.job_ids() == []


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_job_is_launched_followed_asked_and_fetched(
    ferry: Ferry, place: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = json.dumps({"step": 1, "loss": 0.5})
    says = f"(head -c 100000 /dev/zero | tr '\\0' [; echo; echo '{row}') > $TORCHFERRY_RUN_DIR/metrics.jsonl; "
    says += "echo $A; echo w > weights; printf end"
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.chdir("/")
    job = torchferry.launch(["sh", "-c", says], **place, env={"A": "a b"}, outputs=["weights"], cwd=ferry.project)
    result = job.wait(timeout=HANG_S)
    assert capsys.readouterr().out.splitlines() == ["a b", "end", f"{job.id} succeeded; results: {result.results}"]
    assert (result.state, result.code, result.not_home) == ("succeeded", 0, ())
    assert result.results == ferry.project / "results" / job.id == job.results
    assert (job.results / "code" / "weights").read_text() == "w\n"
    assert job.metrics() == [{"step": 1, "loss": 0.5}] == [job.status().latest]
    assert [*torchferry.job(job.id[-4:]).logs()] == ["a b", "end"] and [*job.logs(tail=1)] == ["end"]
    assert job.pull(to=ferry.project / "elsewhere", paths="weights") == ferry.project / "elsewhere"
    with pytest.raises(torchferry.NotHome) as lacking:
        job.pull(paths=["nothing"])
    assert (lacking.value.exit_code, "nothing" in str(lacking.value)) == (NOT_HOME, True)
    (info,) = [one for one in torchferry.jobs() if one.id == job.id]
    assert (info.state, info.host, job.host) == ("succeeded", ALIAS, ALIAS)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_job_that_fails_raises_with_the_reason_and_resumes(ferry: Ferry, place: dict[str, str]) -> None:
    ferry.write("fails.py", 'import os\nprint(os.environ["WANTED"])\n')
    job = torchferry.launch(["python", "fails.py"], **place)
    with pytest.raises(torchferry.JobFailed) as failed:
        job.wait(quiet=True)
    result = failed.value.result
    assert (result.state, result.code, failed.value.exit_code) == ("failed", 1, 1)
    assert result.last_lines[-1] == "KeyError: 'WANTED'" and "KeyError: 'WANTED'" in str(failed.value)
    assert job.wait(check=False, quiet=True, pull=False).state == job.status().state == "failed"
    with pytest.raises(torchferry.UsageError, match="a program of your own"):
        job.resume(**{"train.steps": 4})
    assert job.resume(env={"WANTED": "here"}) is job
    assert job.wait(quiet=True).state == "succeeded" and job.status().attempt == 2
    assert [*job.logs()] == ["here"]


def test_resume_takes_the_env_file_again_and_tells_the_url(
    ferry: Ferry, place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ferry.write("own.env", "TF_VALUE=v-1\n")
    url = "http://127.0.0.1:9/token"
    monkeypatch.setenv("TORCHFERRY_NOTIFY", url)
    monkeypatch.chdir("/")
    job = torchferry.launch(["sh", "-c", "echo $TF_VALUE"], **place, env_file="own.env", cwd=ferry.project)
    assert os.environ["TORCHFERRY_NOTIFY"] == url
    monkeypatch.delenv("TORCHFERRY_NOTIFY")
    job.wait(quiet=True, pull=False)
    assert policy(ferry, job.id)["notify"] == ["127.0.0.1"]
    with pytest.warns(UserWarning, match=r"127.0.0.1 is told no more"):
        job.resume(**{"target.max_runtime_s": 600})
    job.wait(quiet=True, pull=False)
    assert [*job.logs()] == ["v-1"] and policy(ferry, job.id)["max_runtime_s"] == 600.0
    ferry.write("other.env", "TF_VALUE=v-2\n")
    job.resume(env_file=ferry.project / "other.env", notify=url)
    job.wait(quiet=True, pull=False)
    assert [*job.logs()] == ["v-2"] and policy(ferry, job.id)["notify"] == ["127.0.0.1"]
    with pytest.raises(TypeError, match="ssh_key"):
        job.resume(ssh_key="x")
    with pytest.raises(torchferry.UsageError, match="no command"):
        job.resume(notify="notify-send done")
    with pytest.raises(torchferry.UsageError, match="no command"):
        torchferry.launch(["true"], **place, notify="notify-send done")


def policy(ferry: Ferry, job_id: str) -> dict:
    found: dict = json.loads((ferry.job(job_id) / "job.json").read_text())["plan"]["policy"]
    return found


def test_job_that_is_left_runs_on_and_is_stopped(place: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    job = torchferry.launch(STAYS, **place)
    with pytest.raises(TimeoutError, match=rf"torchferry.job\('{job.id}'\)"):
        job.wait(timeout=0.1, quiet=True)
    main = threading.main_thread().ident
    assert main is not None
    lines = job.logs(follow=True)
    assert next(lines) == "up"
    lines.close()
    capsys.readouterr()

    def press() -> None:
        wait_for(lambda: "up" in capsys.readouterr().out)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    said = capsys.readouterr()
    assert f"{job.id} goes on; torchferry.job({job.id!r}) finds it again" in said.out and "trying again" not in said.err
    assert job.status().state == "running"
    assert job.stop(grace=0).state == "stopped" == job.wait(check=False, quiet=True, pull=False).state
    with pytest.raises(torchferry.JobFailed, match="stopped"):
        job.wait(quiet=True, pull=False)
