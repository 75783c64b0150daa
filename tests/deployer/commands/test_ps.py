"""`ps` and `status`: many hosts at once, hosts that are gone or silent, ages, and the live table."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from deployer.agent.gpus.view import QueueView
from deployer.agent.host.layout import Job
from deployer.agent.job.status import FAILED, QUEUED, RUNNING, SUCCEEDED, Status
from deployer.agent.job.views import Row
from deployer.commands.in_words import state_of
from deployer.commands.screen import Screen
from deployer.connection.host import Host
from deployer.errors import HostError
from deployer.jobs.registry import JobRecord, SeenJob, read_records, recall_rows, remember_rows, write_record
from deployer.jobs.roster import Asker, ask_all, rows_of
from tests.support.ferry import Ferry
from tests.support.jobs import GO, end_of, launch, make_job, make_plan, python, start, wait_for
from tests.support.limits import FOREVER_S, HANG_S, PATIENCE
from tests.support.lying import Lying
from tests.support.sshd import ALIAS, start_sshd

NO_JOBS = "frame({'id': 0, 'event': 'jobs', 'value': []}); frame({'id': 0, 'ok': {}}); sys.stdin.read()"


def finish(ferry: Ferry, job_id: str) -> None:
    (ferry.job(job_id) / "code" / "go").touch()
    end_of(Job(str(ferry.job(job_id))))


# --- hosts that do not answer ----------------------------------------------------------------------------------------


def test_jobs_of_a_host_that_is_gone_are_shown_as_last_seen_and_found_again(ferry: Ferry, tmp_path: Path) -> None:
    server = start_sshd(tmp_path)
    ferry.ssh, ferry.env["TORCHFERRY_SSH_CONFIG"] = ALIAS, str(server.client_config_path)
    ended, live = launch(ferry, "ended", GO), launch(ferry, "live", GO)
    finish(ferry, ended)
    before = {row["id"]: row for row in json.loads(ferry.run("ps", "--json", *ferry.where()).stdout)}
    assert before[live]["state"] == "running" and before[live]["seen_at"].endswith("Z")
    server.stop()
    gone = {row["id"]: row for row in json.loads(ferry.run("ps", "--json", *ferry.where()).stdout)}
    assert gone[ended] == before[ended]
    assert (gone[live]["state"], gone[live]["last_state"]) == ("unreachable", "running")
    assert gone[live]["seen_at"] == before[live]["seen_at"] and "127.0.0.1" in gone[live]["reason"]
    shown = ferry.run("ps", *ferry.where())
    assert re.search(rf"{live} +unreachable \(running \d+s ago\)", shown.stdout.decode())
    assert shown.returncode == 0 and b"cannot be asked" in shown.stderr
    status = ferry.run("status", live)
    assert status.returncode == 125 and re.search(rb"unreachable \(running \d+\w ago\)", status.stdout)
    assert all(mode == "0o600" for mode in modes(ferry.state / "hosts"))
    finish(ferry, live)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_ps_of_a_host_that_was_never_reached_is_an_error_and_not_no_jobs(ferry: Ferry, words: tuple[str, ...]) -> None:
    done = ferry.run("ps", "--ssh", "no-such-host.invalid", *words)
    assert done.returncode == 125 and b"no jobs" not in done.stdout + done.stderr
    assert not words or json.loads(done.stdout)["error"]["code"] == "unreachable"


def modes(folder: Path) -> list[str]:
    return [oct(path.stat().st_mode & 0o777) for path in folder.iterdir()]


def test_followed_job_is_known_to_a_ps_that_reaches_nobody(tmp_path: Path) -> None:
    Screen(JobRecord("j-1", "j", "h", "/r", "", "2026-01-02T03:04:05Z")).state(Status(RUNNING))
    (row,) = recall_rows("h", "/r")
    assert (row.job.id, row.job.state, row.where, row.job.created) == ("j-1", "running", "h", "2026-01-02T03:04:05Z")


def test_torn_note_of_a_host_is_as_none(tmp_path: Path) -> None:
    remember_rows("h", "/r", [SeenJob(Row("a", RUNNING), "h", "2026-01-02T03:04:05Z")])
    (path,) = (tmp_path / "state" / "hosts").iterdir()
    path.write_text(path.read_text()[:-9])
    assert recall_rows("h", "/r") == []


def test_launched_job_that_the_host_had_no_more_when_asked_last_is_forgotten(tmp_path: Path) -> None:
    removed, later = (JobRecord(name, name, "h", "/r", "", "2026-01-02T03:04:05Z") for name in ("removed", "later"))
    write_record(removed)
    asked = Asker(Host("h", "/r", begun=Lying(NO_JOBS)))
    asked.ask()
    assert asked.wait(HANG_S) == []
    write_record(later)
    rows = rows_of([Host("h", "/r")], [HostError("gone")], read_records())
    assert [(row.job.id, state_of(row)) for row in rows] == [("later", "unreachable (never seen)")]


def test_silent_host_keeps_the_others_waiting_only_for_a_bound(tmp_path: Path) -> None:
    job = make_job(tmp_path, "here", make_plan(python("pass")))
    end_of(start(job, make_plan(python("pass"))))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = [
            Host(f"nobody@127.0.0.1:{silent.getsockname()[1]}", "/r", connect_timeout_s=FOREVER_S),
            Host(None, str(tmp_path)),
        ]
        began = time.monotonic()
        answers = ask_all(hosts, within_s=5 * PATIENCE)
        took_s = time.monotonic() - began
    (row,) = rows_of(hosts, answers, [])
    assert (row.job.id, row.job.state) == ("here", "succeeded")
    assert (
        isinstance(answers[0], HostError)
        and f"within {5 * PATIENCE:g} s" in answers[0].message
        and took_s < 60 * PATIENCE
    )


def test_hosts_are_asked_all_at_once(tmp_path: Path) -> None:
    code = (
        "import os, time\nopen({me!r}, 'w')\n"
        "while len(os.listdir({folder!r})) < 8: time.sleep(0.01)\n"
        "frame({{'id': 0, 'event': 'jobs', 'value': []}}); frame({{'id': 0, 'ok': {{}}}}); sys.stdin.read()"
    )
    asked = tmp_path / "asked"
    asked.mkdir()
    hosts = [
        Host(f"h{n}", "/r", begun=Lying(code.format(me=str(asked / f"h{n}"), folder=str(asked)))) for n in range(8)
    ]
    assert ask_all(hosts, within_s=HANG_S) == [[]] * 8  # each answers only when all have been asked


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("j", RUNNING), "running"),
        (Row("j", RUNNING, unsupervised=True), "running (unsupervised)"),
        (Row("j", RUNNING, on_host="gpu7", attempt=2), "running (on gpu7, attempt 2)"),
        (Row("j", QUEUED, queue=QueueView(3)), "queued (position 3)"),
        (Row("j", FAILED, code=7, attempt=2), "failed(7)"),
        (Row("j", SUCCEEDED, on_host="gpu7"), "succeeded"),
    ],
)
def test_state_in_the_words_of_the_table(row: Row, expected: str) -> None:
    assert state_of(SeenJob(row, "h", "2026-01-02T03:04:05Z")) == expected
    assert state_of(SeenJob(row, "h", trouble="no route")) == "unreachable (never seen)"


def test_age_is_by_the_hosts_clock_and_the_step_by_its_metrics(ferry: Ferry) -> None:
    plan = make_plan(python("pass"), request={"command": ["python", "-c", "pass"]})
    job = make_job(ferry.root, "old", plan)  # its plan was made by a client of another time
    record = json.loads(Path(job.record).read_text())
    Path(job.record).write_text(json.dumps({**record, "created_at": time.time() - 7300}))
    Path(job.metrics).write_text('{"step": 340, "steps": 340, "loss": 2.50001, "step_s": "odd"}\n')
    end_of(start(job, plan))
    shown = ferry.run("ps", *ferry.where()).stdout.decode().splitlines()
    assert all(line == line.rstrip() for line in shown)
    assert shown[0].split() == ["ID", "STATE", "COMMAND", "GPUS", "STEP", "LOSS", "ELAPSED", "ETA", "WHERE"]
    words = re.split("  +", shown[1])
    assert words[:2] == ["old", "succeeded"] and words[2].endswith("-c pass")
    assert words[3:6] == ["-", "340/340", "2.5"] and re.fullmatch(r"\d+s", words[6]), "it ran as long as it ran"
    assert words[7:] == ["-", "this machine"]
    (row,) = json.loads(ferry.run("ps", "--json", *ferry.where()).stdout)
    assert row["age_s"] > 7300 > row["ran_s"] and row["command"].endswith("-c pass")
    assert (row["steps"], row["loss"], row["step_s"], row["left_s"]) == (340, 2.50001, None, None)


def test_status_on_a_narrow_terminal_breaks_no_path(ferry: Ferry) -> None:
    job = make_job(ferry.root, "long", make_plan(python("pass")))
    end_of(start(job, make_plan(python("pass"))))
    master, slave = pty.openpty()
    subprocess.run(
        ferry.argv("status", "long", *ferry.where()), env={**ferry.environment(), "COLUMNS": "30"}, stdout=slave
    )
    assert f"folder      {job.path}\r\n".encode() in os.read(master, 1 << 16)


# --- the live table --------------------------------------------------------------------------------------------------


def test_live_table_follows_a_job_and_ends_with_ctrl_c(ferry: Ferry) -> None:
    job_id = launch(ferry, "live", GO)
    terminal, inside = pty.openpty()
    words = ferry.argv("ps", "--watch", "0.2", *ferry.where())
    client = subprocess.Popen(
        words,
        cwd=ferry.project,
        env={**ferry.environment(), "TERM": "xterm"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    seen = ""

    def shows(state_word: str) -> bool:
        nonlocal seen
        seen += os.read(terminal, 65536).decode()
        return re.search(rf"{job_id} +\x1b\[\d+m{state_word}", seen) is not None  # in its colour

    wait_for(lambda: shows("running"))
    finish(ferry, job_id)
    wait_for(lambda: shows("succeeded"))
    client.send_signal(signal.SIGINT)
    while client.poll() is None:
        try:
            seen += os.read(terminal, 65536).decode()
        except OSError:  # the terminal ends with its last process
            break
    assert client.wait(HANG_S) == 0 and "Traceback" not in seen
    assert "\x1b[2J" not in seen  # nothing is cleared, so nothing flickers
    os.close(terminal)


@pytest.mark.parametrize("words", [("--watch",), ("-w", "5"), ("--watch", "--json")])
def test_live_table_without_a_terminal_says_what_to_use(ferry: Ferry, words: tuple[str, ...]) -> None:
    done = ferry.run("ps", *words, *ferry.where())
    assert done.returncode == 2 and b"--json" in done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["error"]["code"] == "usage"
    else:
        assert done.stdout == b""


@pytest.mark.parametrize("text", ["", "[]", "5", '{"job_id": 5}', '{"job_id": 5, "name": 1, "created": {}}'])
def test_record_that_is_damaged_hides_no_other_one(text: str) -> None:
    whole = JobRecord("b-1", "b", "host", "~/r", "/results", "2026-01-02T03:04:05Z")
    write_record(whole)
    folder = Path(os.environ["TORCHFERRY_STATE_DIR"]) / "jobs"
    (folder / "a-1.json").write_text(text)
    wrong_kind = {"job_id": 5, "name": "b", "ssh": [], "root": 1, "results": None, "created": 7}
    (folder / "c-1.json").write_text(json.dumps(wrong_kind))
    (folder / "d-1.json").symlink_to("/none")
    damages: list[str] = []
    assert [record.job_id for record in read_records(damages.append)] == ["b-1"]
    assert sorted(damage.split(",")[0].rsplit(" ", 1)[1] for damage in damages) == ["a-1", "c-1", "d-1"]
