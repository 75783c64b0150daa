"""Hosts that lie: whatever they send, nothing leaves the target, drives the terminal or fills this machine's memory."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer.commands.in_words import state_of
from deployer.connection.host import Host
from deployer.connection.link import Link
from deployer.errors import HostError
from deployer.jobs.registry import JobRecord
from deployer.jobs.requests import read_status
from deployer.jobs.roster import ask_all, rows_of
from deployer.plan.next_attempt import read_resumable
from deployer.plan.repeat import read_original
from deployer.pull.rounds import pull
from tests.support.ferry import Ferry
from tests.support.limits import HANG_S, PATIENCE
from tests.support.lying import PRELUDE, Lying, lying_host
from tests.support.sshd import ALIAS, SshServer, start_sshd
from tests.support.terminals import EVIL, assert_tame, on_terminal


@pytest.mark.parametrize(
    "code",
    [
        "out.write(b'X' * 100)",
        "frame(b'[1]')",
        "frame(b'[' * 30000)",
        "frame({'id': 0, 'grant': 'much'}); sys.stdin.read()",
        "frame({'id': 0}); sys.stdin.read()",
        "frame({'id': 0, 'json': True}, b'{no'); frame({'id': 0, 'event': 'jobs'}); sys.stdin.read()",
        "while True: frame({'id': 0, 'json': True}, b'[' * 48000)",
        "frame({'id': 0, 'json': True}, b'[[],' * 12000 * 4 + b'[]]'); sys.stdin.read()",
        "many(b'[' + b'[],' * 300000 + b'[]]')",
        "frame({'id': 7, 'ok': {}}); sys.stdin.read()",
        "frame({'id': 'x', 'ok': {}}); sys.stdin.read()",
        "frame({'id': []}); sys.stdin.read()",
        "frame({'id': 0, 'json': True}, '\\u00e9'.encode()); frame({'id': 0, 'event': 'jobs'}); sys.stdin.read()",
    ],
    ids=[
        *["no frame", "no object", "deep", "grant", "no event", "no json", "endless", "too long a frame", "many items"],
        *["never asked", "no number", "no id", "not ascii"],
    ],
)
def test_answer_that_no_agent_gives_ends_with_one_error_at_once(tmp_path, code):
    with Link.open(Lying(code), root=str(tmp_path), request={"op": "ps"}) as link:
        with pytest.raises(HostError, match="not understood"):
            link.first.result("jobs")


@pytest.mark.parametrize("rows", [5, ["job"], [{"id": "a; b"}], [{"state": "running"}]])
def test_ps_of_a_host_that_answers_nonsense_is_that_hosts_row_alone(tmp_path, rows):
    code = f"frame({{'id': 0, 'event': 'jobs', 'value': {rows!r}}}); frame({{'id': 0, 'ok': {{}}}}); sys.stdin.read()"
    odd, sound = Host("odd", "/odd", begun=Lying(code)), Host(None, str(tmp_path))
    known = JobRecord("j1", "j", "odd", "/odd", "", "2026-01-01T00:00:00Z")
    hosts = [odd, sound]
    (row,) = rows_of(hosts, ask_all(hosts), [known])
    assert (row.job.id, state_of(row)) == ("j1", "unreachable (never seen)") and "not understood" in row.trouble


@pytest.mark.parametrize("row", [{"id": "a"}, {"id": "a", "state": "running", "gpus": 3}])
def test_job_of_which_a_host_tells_nonsense_keeps_no_other_one_from_being_listed(tmp_path, row):
    rows = [row, {"id": "b", "state": "running"}]
    code = f"frame({{'id': 0, 'event': 'jobs', 'value': {rows!r}}}); frame({{'id': 0, 'ok': {{}}}}); sys.stdin.read()"
    hosts = [Host("odd", "/odd", begun=Lying(code))]
    found = rows_of(hosts, ask_all(hosts), [])
    assert [(each.job.id, state_of(each)) for each in found] == [("a", "unreachable (never seen)"), ("b", "running")]
    assert "not understood" in found[0].trouble and not found[1].trouble


# --- pull -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        ["logs/../../x", 1, 1, 1, 1],
        ["/logs/x", 1, 1, 1, 1],
        ["../logs", 1, 1, 1, 1],
        ["logs//x", 1, 1, 1, 1],
        ["logs/.", 1, 1, 1, 1],
        ["", 1, 1, 1, 1],
        [".pulling/lock", 1, 1, 1, 1],
        ["checkpoints/x", 1, 1, 1, 1],
        ["logs/a\x1b[31m", 1, 1, 1, 1],
        ["logs/a\x9bm", 1, 1, 1, 1],
        ["logs/a\0b", 1, 1, 1, 1],
        ["logs/a", -1, 1, 1, 1],
        ["logs/a", 1 << 70, 1, 1, 1],
        ["logs/a", 1, 1e300, 1, 1],
        ["logs/a", 1, float("nan"), 1, 1],
        ["logs/a", True, 1, 1, 1],
        ["logs/a", 1, 1, -1, 1],
        "abcd",
        ["logs/a"],
        {},
        None,
    ],
)
def test_pull_of_a_file_that_is_none_brings_the_others(tmp_path, row):
    pulled = pull(lying_host(empty_files(["logs/ok", 0, 1, 9, 0], row), tmp_path), "job", target=tmp_path / "results")
    assert [(left.name, left.reason[:8]) for left in pulled.not_home] == [("row 2 of the host's list", "damaged:")]
    assert [path.name for path in (tmp_path / "results").rglob("*")] == ["logs", "ok"]


def empty_files(*rows: object) -> str:
    """A host with these files, all of them empty."""
    code = f"files(*{list(rows)!r}); call = hear('fetch')\n"
    code += "for piece in call['pieces']:\n"
    code += "    event('piece', {'digest': hashlib.blake2b(digest_size=16).hexdigest()}, call['id'])\n"
    return code + "frame({'id': call['id'], 'ok': {}})\nforever()"


def test_pull_of_a_name_that_is_listed_twice_brings_it_once(tmp_path):
    row = ["logs/a", 0, 1, 1, 0]
    pulled = pull(lying_host(empty_files(row, row), tmp_path), "job", target=tmp_path / "results")
    assert pulled.files == 1 and [left.reason for left in pulled.not_home] == ["damaged: 'logs/a' is listed twice"]


def test_pull_of_a_file_below_a_file_brings_the_one(tmp_path):
    rows = ["logs/a", 0, 1, 1, 1], ["logs/a/b", 0, 1, 2, 1]
    pulled = pull(lying_host(empty_files(*rows), tmp_path), "job", target=tmp_path / "results")
    assert [left.name for left in pulled.not_home] == ["logs/a/b"]
    assert "a file where a folder is needed" in pulled.not_home[0].reason


def test_many_damaged_rows_are_told_in_few_words(tmp_path):
    pulled = pull(lying_host("files(*[5] * 5000); forever()", tmp_path), "job", target=tmp_path / "results")
    assert len(pulled.not_home) == 9 and pulled.not_home[-1].name == "4992 more rows"


FETCH_LIES = {
    "more bytes": ("while True: frame({'id': n, 'data': True}, b'x' * 48000)", "more of logs/a than"),
    "fewer bytes": ("frame({'id': n, 'data': True}, b'x'); event('piece', {'digest': 'x'}, n)", "damaged"),
    "another hash": ("frame({'id': n, 'data': True}, b'12345'); event('piece', {'digest': 'x'}, n)", "damaged"),
    "nothing": ("frame({'id': n, 'ok': {}})", "passes over"),
    "the same, unasked": ("event('piece', {'same': True}, n)", "damaged"),
    "no object": ("event('piece', 5, n)", "not understood"),
    "pieces without end": ("while True: event('piece', {'gone': True}, n)", "more than was asked"),
}


@pytest.mark.parametrize("lie", FETCH_LIES)
def test_pull_of_bytes_that_are_not_what_was_listed_brings_no_file(tmp_path, lie):
    code, words = FETCH_LIES[lie]
    answer = textwrap.indent(code, "    ")
    host = lying_host(f"files(['logs/a', 5, 1, 1, 1])\nwhile True:\n    n = hear('fetch')['id']\n{answer}", tmp_path)
    if words == "damaged":
        (left,) = pull(host, "job", target=tmp_path / "results").not_home
        assert left.name == "logs/a" and "arrive damaged" in left.reason
    else:
        with pytest.raises(HostError, match=words):
            pull(host, "job", target=tmp_path / "results")
    assert not [path for path in (tmp_path / "results").rglob("*") if path.name == "a"]


# --- the command line -------------------------------------------------------------------------------------------------

ANSWERS = f"""
e = {EVIL!r}
state = "running"
job = dict.fromkeys(["name", "reason", "created", "host", "on_host", "damaged"], e)
status = {{"code": 3, "groups": [{{"nproc": 2}}], "warnings": [e], "stalled": [{{"rank": 0, "last_line": e}}]}}
status.update(dict.fromkeys(["reason", "phase", "started_at", "hint"], e), state=state)
status.update(remaining=[{{"pid": 1, "start_time": 1, "cmdline": e}}])
view = {{"job_id": "j1", "processes": [{{"role": e, "node": 0, "ranks": [0, 1]}}], "was": "running", "path": e}}
view.update(latest=json.dumps({{e: e}}), status=status)
gpu = {{"index": 0, "uuid": e, "name": e, "memory_used_mib": 1, "memory_total_mib": 2}}
gpu["held"] = [{{"job": e, "user": e, "shared": True, "since": 0}}]
gpu["processes"] = [{{"gpu_uuid": e, "pid": 7, "user": e, "memory_mib": 1, "command": e}}]
kept = {{"count": 2, "what": e, "size_bytes": 1}}
gc = {{"jobs": [{{"id": e, "size_bytes": 1, "ended_s": 1}}], "rest": [dict(kept, kind=e, oldest_s=1)]}}
check = {{"name": e, "status": "fail", "detail": e, "hint": e}}
values = {{
    "ps": ("jobs", [{{**job, "id": "j1", "state": state, "gpus": [e]}}]),
    "status": ("status", view),
    "doctor": ("doctor", {{"facts": {{e: e}}, "checks": [check]}}),
    "stop": ("state", status),
    "gpus": ("gpus", {{"gpus": [gpu], "queue": [{{"job": e, "user": e, "wants": e, "since": 0}}]}}),
    "gc": ("gc", {{**gc, "kept_jobs": [kept], "remaining": [e], "total_bytes": 1, "free_bytes": 1, "root": e}}),
    "files": ("links", {{"names": [e], "more": 1}}),
    "follow": ("state", status),
    "launch": ("ack", {{"job_id": e, "path": e}}),
}}
"""
SAYS = f"""{ANSWERS}
frame({{"hello": {{}}}})
event(*values[op])
line = e.replace("\\r", "").replace("\\n", "" if op == "launch" else "\\n")  # a single rank's own lines have no prefix
frame({{"id": 0, "data": True, "file": "rank_0.log", "offset": 0}}, line.encode("utf-8", "replace"))
event("left_out", {{"file": e, "size": 1, "limit": 1}})
op == "status" or event("status", dict(view, status=dict(status, state="failed")))
frame({{"id": 0, "ok": {{}}}})
while True:
    head = hear()
    "ping" in head and frame({{"pong": head["ping"]}})
"""
ODD = SAYS.replace('state = "running"', "state = e")
FAILS = ANSWERS + 'frame({"id": 0, "error": {"kind": "host", "message": e, "hint": e}}); forever()'
REFUSES = ANSWERS + 'frame({"refused": {"kind": e, "message": e, "hint": e}}); forever()'
ENDS = ANSWERS + "sys.stderr.write(e.encode('utf-8', 'replace').decode()); sys.stderr.flush()"
COMMANDS = (
    ("ps",),
    ("status", "j1"),
    ("stop", "j1"),
    ("doctor",),
    ("gpus",),
    ("gc", "--yes"),
    ("pull", "j1"),
    ("logs", "j1"),
    ("run", "--no-pull", "--", "true"),
)


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A server on which every command is the program `lie.py` in its home."""
    folder = tmp_path_factory.mktemp("liar")
    program = "import os\nWORD = os.environ['SSH_ORIGINAL_COMMAND'].rsplit(' ', 1)[1]\n" + PRELUDE
    program += "exec(open(os.path.expanduser('~/lie.py')).read())\n"
    (folder / "liar.py").write_text(program)
    with start_sshd(folder, extra_config=f"ForceCommand exec {sys.executable} -S {folder}/liar.py") as server:
        yield server


@pytest.fixture
def victim(ferry: Ferry, liar: SshServer) -> Ferry:
    ferry.ssh = ALIAS
    ferry.env["TORCHFERRY_SSH_CONFIG"] = str(liar.client_config_path)
    return ferry


def lie(server: SshServer, code: str, *, before: str = "") -> None:
    (server.home / "lie.py").write_text(f"{before}\nout.write(nonce)\n{code}")


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_escapes_in_whatever_a_host_says_drive_no_terminal(victim, liar, words):
    output = b""
    for code in (SAYS, ODD, FAILS, REFUSES, ENDS):
        lie(liar, code, before="out.write(b'\\x1b[31m\\x9bnoise\\r\\n')")
        said = on_terminal(
            victim.argv(words[0], *victim.where(), *words[1:]), cwd=victim.project, env=victim.environment()
        )
        assert_tame(said)
        output += said
    assert rb"\x1b]0;owned\x07" in output


@pytest.mark.parametrize("words", [*COMMANDS[:4], *COMMANDS[5:7]], ids=lambda words: words[0])
def test_json_of_whatever_a_host_says_is_json_without_a_control_byte(victim, liar, words):
    lie(liar, SAYS)
    done = victim.run(words[0], *victim.where(), *words[1:], "--json")
    assert_tame(done.stderr)
    assert re.fullmatch(rb"[\n\x20-\x7e]+", done.stdout)
    assert EVIL in str_values(json.loads(done.stdout))


def str_values(value: object) -> set[str]:
    """Every string in a JSON value, keys too."""
    if isinstance(value, dict):
        return set().union(*map(str_values, [*value, *value.values()]))
    if isinstance(value, list):
        return set().union(*map(str_values, value))
    return {value} if isinstance(value, str) else set()


def test_dry_run_on_a_terminal_drives_none_and_to_a_pipe_is_exact(ferry):
    argument = EVIL.replace("\n", " ").replace("\ud800", "")
    words = ("run", "--dry-run", "--", "true", argument)
    output = on_terminal(ferry.argv(*words), cwd=ferry.project, env=ferry.environment())
    assert_tame(output)
    assert rb"\x1b]0;owned\x07" in output
    assert ferry.run(*words).stdout.endswith(f"true '{argument}'\n".encode())


@pytest.mark.parametrize("status", ["None", "5", "{'status': {'state': 'running'}, 'job_id': 'a; rm -rf ~'}"])
def test_status_with_an_id_that_is_none_is_not_made_a_command(tmp_path, status):
    code = f"event('status', {status}); frame({{'id': 0, 'ok': {{}}}}); forever()"
    with pytest.raises(HostError, match="not understood"):
        read_status(lying_host(code, tmp_path), "a")


@pytest.mark.parametrize(("event", "read"), [("plan", read_resumable), ("original", read_original)])
def test_plan_of_an_id_that_is_none_makes_no_folder(tmp_path, event, read):
    value = "{'job_id': '/tmp/x/evil', 'plan': {}, 'attempt': 1}"
    code = f"event('{event}', {value}); frame({{'id': 0, 'ok': {{}}}}); forever()"
    with pytest.raises(HostError, match=f"{event}.job_id"):
        read(lying_host(code, tmp_path), "a")


FLOODS = {
    "noise": ("while True: out.write(b'x' * 65536)", "", 125),
    "a line on stderr without end": (
        "",
        "import itertools\nfor _ in itertools.repeat(0): sys.stderr.write('x' * 65536)",
        None,
    ),
    "list of jobs without end": ("", "while True: frame({'id': 0, 'json': True}, b'[' + b'[],' * 16000)", 125),
    "jobs of one letter": ("", "many(b'[' + b'[],' * 1300000 + b'[]]'); forever()", 125),
    "events without end": ("", "while True: event('other', [[]] * 5000)", None),
    "answers to nothing": ("", "while True: frame({'id': 99}, b'x' * 48000)", 125),
    "hello without end": ("", "while True: frame({'hello': {'x': 'y' * 50000}})", None),
    "a frame of 4 GB": ("", "out.write(b'\\xff' * 8); out.flush(); forever()", 125),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_flood_from_a_host_does_not_fill_memory(victim, liar, flood):
    before, code, expected = FLOODS[flood]
    lie(liar, code, before=before)
    assert_bounded(victim, "status", "j1", expected=expected)


def test_list_of_files_without_end_does_not_fill_memory(victim, liar):
    code = (
        "n = 0\nwhile True:\n"
        "    rows = [['logs/%0200d' % i, 1, 1, 1, 1] for i in range(n, n + 1000)]\n"
        "    many(json.dumps(rows).encode(), 'files')\n"
        "    n += 1000"
    )
    lie(liar, code)
    assert_bounded(victim, "pull", "j1", "--to", "home", expected=125)


def assert_bounded(victim: Ferry, *words: str, expected: int | None) -> None:
    """Runs a command to its end, or for some seconds where the host goes on forever; its memory stays below 100 MB."""
    client = victim.start(*words, *victim.where())
    status, peak_kib = Path(f"/proc/{client.pid}/status"), 0
    deadline = time.monotonic() + (3 * PATIENCE if expected is None else HANG_S)
    while client.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+)", status.read_text())
        peak_kib = int(found[1]) if found else peak_kib
        if time.monotonic() > deadline:
            client.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    out, err = client.communicate(timeout=HANG_S)
    assert_tame(out + err)
    assert peak_kib < 100_000
    assert client.returncode == (130 if expected is None else expected), err.decode()
