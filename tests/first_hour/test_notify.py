"""`--notify`: whom a job tells of its start, restart, failure and end, and that no job waits for it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.job.judge import judge
from deployer.agent.unattended import send
from deployer.agent.unattended.event import Event, body_of, sentence
from deployer.errors import UsageError
from deployer.plan.notify import read_notify
from tests.support.ferry import Ferry
from tests.support.jobs import kill_supervisor, said, wait_for

TOKEN = "T0ken-of-a-webhook"
FAILS_AT_FIRST = "import os, sys; print('up'); sys.exit(int(os.environ['TORCHFERRY_ATTEMPT'] == '1') * 3)"
EVENT = Event(
    "a-1", "a", "failure", "failed", "gpu2", "2026-11-30T00:00:00Z", 1, 3, "rank 0 exited with code 3", 7, 1.5
)


class Hook(ThreadingHTTPServer):
    """A server of this machine that answers as the path says, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.ending = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    def url(self, way: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{way}/{TOKEN}"

    def told(self, way: str = "200") -> list[dict[str, Any]]:
        return [json.loads(body) for path, _, body in list(self.got) if path.startswith(f"/{way}/")]


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers), body))
        way = self.path.split("/")[1]
        if way == "hangs":
            self.server.ending.wait(60)
            return
        self.send_response(int(way))
        if way == "302":
            self.send_header("Location", self.server.url("200"))
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    with _running(Hook()) as server:
        yield server


@contextmanager
def _running(server: Hook) -> Iterator[Hook]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        thread.join()
        server.server_close()


def files_with(folder: Path, text: str) -> list[Path]:
    """Every file below the folder that holds the text."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if text.encode() in path.read_bytes()]


def processes_with(text: str) -> list[str]:
    """Command lines and environments of all processes that hold the text, but for this one's."""
    found = []
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != str(os.getpid())):
        for what in ("cmdline", "environ"):
            try:
                data = (process / what).read_bytes()
            except OSError:
                continue
            found += [f"{process.name} {what}"] if text.encode() in data else []
    return found


# --- decided ----------------------------------------------------------------------------------------------------------


def test_event_is_one_line_for_slack_and_discord_whatever_a_job_says() -> None:
    assert sentence(EVENT) == "a-1 failed on gpu2, step 7, loss 1.5: rank 0 exited with code 3"
    body = body_of(EVENT._replace(reason="bad\x1b[2J\nnews " + "x" * 9000))
    assert body["text"] == body["content"] and body["text"].isprintable() and len(body["text"]) == 500
    assert body["reason"].startswith("bad [2J news x") and len(json.dumps(body)) < 4096


def test_url_is_checked_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (
        f"ftp://h/{TOKEN}",
        f"https:///{TOKEN}",
        f"https://h:x/{TOKEN}",
        f"https://h/{TOKEN} b",
        f"file:///{TOKEN}",
        f"hooks.slack.com/services/{TOKEN}",
        f"ntfy.example.org:8080/{TOKEN}",
    ):
        with pytest.raises(UsageError) as refused:
            read_notify([bad])
        assert TOKEN not in f"{refused.value} {refused.value.message} {refused.value.hint}"
    monkeypatch.setenv("TORCHFERRY_NOTIFY", "https://hooks.slack.com/a")
    commands = ("mail me", "./tell.sh/x", "bin/tell.sh", "curl hooks.slack.com/a", "tell.sh")
    assert [read_notify([word]).commands for word in commands] == [(word,) for word in commands]
    assert read_notify(["mail me"]) == ((), ("mail me",))
    monkeypatch.setenv("TORCHFERRY_NOTIFY", "https://hooks.slack.com/a")
    assert read_notify([]) == (("https://hooks.slack.com/a",), ())
    assert "TORCHFERRY_NOTIFY" not in os.environ, "no program of this client sees it"


def test_password_of_a_url_is_a_header_and_ntfy_gets_plain_text() -> None:
    request = send.request_of("https://me:pa%40ss@ntfy.example.org/topic?x=1#part", body_of(EVENT))
    assert request.full_url == "https://ntfy.example.org/topic?x=1" and request.data == sentence(EVENT).encode()
    assert request.get_header("Authorization") == "Basic bWU6cGFAc3M="
    assert json.loads(send.request_of("https://discord.com/x", body_of(EVENT)).data or b"")["content"]


def test_post_is_tried_three_times_where_that_may_help_and_follows_no_redirect(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(send, "TRY_S", 0.3)
    tried = {"200": 1, "500": 3, "404": 1, "302": 1, "hangs": 3}
    troubles = {way: send.post(hook.url(way), body_of(EVENT)) for way in tried}
    assert {way: len([path for path, _, _ in hook.got if path.startswith(f"/{way}/")]) for way in tried} == tried
    assert troubles["200"] == "" and troubles["500"] == "it answered 500" and troubles["404"] == "it answered 404"
    assert troubles["302"] == "it answered 302, a redirect, which is not followed"
    assert troubles["hangs"].startswith("no answer within") or troubles["hangs"] == "TimeoutError"
    with _running(Hook()) as gone:
        closed = gone.url("200")
    for url in (closed, f"http://no-such-host.invalid/{TOKEN}", f"http://127.0.0.1:1/\t{TOKEN}"):
        assert (trouble := send.post(url, body_of(EVENT))) and TOKEN not in trouble


# --- carried out ------------------------------------------------------------------------------------------------------


def test_url_is_told_of_start_restart_and_end_and_is_kept_nowhere(ferry: Ferry, hook: Hook, tmp_path: Path) -> None:
    ferry.env["TORCHFERRY_NOTIFY"] = hook.url("200")
    code = FAILS_AT_FIRST + "; import time; time.sleep(3)"
    words = ("--max-restarts", "1", "--name", "told", "--python", sys.executable, "--", "python", "-uc", code)
    shown = ferry.run("run", *ferry.where(), "--dry-run", *words)
    assert (
        "# notify   a URL of 127.0.0.1" in shown.stdout.decode() and TOKEN.encode() not in shown.stdout + shown.stderr
    )
    as_json = ferry.run("run", *ferry.where(), "--dry-run", "--json", *words)
    assert (
        json.loads(as_json.stdout)["plan"]["policy"]["notify"] == ["127.0.0.1"] and TOKEN.encode() not in as_json.stdout
    )
    done = ferry.run("run", *ferry.where(), "--detach", *words)
    assert done.returncode == 0, done.stderr.decode()
    assert processes_with(TOKEN) == []
    names = ["start", "restart", "start", "end"]
    wait_for(lambda: len(hook.told()) == len(names))
    told = sorted(hook.told(), key=lambda event: (event["time"], event["attempt"], event["event"] == "end"))
    assert sorted(event["event"] for event in told) == sorted(names)
    restart = next(event for event in told if event["event"] == "restart")
    job_id = ferry.job_ids()[0]
    assert restart["id"] == job_id and restart["name"] == "told" and restart["attempt"] == 2
    assert (restart["code"], restart["reason"]) == (3, "rank 0 exited with code 3")
    last = next(event for event in told if event["event"] == "end")
    assert last["state"] == "succeeded" and last["text"] == f"{job_id} succeeded on {os.uname().nodename}"
    assert hook.got[0][1]["Content-Type"] == "application/json"
    final = judge(Job(str(ferry.job())))
    assert final.state == "succeeded" and final.swept == 0, "what tells others is none of the job's processes"
    assert files_with(tmp_path, TOKEN) == [] and TOKEN.encode() not in done.stdout + done.stderr


def test_job_does_not_care_whether_anybody_hears(ferry: Ferry, hook: Hook) -> None:
    urls = (hook.url("500"), hook.url("hangs"), f"http://no-such-host.invalid/{TOKEN}")
    words = [word for url in urls for word in ("--notify", url)]
    began = time.monotonic()
    done = ferry.run(
        "run", *ferry.where(), *words, "--no-pull", "--python", sys.executable, "--", "python", "-c", "print('up')"
    )
    took_s = time.monotonic() - began
    assert done.returncode == 0 and done.stdout.decode() == "up\n", done.stderr.decode()
    job = Job(str(ferry.job()))
    assert judge(job).state == "succeeded" and judge(job).swept == 0
    again = ferry.run("resume", job.id, "--no-pull")
    assert again.returncode == 0, "what still tells others keeps no attempt waiting: " + again.stderr.decode()
    assert "127.0.0.1, 127.0.0.1, no-such-host.invalid is told no more" in again.stderr.decode()
    log = Path(job.supervisor_log)
    wait_for(lambda: "notify: 127.0.0.1 was not told of start: it answered 500" in log.read_text())
    assert TOKEN not in log.read_text() and took_s < 600


def test_adopter_says_that_it_knows_no_url(ferry: Ferry, hook: Hook) -> None:
    go = ferry.project.parent / "go"
    code = f"import os, time; print('up')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)"
    words = ("--detach", "--notify", hook.url("200"), "--python", sys.executable, "--", "python", "-uc", code)
    assert ferry.run("run", *ferry.where(), *words).returncode == 0
    job = Job(str(ferry.job()))
    said(job, "up")
    wait_for(lambda: [event["event"] for event in hook.told()] == ["start"])
    kill_supervisor(job)
    ferry.run("ps")
    line = "notify: the URL of 127.0.0.1 was known to the supervisor that was killed: nobody is told any more"
    wait_for(lambda: line in Path(job.supervisor_log).read_text())
    go.touch()
    wait_for(lambda: judge(job).state == "succeeded")
    assert len(hook.told()) == 1


def test_command_runs_on_the_client_that_follows(ferry: Ferry, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    command = f'{{ cat; echo; echo "$TORCHFERRY_EVENT $TORCHFERRY_ID $TORCHFERRY_CODE"; }} >> {heard}'
    words = ("--notify", command, "--notify", "echo no >&2; exit 7", "--max-restarts", "1", "--python", sys.executable)
    program = ("--", "python", "-uc", "import sys; sys.exit(3)")
    done = ferry.run("run", *ferry.where(), *words, *program)
    said = done.stderr.decode()
    assert done.returncode == 3 and "--notify 'echo no >&2; exit 7': it ended with code 7: no" in said
    lines = heard.read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines[::2]]
    assert events[0] == "start" and "restart" in events and events[-1] == "failure"
    assert lines[-1] == f"failure {ferry.job_ids()[0]} 3"
    refused = ferry.run("run", *ferry.where(), "--detach", *words, *program)
    assert refused.returncode == 2 and "goes without --detach" in refused.stderr.decode()
    shown = ferry.run("run", *ferry.where(), "--dry-run", *words, *program)
    assert "# notify   echo no >&2; exit 7: on this client, while it follows" in shown.stdout.decode()
