"""GPUs and the queue for them between jobs of 836d9e4 and present ones. nvidia-smi is a script."""

from __future__ import annotations

import json
from pathlib import Path

from tests.compat.versions import (
    BLOCKED,
    HANG_S,
    Versions,
    begin,
    done,
    ended,
    go,
    kill_supervisor,
    listed,
    reached,
    rows,
    supervisor,
    told,
    written,
)
from tests.support.ferry import Ferry
from tests.support.jobs import wait_for

PROGRAM = ("sh", "-c", f"echo on $CUDA_VISIBLE_DEVICES; {BLOCKED}")


def refused(ferry: Ferry, *words: str) -> str:
    """Why a launch was refused."""
    ran = ferry.run("run", *ferry.where(), *words, "--", "true")
    assert ran.returncode == 125, ran.stderr.decode()
    return ran.stderr.decode().partition("Error: ")[2]


def place(job: Path) -> int | None:
    return (written(job).get("queue") or {}).get("position")


def stop(ferry: Ferry, job: Path) -> dict[str, object]:
    (answer,) = json.loads(done(ferry.run("stop", job.name, *ferry.where(), "--json", timeout_s=HANG_S)))
    return dict(answer)


def test_old_and_present_jobs_wait_in_one_queue(both: Versions) -> None:
    holder = begin(both.old, "holder", "--gpus", "0", program=PROGRAM)
    first = begin(both.old, "first", "--gpus", "0", "--queue", program=PROGRAM)
    second = begin(both.new, "second", "--gpus", "0", "--queue", program=PROGRAM)
    third = begin(both.old, "third", "--gpus", "0", "--queue", program=PROGRAM)

    reached(holder, "running")
    found = rows(both.new)
    seen = [found[job.name] for job in (holder, first, second, third)]
    assert [row["state"] for row in seen] == ["running", "queued", "queued", "queued"]
    assert [(row["queue"] or {}).get("position") for row in seen] == [None, 1, 2, 3]
    assert [row["gpus"] for row in seen] == [["0"]] * 4
    assert [before["job"] for before in told(both.new, second)["queue"]["before"]] == [first.name]
    shown = json.loads(done(both.new.run("gpus", *both.new.where(), "--json")))
    assert [held["job"] for held in shown["gpus"][0]["held"]] == [holder.name]
    assert [ticket["job"] for ticket in shown["queue"]] == [first.name, second.name, third.name]

    assert stop(both.new, holder)["gpus_free"] is True
    reached(first, "running")
    wait_for(lambda: (place(second), place(third)) == (1, 2), timeout_s=HANG_S)
    answer = stop(both.new, third)  # one of the old client's that waits
    assert (answer["state"], answer["was"]) == ("stopped", "queued")
    assert answer["reason"] == "stopped on request, while it was queued"
    go(first)
    assert ended(first)["state"] == "succeeded"
    reached(second, "running")
    go(second)
    assert ended(second)["state"] == "succeeded"


def test_each_is_refused_the_gpus_that_the_other_holds(both: Versions) -> None:
    for holding, asking in ((both.old, both.new), (both.new, both.old)):
        holder = begin(holding, "holds", "--gpus", "1", program=PROGRAM)
        assert refused(asking, "--gpus", "0,1").startswith(f"GPU 1 is held by job {holder.name} of user ")
        waiting = begin(holding, "waits", "--gpus", "1,2", "--queue", program=PROGRAM)
        assert refused(asking, "--gpus", "2").startswith(f"before it in the queue for GPU 2: job {waiting.name} of ")
        assert stop(asking, waiting)["state"] == "stopped"
        go(holder)
        ended(holder)


def test_adopted_job_keeps_its_gpus_and_gives_them_back(both: Versions) -> None:
    holder = begin(both.old, "adopted", "--gpus", "auto:1", program=PROGRAM)
    chosen = reached(holder, "running")["slots"]["gpus"]
    former = kill_supervisor(holder)
    assert listed(both.new, holder)["gpus"] == [chosen]
    wait_for(lambda: supervisor(holder) != former, timeout_s=HANG_S)
    for client in (both.new, both.old):
        assert refused(client, "--gpus", chosen).startswith(f"GPU {chosen} is held by job {holder.name} of user ")
    go(holder)
    assert ended(holder)["state"] == "succeeded"
    done(both.new.run("run", *both.new.where(), "--gpus", chosen, "--no-pull", "--", "true"))


def test_queued_job_whose_supervisor_was_killed_is_lost_and_waits_no_more(both: Versions) -> None:
    holder = begin(both.old, "keeps", "--gpus", "3", program=PROGRAM)
    waiting = begin(both.old, "waits", "--gpus", "3", "--queue", program=PROGRAM)
    reached(waiting, "queued")
    kill_supervisor(waiting)
    assert listed(both.new, waiting)["state"] == "lost"
    assert told(both.new, waiting)["reason"] == "it waited for its GPUs, and its supervisor is gone"
    go(holder)
    ended(holder)
    resumed = both.new.run("resume", waiting.name, "--detach", timeout_s=HANG_S)
    done(resumed)
    assert reached(waiting, "running")["devices"] == ["GPU-3"]
    go(waiting)
    assert ended(waiting)["state"] == "succeeded"


def test_resumed_job_asks_for_its_gpus_again(both: Versions) -> None:
    failed = begin(both.old, "fails", "--gpus", "2", program=("sh", "-c", "[ $TORCHFERRY_ATTEMPT = 2 ]"))
    assert ended(failed)["state"] == "failed"
    holder = begin(both.old, "has", "--gpus", "2", program=PROGRAM)
    again = both.new.run("resume", failed.name)
    assert again.returncode == 125
    assert f"GPU 2 is held by job {holder.name}" in again.stderr.decode()
    stop(both.new, holder)
    done(both.new.run("resume", failed.name, "--no-pull", timeout_s=HANG_S))
    assert [a["state"] for a in told(both.new, failed)["attempts"]] == ["failed", "succeeded"]
