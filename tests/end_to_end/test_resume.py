"""Jobs that go on: `resume` through the command line, and the trainer's restarts compared with an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployer.agent.host.layout import Job
from deployer.agent.host.typed import to_json
from deployer.agent.job.judge import judge
from deployer.agent.job.plan import PLAN_VERSION, Devices, Plan, Slot, fill, parse_plan
from deployer.connection.host import Host
from deployer.errors import UsageError
from deployer.plan.next_attempt import Resumable, beginning, plan_next
from deployer.plan.options import Options
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import end_of, wait_for
from trainer.config.load import config_to_yaml
from trainer.schema import Config, TargetConfig, TrainConfig

# --- the plan of the next attempt: pure ------------------------------------------------------------------------------

OLD: dict[str, Any] = {
    "version": 1,
    "job_id": "old-1",
    "name": "old",
    "created": "2026-01-02T03:04:05Z",
    "kind": "program",
    "device": "cpu",
    "gpus": [],
    "allow_busy": False,
    "nproc": 1,
    "torchrun": False,
    "argv": [[{"slot": "python"}], "-u", "x.py", "a b"],
    "cwd": [{"slot": "job"}, "/code"],
    "env": {},
    "python": {"explicit": None, "requires": ["numpy"], "lock": None, "wheels": None},
    "tree": "abc",
    "includes": [{"path": "data", "tree": "def", "file": False}],
    "env_names": ["A"],
    "secret_names": [],
    "config_yaml": None,
}
"""As an older client wrote it: without a policy."""
RANKS = {
    "torchrun": True,
    "nproc": 2,
    "device": "cuda",
    "gpus": ["0", "1"],
    "argv": [
        *([{"slot": "python"}], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--max-restarts=0", [{"slot": "agent"}, "/rank.py"], "x.py", "a b"),
    ],
}
TRAINER = {
    "kind": "trainer",
    "argv": [[{"slot": "python"}], "-u", [{"slot": "job"}, "/lib/train.py"], [{"slot": "job"}, "/config.yaml"]],
    "config_yaml": config_to_yaml(Config()),
}


def secret_config(name: str) -> Config:
    return Config(target=TargetConfig(secrets=[name]))


def next_of(changes: dict[str, Any], **options: Any) -> Plan:
    known = ("GONE", "HERE", "LOST")
    plan, _ = plan_next(resumable(changes), Options(**options), known=known)
    return plan


def resumable(changes: dict[str, Any], from_step: int | None = None) -> Resumable:
    return Resumable("old-1", parse_plan({**OLD, **changes}), 1, from_step)


@pytest.mark.parametrize("changes", [{}, RANKS], ids=["program", "torchrun"])
def test_plan_of_an_older_client_comes_back_as_it_was(changes: dict[str, Any]) -> None:
    before, again = parse_plan({**OLD, **changes}), next_of(changes)
    (role,) = again.roles
    assert again == before._replace(
        version=PLAN_VERSION, roles=(before.roles[0]._replace(env=role.env),), request=again.request
    )
    assert again.request.command == (("x.py", "a b") if changes else ("python", "-u", "x.py", "a b"))
    visible = fill(role.env["CUDA_VISIBLE_DEVICES"], {"gpus": ",".join(role.nodes[0].gpus)})
    assert visible == ",".join({**OLD, **changes}["gpus"])


def test_other_gpus_change_the_number_of_ranks_and_nothing_else_of_the_program() -> None:
    (role,) = next_of(RANKS, keys={"target.gpu_ranks": [3, 1, 2]}).roles
    assert (role.nproc, role.nodes) == (3, (Devices("cuda", ("3", "1", "2")),))
    assert role.argv[4] == "--nproc-per-node=3"
    assert to_json(role.argv[5:]) == RANKS["argv"][5:]


def test_gpus_that_the_host_chooses_stay_its_choice() -> None:
    words = {"gpus": ["auto:2"]}
    (role,) = next_of({**RANKS, **words}).roles
    assert (role.nproc, role.nodes) == (2, (Devices("cuda", ("auto:2",)),))
    assert role.env["CUDA_VISIBLE_DEVICES"] == (Slot("gpus"),)


def test_overrides_reach_the_trainers_config_with_all_its_checks() -> None:
    plan = next_of(TRAINER, overrides=("train.steps=400", "target.gpu_ranks=[0,1]", "target.max_restarts=2"))
    assert plan.config_yaml is not None
    assert yaml.safe_load(plan.config_yaml)["train"]["steps"] == 400
    (role,) = plan.roles
    assert (role.nproc, role.torchrun, role.max_restarts) == (2, True, 2)
    assert role.argv[-2:] == next_of(TRAINER).roles[0].argv[-2:]


@pytest.mark.parametrize(
    ("resume", "override", "from_step", "words"),
    [
        ("/elsewhere/step_000009", (), 30, "from step 30"),
        ("/elsewhere/step_000009", (), None, "from /elsewhere/step_000009"),
        ("never", (), 30, "from step 30"),
        ("auto", (), None, "from the beginning: no complete checkpoint"),
        ("auto", ("train.resume=never",), 30, "from the beginning"),
    ],
)
def test_next_attempt_goes_on_from_what_the_job_has_saved_unless_told_otherwise(
    resume: str, override: tuple[str, ...], from_step: int | None, words: str
) -> None:
    changes = {**TRAINER, "config_yaml": config_to_yaml(Config(train=TrainConfig(resume=resume)))}
    job = resumable(changes, from_step)
    plan, _ = plan_next(job, Options(overrides=override), known=())
    assert beginning(job, plan) == words


@pytest.mark.parametrize(
    ("changes", "overrides", "message", "hint"),
    [
        (TRAINER, ("train.stepz=4",), "train.stepz is not a key", "train.steps"),
        (TRAINER, ("train.steps=-4",), "train.steps", ""),
        (TRAINER, ("data.train=other.jsonl",), "other.jsonl is not among what old-1 was sent with", "launch a new job"),
        ({}, ("train.steps=4",), "train.steps=4 changes a config", "--env"),
    ],
)
def test_wrong_override_is_refused(changes: Any, overrides: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        next_of(changes, overrides=overrides)
    assert message in error.value.message and hint in error.value.hint


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (("train.steps=60",), True),
        (("train.steps=61",), False),
        (("train.steps=60", "train.resume=never"), False),
        (("train.steps=60", "train.resume=/elsewhere/step_000030"), False),
        (("train.epochs=1",), False),
    ],
)
def test_run_that_would_end_before_its_checkpoint_is_refused(overrides: tuple[str, ...], refused: bool) -> None:
    job = resumable(TRAINER, 61)
    if not refused:
        plan_next(job, Options(overrides=overrides), known=())
        return
    with pytest.raises(UsageError, match=r"old-1 has saved step 61, and train\.steps is 60") as caught:
        plan_next(job, Options(overrides=overrides), known=())
    assert caught.value.exit_code == 2


def test_every_missing_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "x")
    with pytest.raises(UsageError, match="the secrets GONE, LOST are not set in this shell"):
        next_of({"secret_names": ["GONE", "HERE", "LOST"]})


@pytest.mark.parametrize("changes", [{}, {**TRAINER, "config_yaml": config_to_yaml(secret_config("CLOUD_KEY"))}])
def test_host_gets_no_secret_that_the_job_was_never_given(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_KEY", "canary")
    job = resumable({**changes, "secret_names": ["CLOUD_KEY"]})
    with pytest.raises(UsageError, match="needs the secret CLOUD_KEY, which this client has never given it"):
        plan_next(job, Options(), known=("HF_TOKEN",))
    _, payload = plan_next(job, Options(keys={"target.secrets": ["CLOUD_KEY"]}), known=())
    assert payload["secrets"] == {"CLOUD_KEY": "canary"}


def test_config_that_grows_without_bound_is_refused() -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{n}: &{n} [{','.join([f'*{m}'] * 10)}]" for m, n in zip("abcdef", "bcdefg", strict=True)]
    with pytest.raises(UsageError, match="has more than 100,000 values"):
        next_of({**TRAINER, "config_yaml": "\n".join(lines)})


# --- a program -------------------------------------------------------------------------------------------------------

COUNTS = """
import os, sys
open('count', 'a').write('x')
attempt, a, s = (os.environ.get(name) for name in ('TORCHFERRY_ATTEMPT', 'A', 'S'))
print(attempt, len(open('count').read()), a, s, sys.argv[1:])
sys.exit(3 if attempt == '1' else 0)
"""


def launch_failing(ferry: Ferry, *options: str) -> str:
    (ferry.project / "count.py").write_text(COUNTS)
    done = ferry.run("run", *ferry.where(), *options, "--", "python", "count.py", "a b")
    assert done.returncode == 3, done.stderr.decode()
    return ferry.job_ids()[0]


def test_resumed_program_runs_again_in_the_same_folder_with_its_own_log(ferry: Ferry) -> None:
    ferry.env["S"] = "hush"
    job_id = launch_failing(ferry, "--env", "A=1", "--secret", "S")
    (ferry.project / "count.py").write_text("raise SystemExit('changed since')")
    done = ferry.run("resume", job_id)
    assert (done.returncode, done.stdout) == (0, b"2 2 1 hush ['a b']\n"), done.stderr.decode()
    assert b"attempt 2, after attempt 1 ended: rank 0 exited with code 3; starts again" in done.stderr
    (results,) = (ferry.project / "results").iterdir()
    assert [(results / "logs" / f"attempt_{n}" / "rank_0.log").stat().st_size for n in (1, 2)] == [19, 19]
    record = json.loads((ferry.job() / "job.json").read_text())
    assert [r["attempt"] for r in record["resumed"]] == [2]
    assert "hush" not in (ferry.job() / "job.json").read_text()
    assert [a["state"] for a in json.loads((ferry.job() / "status.json").read_text())["attempts"]] == [
        "failed",
        "succeeded",
    ]


def test_resume_without_a_secret_starts_nothing_and_with_other_values_takes_them(ferry: Ferry) -> None:
    ferry.env["S"] = "first"
    job_id = launch_failing(ferry, "--env", "A=1", "--secret", "S")
    del ferry.env["S"]
    done = ferry.run("resume", job_id)
    assert done.returncode == 2 and b"the secret S is not set in this shell" in done.stderr
    assert not (ferry.job() / "logs" / "attempt_2").exists()
    ferry.env["S"] = "second"
    assert ferry.run("resume", job_id, "--env", "A=2", "--no-pull").stdout == b"2 2 2 second ['a b']\n"


def test_running_job_is_not_resumed(ferry: Ferry) -> None:
    started = ferry.run("run", *ferry.where(), "--detach", "--json", "--", "sh", "-c", "exec sleep 1000")
    job_id = json.loads(started.stdout)["id"]
    wait_for(lambda: judge(Job(str(ferry.job()))).state == "running")
    done = ferry.run("resume", job_id)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"Error: {job_id} is still running (attempt 1)")
    assert ferry.run("stop", job_id, "--grace", "0").returncode == 0


def test_stopped_job_is_resumed_and_can_be_stopped_again(ferry: Ferry) -> None:
    script = "echo up $TORCHFERRY_ATTEMPT; exec sleep 1000"
    started = ferry.run("run", *ferry.where(), "--detach", "--json", "--", "sh", "-c", script)
    job_id, job = json.loads(started.stdout)["id"], Job(str(ferry.job()))
    for attempt in (1, 2):
        log = Path(job.logs(attempt)) / "rank_0.log"
        wait_for(lambda log=log: log.exists() and log.read_text())
        assert log.read_text() == f"up {attempt}\n"
        assert ferry.run("stop", job_id, "--grace", "0").returncode == 0
        assert end_of(job).state == "stopped"
        if attempt == 1:
            resumed = ferry.run("resume", job_id, "--detach")
            assert resumed.returncode == 0 and b"attempt 2, the same program with the same files" in resumed.stderr
            told = ferry.run("status", job_id).stdout
            assert b"attempt     2, after attempt 1 ended: stopped on request; starts again" in told


def ask(ferry: Ferry, job_id: str, plan: dict[str, Any], attempt: int) -> dict[str, Any]:
    """One request to resume, as a client sends it that is cut off right after the acknowledgement."""
    request = {"op": "resume", "job": job_id, "attempt": attempt, "plan": plan, "follow": False}
    with Host(None, str(ferry.root)).connect(request=request) as link:
        return dict(link.first.result("ack"))


def test_resume_that_is_asked_for_again_answers_with_the_same_attempt(ferry: Ferry) -> None:
    job_id = launch_failing(ferry)
    plan = json.loads((ferry.job() / "job.json").read_text())["plan"]
    assert [ask(ferry, job_id, plan, 2)["already"] for _ in range(3)] == [False, True, True]
    with pytest.raises(UsageError, match="was started already, in another way"):
        ask(ferry, job_id, {**plan, "allow_busy": True}, 2)
    end_of(Job(str(ferry.job())))
    assert (ferry.job() / "code" / "count").read_text() == "xx"


def test_resume_that_broke_before_its_supervisor_began_is_done_again(ferry: Ferry) -> None:
    job_id = launch_failing(ferry)
    path = ferry.job() / "job.json"
    record = json.loads(path.read_text())
    broken = {"attempt": 2, "plan_hash": "another", "resumed_at": 1.0, "plan_before": {"the": "first"}}
    path.write_text(json.dumps({**record, "resumed": [broken]}))
    assert ask(ferry, job_id, record["plan"], 2)["already"] is False
    (noted,) = json.loads(path.read_text())["resumed"]
    assert (noted["plan_before"], noted["plan_hash"] != "another") == ({"the": "first"}, True)
    assert end_of(Job(str(ferry.job()))).state == "succeeded"


# --- the trainer -----------------------------------------------------------------------------------------------------

KILLS_ITSELF = """
import os, signal, sys, threading, time
if os.environ.get('TORCHFERRY_ATTEMPT') == '1' and 'train.py' in ' '.join(sys.orig_argv):
    def watch():
        while not os.path.exists(os.environ['TORCHFERRY_RUN_DIR'] + '/checkpoints/step_000006/COMPLETE'):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()
"""
SMALL = (
    *("target.device=cpu", "train.steps=14", "train.save_every=6", "train.eval_every=7", "data.seq_len=128"),
    *("model.hidden_size=64", "model.intermediate_size=96", "model.num_layers=2", "data.max_eval_rows=8"),
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    timed = ("start_s", "step_s", "data_wait_s", "tokens_per_s_per_gpu", "mfu", "mem_gib", "eval_s")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def test_trainer_killed_and_restarted_ends_as_if_undisturbed_and_resumes_further(ferry: Ferry, tmp_path: Path) -> None:
    config = str(REPO / "configs" / "01_debug_sft.py")
    (ferry.project / "sitecustomize.py").write_text(KILLS_ITSELF)
    ferry.env["OMP_NUM_THREADS"] = "1"
    there = (*ferry.where(), "--python", sys.executable, "--env", "PYTHONPATH=.", "--no-pull")
    done = ferry.run(config, *SMALL, *there, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr.decode()
    assert b"attempt 2 of at most 2, after attempt 1 ended: rank 0 was killed by SIGKILL" in done.stderr
    assert b"goes on from step 6" in done.stderr and b"resuming after step 6" in done.stdout
    alone = [sys.executable, str(REPO / "train.py"), config, *SMALL, "--run-dir", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert rows_of(ferry.job() / "metrics.jsonl") == rows_of(tmp_path / "alone" / "metrics.jsonl")

    done = ferry.run("resume", ferry.job_ids()[0], "train.steps=17", "--no-pull")
    assert done.returncode == 0, done.stderr.decode()
    assert b"attempt 3, from step 14" in done.stderr
    assert [row["step"] for row in rows_of(ferry.job() / "metrics.jsonl") if "loss" in row] == list(range(1, 18))
    configs = {p.name: yaml.safe_load(p.read_text())["train"]["steps"] for p in ferry.job().glob("config*.yaml")}
    assert configs == {"config.attempt_2.yaml": 14, "config.yaml": 17}

    done = ferry.run("resume", ferry.job_ids()[0], "train.steps=10", "--no-pull")
    assert done.returncode == 2 and b"has saved step 17, and train.steps is 10" in done.stderr
    assert not (ferry.job() / "logs" / "attempt_4").exists()
