"""Jobs that a client of 836d9e4 has started, in the hands of the present one: listed, followed, adopted, stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat.versions import (
    BLOCKED,
    HANG_S,
    Versions,
    assert_same_job,
    begin,
    done,
    ended,
    go,
    is_agent_of,
    is_supervised_by,
    kill_supervisor,
    listed,
    log,
    reached,
    record,
    says,
    supervisor,
    told,
    words_of,
)
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import wait_for


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", f"echo up; {script}")


def up(job: Path) -> Path:
    says(job, "up")
    reached(job, "running")
    return job


def results(ferry: Ferry, job: Path) -> Path:
    return ferry.project / "results" / job.name


# --- running ----------------------------------------------------------------------------------------------------------


def test_running_job_is_listed_entered_and_followed_to_its_end(both: Versions, old_code: Path) -> None:
    both.write("note.txt", "from the project")
    job = up(begin(both.old, "runs", program=shell(f"{BLOCKED}; echo down; exit 7")))
    assert is_supervised_by(old_code, job)
    row = listed(both.new, job)
    assert (row["state"], row["unsupervised"], row["kind"], row["name"]) == ("running", False, "program", "runs")
    found = told(both.new, job)
    assert (found["job_id"], found["state"], found["attempt"], found["path"]) == (job.name, "running", 1, str(job))
    assert done(both.new.run("exec", job.name, "--", "cat", "note.txt")) == "from the project"
    pid = supervisor(job)
    with both.new.start("logs", job.name, "-f") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"up\n"
        go(job)
        out, err = following.communicate(timeout=HANG_S)
    assert (out, following.returncode) == (b"down\n", 7), err
    assert supervisor(job) == pid  # its own supervisor has seen it through


def test_running_job_is_stopped_in_order(both: Versions) -> None:
    trap = "trap 'echo saved; exit 0' TERM; while :; do sleep 0.05; done"
    job = up(begin(both.old, "stops", program=shell(trap)))
    main = written_main(job)
    (answer,) = json.loads(done(both.new.run("stop", job.name, "--json", timeout_s=HANG_S)))
    assert (answer["state"], answer["was"], answer["remaining"]) == ("stopped", "running", [])
    assert not words_of(main)
    assert log(both.new, job) == "up\nsaved\n"
    assert told(both.new, job)["reason"] == "stopped on request"


def test_running_job_is_stopped_by_force(both: Versions) -> None:
    job = up(begin(both.old, "stubborn", program=shell("trap '' TERM; while :; do sleep 0.05; done")))
    main = written_main(job)
    (answer,) = json.loads(done(both.new.run("stop", job.name, "--force", "--json", timeout_s=HANG_S)))
    assert (answer["state"], answer["remaining"]) == ("stopped", [])
    assert not words_of(main)


def written_main(job: Path) -> int:
    return int(reached(job, "running")["main"]["pid"])


def test_restarting_job_is_followed_over_its_attempts(both: Versions) -> None:
    script = f'echo attempt $TORCHFERRY_ATTEMPT; {BLOCKED}; [ "$TORCHFERRY_ATTEMPT" = 2 ]'
    job = up(begin(both.old, "again", "--max-restarts", "3", program=shell(script)))
    with both.new.start("logs", job.name, "-f") as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(2)] == [b"up\n", b"attempt 1\n"]
        go(job)
        out, err = following.communicate(timeout=HANG_S)
    assert (out, following.returncode) == (b"up\nattempt 2\n", 0), err
    found = told(both.new, job)
    assert [(a["attempt"], a["state"], a["code"]) for a in found["attempts"]] == [(1, "failed", 1), (2, "succeeded", 0)]
    assert log(both.new, job, "--attempt", "1") == "up\nattempt 1\n"


# --- ended ------------------------------------------------------------------------------------------------------------

COUNTS = """
import os, sys
open('count', 'a').write('x')
attempt, a = (os.environ.get(name) for name in ('TORCHFERRY_ATTEMPT', 'A'))
print(attempt, len(open('count').read()), a, sys.argv[1:])
sys.exit(3 if attempt == '1' else 0)
"""


def test_failed_job_is_told_brought_home_and_goes_on(both: Versions, old_code: Path) -> None:
    both.write("count.py", COUNTS)
    words = ("--env", "A=b c", "--max-runtime", "1h", "--stall-timeout", "50m")
    job = begin(both.old, "fails", *words, program=("python", "count.py", "d e", ""))
    assert ended(job)["code"] == 3
    assert is_agent_of(old_code, Path(told(both.new, job)["slots"]["agent"]))
    assert (listed(both.new, job)["state"], told(both.new, job)["code"]) == ("failed", 3)
    both.new.run("pull", job.name)
    pulled = results(both.new, job)
    assert (pulled / "logs" / "attempt_1" / "rank_0.log").read_text() == "1 1 b c ['d e', '']\n"
    first = record(job)

    resumed = both.new.run("resume", job.name, timeout_s=HANG_S)
    assert done(resumed) == "2 2 b c ['d e', '']\n"  # the same files, arguments and environment
    found = told(both.new, job)
    assert (found["state"], found["attempt"], found["first_attempt"]) == ("succeeded", 2, 2)
    assert [(a["attempt"], a["state"], a["code"]) for a in found["attempts"]] == [(1, "failed", 3), (2, "succeeded", 0)]
    assert is_agent_of(REPO, Path(found["slots"]["agent"]))
    assert json.loads((pulled / "status.json").read_text())["state"] == "succeeded"

    now = record(job)
    (entry,) = now["resumed"]
    assert (entry["attempt"], entry["plan_before"]) == (2, first["plan"])
    assert_same_job(first["plan"], now["plan"])
    assert (now["env"], now["created_at"]) == (first["env"], first["created_at"])


# --- whose supervisor was killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ps", "run"])
def test_next_command_of_the_present_client_adopts_a_job(both: Versions, old_code: Path, command: str) -> None:
    job = up(begin(both.old, "orphan", program=shell(f"{BLOCKED}; exit 9")))
    former = kill_supervisor(job)
    where = both.new.where()
    words = {
        "ps": ("ps", *where),
        "run": ("run", *where, "--name", "other", "--detach", "--", "true"),
    }[command]
    done(both.new.run(*words))
    wait_for(lambda: supervisor(job) != former, timeout_s=HANG_S)
    assert is_supervised_by(REPO, job)
    row = listed(both.new, job)
    assert (row["state"], row["unsupervised"], row["attempt"]) == ("running", False, 1)
    go(job)
    status = ended(job)
    assert (status["state"], status["code"], status["reason"]) == ("failed", 9, "rank 0 exited with code 9")
    assert log(both.new, job) == "up\n"


def test_adopted_job_is_stopped_in_order(both: Versions) -> None:
    trap = "trap 'echo saved; exit 0' TERM; while :; do sleep 0.05; done"
    job = up(begin(both.old, "adopted", program=shell(trap)))
    kill_supervisor(job)
    (answer,) = json.loads(done(both.new.run("stop", job.name, "--json", timeout_s=HANG_S)))
    assert (answer["state"], answer["was"], answer["remaining"]) == ("stopped", "running", [])
    assert log(both.new, job) == "up\nsaved\n"


def test_job_that_ended_while_nobody_watched_has_its_own_code(both: Versions) -> None:
    job = up(begin(both.old, "alone", program=shell(f"{BLOCKED}; exit 6")))
    kill_supervisor(job)
    go(job)
    wrote = job / "ranks" / "attempt_1" / "rank_0.json"
    wait_for(lambda: json.loads(wrote.read_text()).get("code") == 6, timeout_s=HANG_S)
    assert (listed(both.new, job)["state"], told(both.new, job)["code"]) == ("failed", 6)
    assert b"rank 0 exited with code 6" in both.new.run("status", job.name).stdout


RANKS = """
import os, sys, time
rank, attempt = os.environ['RANK'], os.environ['TORCHFERRY_ATTEMPT']
print('rank', rank, 'attempt', attempt, flush=True)
while attempt == '1' and not os.path.exists('go'):
    time.sleep(0.02)
sys.exit(5 if (rank, attempt) == ('1', '1') else 0)
"""


def test_ranks_under_torchrun_are_adopted_and_start_again_with_the_present_agent(
    both: Versions, old_code: Path
) -> None:
    both.write("ranks.py", RANKS)
    words = ("--torchrun", "--device", "cpu", "--gpus", "0,1", "--max-restarts", "1")
    job = begin(both.old, "ranks", *words, program=("ranks.py",))
    for rank in (0, 1):
        says(job, f"rank {rank} attempt 1", rank=rank)
    status = reached(job, "running")
    assert is_agent_of(old_code, Path(status["slots"]["agent"]))
    former = kill_supervisor(job)
    assert listed(both.new, job)["state"] == "running"
    wait_for(lambda: supervisor(job) != former, timeout_s=HANG_S)
    assert is_supervised_by(REPO, job)
    go(job)
    status = ended(job)
    assert (status["state"], status["attempt"], status["max_attempts"]) == ("succeeded", 2, 2)
    first = status["attempts"][0]
    assert (first["state"], first["code"], first["first_failing_rank"]) == ("failed", 5, 1)
    for rank in (0, 1):
        assert log(both.new, job, "--attempt", "1", "--rank", str(rank)) == f"rank {rank} attempt 1\n"
        assert log(both.new, job, "--attempt", "2", "--rank", str(rank)) == f"rank {rank} attempt 2\n"


def test_no_job_of_these_left_a_process(both: Versions) -> None:
    jobs = f"TORCHFERRY_RUN_DIR={both.new.root}/jobs/".encode()

    def is_of_a_job(process: Path) -> bool:
        try:
            return jobs in (process / "environ").read_bytes()
        except OSError:
            return False

    wait_for(lambda: not any(map(is_of_a_job, Path("/proc").glob("[0-9]*"))), timeout_s=HANG_S)
