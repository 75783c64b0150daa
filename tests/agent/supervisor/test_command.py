"""What is executed for a job: slots filled, the environment composed."""

from __future__ import annotations

import pytest

from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import ATTEMPT_ENV, JOB_ID_ENV, RESTARTED_ENV, RUN_DIR_ENV, STARTED_ENV, Job
from deployer.agent.job.plan import Slot, main_role
from deployer.agent.supervisor.command import fill, job_env
from deployer.agent.supervisor.start import LaunchInput
from tests.support.jobs import make_plan
from trainer.startup import now_s


def test_fill_joins_texts_and_slots() -> None:
    assert fill((Slot("agent"), "/rank.py"), {"agent": "/a b"}) == "/a b/rank.py"
    assert fill("plain", {}) == "plain"


def test_fill_of_an_unknown_slot_names_it() -> None:
    with pytest.raises(AgentError, match="moon"):
        fill((Slot("moon"),), {"agent": "/a"})


def test_environment_is_layered_and_marked() -> None:
    job = Job("/root/jobs/j1")
    plan = make_plan([], env={"B": [{"slot": "job"}, "/b"], "C": "plan"})
    base = {"A": "base", "B": "base", "RANK": "3", "TORCHELASTIC_RUN_ID": "outer", "NNODES": "2", "PET_NNODES": "2"}
    given = LaunchInput(plan, 2, env={"C": "user"}, secrets={"S": "x"}, base_env=base)
    assert job_env(job, main_role(plan), given, {"job": job.path}, attempt=2, restarted=False) == {
        "PYTHONUNBUFFERED": "1",
        "A": "base",
        "B": "/root/jobs/j1/b",
        "C": "user",
        "S": "x",
        JOB_ID_ENV: "j1",
        RUN_DIR_ENV: "/root/jobs/j1",
        ATTEMPT_ENV: "2",
    }


def test_environment_of_a_trainer_says_when_it_was_started() -> None:
    plan = make_plan([], kind="trainer")
    env = job_env(Job("/root/jobs/j1"), main_role(plan), LaunchInput(plan, 1), {}, attempt=1, restarted=True)
    assert env[RESTARTED_ENV] == "1"
    assert float(env[STARTED_ENV]) == pytest.approx(now_s(), abs=5)
