"""The plan of the next attempt of each finished job, beside the one that the client of 836d9e4 makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployer.agent.job.plan import Plan, Request, fill, parse_plan
from deployer.plan.launch_plan import read_settings
from deployer.plan.next_attempt import Resumable, plan_next
from deployer.plan.options import Options
from tests.compat.finished import JOBS
from trainer.config.load import config_from_dict
from trainer.schema import Config

OLD_CLIENT = """
import json, sys
from deployer.plan import plan_to_json
from deployer.prepare import Options
from deployer.resume import Resumable, plan_next
for line in sys.stdin:
    job, options = json.loads(line)
    plan, payload = plan_next(Resumable(**job), Options(**options), known=())
    print(json.dumps([plan_to_json(plan), payload]))
"""
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"gpus": "2,0"}, {"target.gpu_ranks": [2, 0]}),
    ({"gpus": "auto:3", "queue": True}, {"target.gpu_ranks": ["auto:3"], "target.queue": True}),
    ({"max_restarts": 4, "max_runtime_s": 9.5}, {"target.max_restarts": 4, "target.max_runtime_s": 9.5}),
    ({"stall_timeout_s": 60.0, "env": ("B=2",)}, {"target.stall_timeout_s": 60.0, "target.env.B": "2"}),
]
"""Options of a resume, as the old client holds them and as the present one does."""
OVERRIDES = ("train.steps=9", "run.export=false", "target.train_backend=auto", "train.epochs=null")
"""Of the trainer's job."""


def old_plan(name: str) -> dict[str, Any]:
    """The plan of a finished job."""
    raw = (JOBS / name / "job.json").read_text().replace("@PYTHON@", sys.executable).replace("@ROOT@", "/root")
    return dict(json.loads(raw)["plan"])


@pytest.fixture(scope="module")
def old_answers(old_code: Path) -> dict[str, list[tuple[Plan, dict[str, Any]]]]:
    """What the old client plans and sends, by the name of a job: one for each of WAYS."""
    asked = [
        [
            {
                "job_id": plan["job_id"],
                "plan": plan,
                "attempt": 1,
                "from_step": 2 if plan["kind"] == "trainer" else None,
            },
            {**options, **({"overrides": OVERRIDES} if plan["kind"] == "trainer" else {})},
        ]
        for plan in map(old_plan, names())
        for options, _ in WAYS
    ]
    lines = "".join(json.dumps(question) + "\n" for question in asked)
    argv = [sys.executable, "-c", OLD_CLIENT]
    done = subprocess.run(argv, input=lines, cwd=old_code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [(parse_plan(plan), payload) for plan, payload in map(json.loads, done.stdout.splitlines())]
    return {name: answers[at * len(WAYS) :][: len(WAYS)] for at, name in enumerate(names())}


def names() -> list[str]:
    return sorted(path.name for path in JOBS.iterdir())


def filled(plan: Plan) -> Plan:
    """With the GPUs' slot filled, which the old client left to the host only where the host chooses."""
    (role,) = plan.roles
    gpus = {"gpus": ",".join(role.nodes[0].gpus), "job": "/job", "root": "/root"}
    return plan._replace(roles=(role._replace(env={name: fill(text, gpus) for name, text in role.env.items()}),))


def meaning(request: Request) -> tuple[Any, Config]:
    """A request, its settings as the config that they come to."""
    return request._replace(overrides=()), config_from_dict(read_settings(request))


@pytest.mark.parametrize("name", names())
def test_next_attempt_is_the_one_that_the_old_client_plans(name: str, old_answers: Any) -> None:
    raw = old_plan(name)
    is_trainer = raw["kind"] == "trainer"
    for (_, keys), (theirs, payload) in zip(WAYS, old_answers[name], strict=True):
        overrides = OVERRIDES if is_trainer else ()
        job = Resumable(raw["job_id"], parse_plan(raw), 1, 2 if is_trainer else None)
        ours, sent = plan_next(job, Options(overrides=overrides, keys=keys), known=())
        assert sent == payload
        assert filled(ours) == filled(theirs._replace(version=ours.version, request=ours.request))
        following, _ = plan_next(Resumable(raw["job_id"], ours, 2, job.from_step), Options(), known=())
        assert following == ours


def test_request_of_each_job_is_what_was_typed() -> None:
    requests = {name: parse_plan(old_plan(name)).request for name in names()}
    assert {name: (request.command, request.torchrun) for name, request in requests.items()} == {
        "program": (
            (
                *("sh", "-c"),
                'echo \'{"step": 1, "loss": 0.5}\' > $TORCHFERRY_RUN_DIR/metrics.jsonl; echo $A wrote one step',
            ),
            False,
        ),
        "gpu": (("sh", "-c", "echo on $CUDA_VISIBLE_DEVICES"), False),
        "failed": (("python", "fails.py", "a b"), False),
        "ranks": (("ranks.py",), True),
        "stopped": (("sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"), False),
        "lost": (("true",), False),
        "sft": ((), False),
    }
    own: dict[str, dict[str, Any]] = {
        "gpu": {"gpu_ranks": ["auto:1"]},
        "failed": {"max_restarts": 1},
        "ranks": {"gpu_ranks": [0, 1], "device": "cpu"},
        "lost": {"gpu_ranks": [0], "queue": True},
    }
    for name, request in requests.items():
        settings = {"run": {"name": name}, "target": {"python": sys.executable, **own.get(name, {})}}
        assert meaning(request)[1] == (Config() if name == "sft" else config_from_dict(settings))
    assert not any(request.own_trainer or request.given_alone for request in requests.values())


def test_text_of_the_old_trainer_changes_in_the_keys_that_are_given_alone() -> None:
    raw = old_plan("sft")
    job = Resumable(raw["job_id"], parse_plan(raw), 1, 2)
    assert plan_next(job, Options(), known=())[0].config_yaml == raw["config_yaml"]
    changed, _ = plan_next(job, Options(overrides=("train.steps=9",)), known=())
    before, now = (yaml.safe_load(text or "") for text in (raw["config_yaml"], changed.config_yaml))
    assert now == {**before, "train": {**before["train"], "steps": 9}}
