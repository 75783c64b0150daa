"""`--after`: a job that waits on its host for others, and starts only when they have succeeded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job, Root
from deployer.agent.job.judge import judge
from deployer.agent.job.status import Status
from deployer.agent.unattended.after import AfterDecision, AwaitedJobs, decide
from deployer.commands.screen import next_lines
from deployer.jobs.registry import JobRecord, write_record
from tests.support.ferry import Ferry
from tests.support.jobs import kill_supervisor, make_job, make_plan, python, run_job, wait_for
from tests.support.smi import fake_smi

WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\nsys.exit(int(sys.argv[2]))"
"""A program that ends with a code of our choice once there is a file of our choice."""


def launch(ferry: Ferry, name: str, *options: str, program: tuple[str, ...] = ("-c", "print(1)")) -> Job:
    """A detached job on the CPU."""
    words = ("run", *ferry.where(), "--detach", "--name", name, "--python", sys.executable, *options)
    done = ferry.run(*words, "--device", "cpu", "--", "python", *program)
    assert done.returncode == 0, done.stderr.decode()
    (job_id,) = [i for i in ferry.job_ids() if i.startswith(name)]
    return Job(str(ferry.job(job_id)))


def first(ferry: Ferry, name: str, code: int = 0) -> tuple[Job, Path]:
    """A job that runs until the file that comes with it is there."""
    go = ferry.project.parent / f"go-{name}"
    return launch(ferry, name, program=("-c", WAITS, str(go), str(code))), go


def status(ferry: Ferry, job: Job) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(ferry.run("status", job.id, "--json").stdout)["status"]
    return value


def end(job: Job) -> Status:
    return wait_for(lambda: (found := judge(job)).state in ("succeeded", "failed", "stopped", "lost") and found)


# --- decided ----------------------------------------------------------------------------------------------------------


def test_job_starts_once_all_others_have_succeeded_and_never_when_one_has_not() -> None:
    done, runs = Status("succeeded", code=0), Status("running")
    assert decide([("a", done), ("b", done)]).awaited == ()
    assert decide([("a", done), ("b", runs)]).awaited == ("b",)
    for ended, words in (
        (Status("failed", code=3), "after b, which failed with code 3"),
        (Status("stopped"), "after b, which was stopped"),
        (Status("lost", reason="the host was rebooted"), "after b, which is lost: the host was rebooted"),
        (
            Status("failed", code=125, reason="after a, which was stopped", after=("a",)),
            "after b, which never started (after a, which was stopped)",
        ),
    ):
        assert decide([("a", runs), ("b", ended)])[1:] == (words, "b")


def test_others_are_looked_at_once_a_second_and_one_that_was_started_again_is_waited_for(tmp_path: Path) -> None:
    run_job(tmp_path, "a", make_plan(python("pass")))
    clock = [0.0]
    others = AwaitedJobs(Root(str(tmp_path)), ["a"], now=lambda: clock[0])
    assert others.poll() is not None and others.poll() is None
    path = tmp_path / "jobs" / "a" / "status.json"
    text = path.read_text()
    # as a resume leaves it; a stranger's, so that nobody looks for its processes
    path.write_text(text.replace('"succeeded"', '"running"').replace('"machine_id": "', '"machine_id": "x'))
    clock[0] = 1.0
    seen = others.poll()
    assert seen is not None and seen.awaited == ("a",)
    path.write_text(text)
    clock[0] = 2.0
    seen = others.poll()
    assert seen is not None and seen.awaited == () and not seen.refusal


def test_job_that_was_collected_after_its_success_has_succeeded(tmp_path: Path) -> None:
    for job_id in ("a", "b"):
        run_job(tmp_path, job_id, make_plan(python("pass")))
    path = tmp_path / "jobs" / "b" / "status.json"
    text = path.read_text()
    path.write_text(text.replace('"succeeded"', '"running"').replace('"machine_id": "', '"machine_id": "x'))
    clock = [0.0]
    others = AwaitedJobs(Root(str(tmp_path)), ["a", "b"], now=lambda: clock[0])
    seen = others.poll()
    assert seen is not None and seen.awaited == ("b",)
    shutil.rmtree(tmp_path / "jobs" / "a")
    clock[0] = 1.0
    seen = others.poll()
    assert seen is not None and seen == AfterDecision(awaited=("b",))
    path.write_text(text)
    clock[0] = 2.0
    assert others.poll() == AfterDecision()
    # one that nobody has seen succeed is lost all the same
    never = AwaitedJobs(Root(str(tmp_path)), ["a"]).poll()
    assert never is not None and never.failed_job == "a"


def test_next_commands_hold_no_word_of_the_host_but_an_id() -> None:
    never = Status("failed", code=125, after=("a-1",))
    assert next_lines("b-1", never) == ["status a-1", "resume b-1 --after a-1"]
    for word in ("{1}", "x; rm -rf ~", "", "-x"):
        assert next_lines("b-1", never._replace(after=(word,))) == []


# --- carried out ------------------------------------------------------------------------------------------------------


def test_chain_waits_says_so_and_starts_in_order(ferry: Ferry) -> None:
    one, go = first(ferry, "one")
    two = launch(ferry, "two", "--after", "one", program=("-c", "import time; print(time.time())"))
    zero = launch(ferry, "zero")
    assert end(zero).state == "succeeded"
    three = launch(ferry, "three", "--after", "zero", "--after", two.id, "--after", one.id)
    wait_for(lambda: judge(three).after == (two.id, one.id))
    assert judge(three).state == "queued" and judge(two).after == (one.id,)
    assert f"queued (waits for {one.id})" in ferry.run("status", two.id).stdout.decode()
    assert f"queued (waits for {two.id}, {one.id})" in ferry.run("ps").stdout.decode()
    follower = ferry.start("logs", three.id, "-f")
    kept = ferry.run("gc", *ferry.where(), "--keep-jobs", "0", "--yes")
    assert kept.returncode == 0 and zero.id in ferry.job_ids(), "a job that waits names it"
    go.touch()
    assert end(three).state == "succeeded"
    said = follower.communicate(timeout=60)
    assert follower.returncode == 0 and f"waits for {two.id}, {one.id}" in said[1].decode()
    ends = [judge(job) for job in (one, two, three)]
    assert ferry.run("gc", *ferry.where(), "--keep-jobs", "0", "--yes").returncode == 0 and ferry.job_ids() == []
    assert all(status.state == "succeeded" and not status.after for status in ends)
    assert ends[0].ended_at <= ends[1].started_at and ends[1].ended_at <= ends[2].started_at


def test_job_never_starts_after_one_that_failed_and_a_follower_hears_why(ferry: Ferry) -> None:
    one, go = first(ferry, "one", code=3)
    where = ("run", *ferry.where(), "--python", sys.executable, "--device", "cpu")
    follower = ferry.start(*where, "--name", "two", "--after", "one", "--", "python", "-c", "print('never')")
    wait_for(lambda: any(i.startswith("two") for i in ferry.job_ids()))
    two = Job(str(ferry.job(next(i for i in ferry.job_ids() if i.startswith("two")))))
    wait_for(lambda: judge(two).state == "queued")
    three = launch(ferry, "three", "--after", two.id)
    go.touch()
    said = follower.communicate(timeout=60)[1].decode()
    assert follower.returncode == 125 and f"{two.id} failed: after {one.id}, which failed with code 3" in said
    assert f"resume {two.id} --after {one.id}" in said and "last lines" not in said
    assert end(three).reason == f"after {two.id}, which never started (after {one.id}, which failed with code 3)"
    assert not Path(two.logs(1)).exists() and end(two).started_at is None
    refused = ferry.run(*where, "--after", "one", "--", "python", "-c", "")
    assert refused.returncode == 2, refused.stderr.decode()
    assert f"after {one.id}, which failed with code 3" in refused.stderr.decode() and len(ferry.job_ids()) == 3
    # both are started again, and the second waits for the next attempt of the first
    go.unlink()
    assert ferry.run("resume", one.id, "--detach").returncode == 0
    again = ferry.run("resume", two.id, "--detach", "--after", "one")
    assert again.returncode == 0, again.stderr.decode()
    assert judge(two).state == "queued" and judge(two).attempt == 2 and judge(two).after == (one.id,)
    assert ferry.run("stop", one.id).returncode == 0
    assert end(two).reason == f"after {one.id}, which was stopped"
    alone = ferry.run("resume", two.id, "--no-pull")
    assert alone.returncode == 0 and alone.stdout.decode() == "never\n", "a resume by itself waits for nobody"


def test_waiting_job_is_stopped_and_survives_its_supervisor(ferry: Ferry) -> None:
    one, go = first(ferry, "one")
    two = launch(
        ferry, "two", "--after", "one", "--env", "SAYS=hello", program=("-c", "import os; print(os.environ['SAYS'])")
    )
    ferry.env["KEY"] = "value"
    three = launch(ferry, "three", "--after", "one", "--secret", "KEY")
    four = launch(ferry, "four", "--after", "one")
    stopped = ferry.run("stop", four.id)
    assert stopped.returncode == 0, stopped.stderr.decode()
    assert judge(four)[:1] == ("stopped",) and judge(four).reason == f"stopped on request, while it waited for {one.id}"
    for job in (two, three):
        supervisor = judge(job).supervisor
        assert supervisor is not None
        kill_supervisor(job)
        assert judge(job).unsupervised and judge(job).state == "queued"
    ferry.run("ps")
    wait_for(lambda: not judge(two).unsupervised and judge(three).state == "lost")
    assert "knew its secrets was killed" in judge(three).reason
    assert judge(two).after == (one.id,)
    go.touch()
    assert end(two).state == "succeeded" and (Path(two.logs(1)) / "rank_0.log").read_text() == "hello\n"
    # what has succeeded is not waited for
    five = launch(ferry, "five", "--after", "one")
    assert end(five).state == "succeeded"


def test_what_cannot_be_waited_for_is_refused(ferry: Ferry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(ferry.state))
    write_record(JobRecord("far-1", "far", "gpu2", "~/.torchferry", "2026-11-30T00:00:00+00:00", ""))
    program = ("--", "python", "-c", "")
    far = ferry.run("run", *ferry.where(), "--after", "far-1", *program)
    assert far.returncode == 2 and "far-1 is a job of gpu2 (~/.torchferry)" in far.stderr.decode()
    assert "--ssh gpu2" in far.stderr.decode()
    unknown = ferry.run("run", *ferry.where(), "--after", "none-such", *program)
    assert unknown.returncode == 2 and "--after none-such: no job none-such" in unknown.stderr.decode()
    none = ferry.run("run", *ferry.where(), "--after", "a b", *program)
    assert none.returncode == 2 and "target.after" in none.stderr.decode()
    shown = ferry.run("run", *ferry.where(), "--dry-run", "--after", "x-1", *program)
    assert "# after    x-1: starts once all of it has succeeded" in shown.stdout.decode()


def test_job_waits_for_what_is_gone_no_longer(ferry: Ferry) -> None:
    one, _ = first(ferry, "one")
    two = launch(ferry, "two", "--after", "one")
    assert ferry.run("stop", one.id, "--force").returncode == 0
    assert end(two).reason == f"after {one.id}, which was stopped"
    three, go = first(ferry, "three")
    four = launch(ferry, "four", "--after", "three")
    assert end_gone(ferry, three, go, four).startswith(f"after {three.id}, which ")


def end_gone(ferry: Ferry, gone: Job, go: Path, waiting: Job) -> str:
    """What a waiting job says whose other job lost its folder."""
    assert ferry.run("stop", gone.id, "--force").returncode == 0 or go.exists()
    shutil.rmtree(gone.path, ignore_errors=True)
    return end(waiting).reason


def test_gpus_are_claimed_when_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployer.agent.gpus.leases import read_claims
    from tests.support.jobs import GO, end_of, run_up, start

    env = fake_smi(tmp_path, gpus="0, GPU-aaaa1111-0000, NVIDIA H100, 81559, 0\n")
    one = run_up(tmp_path, "one", GO)
    plan = make_plan(
        python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"),
        device="cuda",
        gpus=["auto:1"],
        env={"CUDA_VISIBLE_DEVICES": [{"slot": "gpus"}]},
        job_id="two",
    )
    two = start(make_job(tmp_path, "two", plan), plan, after=("one",), base_env=env)
    assert judge(two).state == "queued" and read_claims() == []
    (Path(one.code) / "go").touch()
    assert end_of(two).state == "succeeded" and (Path(two.logs(1)) / "rank_0.log").read_text() == "0\n"
