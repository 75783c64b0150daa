"""`logs`: which part of a log is shown, how, to whom, and what its exit code says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from deployer.commands.values import parse_duration, parse_since, parse_size
from deployer.errors import UsageError
from tests.support.ferry import Ferry

MIXED = "zwölf ✓\n".encode() + b"\xff\xfe\r 10%\r 20%\r\nwith cr lf\r\n\x1b[1mbold\x1b[0m\nno end"
NOW = 2_000_000_000


def ended_job(ferry: Ferry, *attempts: dict[str, bytes], nproc: int = 1, **status: Any) -> None:
    """A job `j` as its supervisor leaves it: log folders and a final status."""
    job = ferry.root / "jobs" / "j"
    for number, files in enumerate(attempts, 1):
        folder = job / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)  # of a group of processes
            (folder / name).write_bytes(data)
    supervisor = {"machine_id": "m", "boot_id": "b", "pid": 1, "start_time": 1, "hostname": "h"}
    final = {"state": "succeeded", "code": 0, "nproc": nproc, "attempt": len(attempts), "supervisor": supervisor}
    final.update(status)
    (job / "status.json").write_text(json.dumps(final))


def index(*rows: tuple[float, int], offset: float = 0) -> bytes:
    """times.jsonl: how large rank 0's log was so many seconds before now."""
    now = datetime.now(timezone.utc).timestamp() + offset
    return b"".join(json.dumps([now - ago, 1e6 - ago, {"rank_0.log": size}]).encode() + b"\n" for ago, size in rows)


def logs(ferry: Ferry, *words: str) -> subprocess.CompletedProcess[bytes]:
    return ferry.run("logs", "j", *ferry.where(), *words)


def test_raw_is_the_file_byte_for_byte(ferry):
    ended_job(ferry, {"rank_0.log": MIXED, "launcher.log": b"torchrun\n", "prepare.log": b"pip\n"})
    done = logs(ferry, "--raw")
    assert (done.returncode, done.stdout, done.stderr) == (0, MIXED, b"")


def test_raw_of_one_among_several_ranks_must_be_chosen(ferry):
    ended_job(ferry, {"rank_0.log": b"zero", "rank_1.log": MIXED}, nproc=2)
    refused = logs(ferry, "--raw")
    assert refused.returncode == 2 and b"j has 2" in refused.stderr and b"add --rank R, 0 to 1" in refused.stderr
    assert logs(ferry, "--raw", "--rank", "1").stdout == MIXED


def test_rank_node_and_attempt_choose_and_what_is_not_there_is_refused(ferry):
    files = {"rank_0.log": b"a\n", "rank_1.log": b"b\n"}
    ended_job(ferry, files, {"rank_0.log": b"c\n", "rank_1.log": b"d\n"}, nproc=2)
    assert logs(ferry).stdout == b"[0] c\n[1] d\n"
    earlier = logs(ferry, "--rank", "1", "--attempt", "1", "--node", "0")
    assert (earlier.stdout, earlier.stderr) == (b"b\n", b"")
    for words, says in (
        (("--node", "1"), b"no node 1: it runs on one node, which is node 0"),
        (("--rank", "2"), b"no rank 2, only 0 to 1"),
        (("--attempt", "3"), b"no attempt 3: the last one is 2"),
    ):
        refused = logs(ferry, *words)
        assert refused.returncode == 2 and says in refused.stderr and b"Traceback" not in refused.stderr


def test_grep_shows_the_whole_lines_that_match(ferry):
    ended_job(ferry, {"rank_0.log": b"loss 1.5\nstep\nloss \xff", "rank_1.log": b"loss 2.5\nloss none\n"}, nproc=2)
    shown = logs(ferry, "--grep", r"^loss (\d|\xff)").stdout
    assert shown == b"[0] loss 1.5\n[1] loss 2.5\n[0] loss \\xff\n"  # the last one has no end: it may go on
    assert logs(ferry, "--grep", "loss", "--tail", "1", "--rank", "1").stdout == b"loss none\n"


@pytest.mark.parametrize("pattern", ["(", "*", "[z-a]"])
def test_pattern_that_is_no_regular_expression_is_named(ferry, pattern):
    ended_job(ferry, {"rank_0.log": b"x\n"})
    done = logs(ferry, "--grep", pattern)
    assert done.returncode == 2 and f"--grep '{pattern}' is no regular expression: ".encode() in done.stderr


@pytest.mark.parametrize("end", [b"\n", b""])
def test_pattern_that_explodes_is_named_and_leaves_nothing_running(ferry, end):
    ended_job(ferry, {"rank_0.log": b"a" * 60 + b"!" + end})
    done = logs(ferry, "--grep", "(a+)+$")
    assert done.returncode == 2 and b"gave up the search: this --grep takes it too long\nhint: a pattern" in done.stderr


def test_since_begins_where_the_log_stood_then(ferry):
    rows = index((3600, 4), (700, 8), (30, 12))
    ended_job(ferry, {"rank_0.log": b"one\ntwo\nsix\nend\n", "times.jsonl": rows})
    assert logs(ferry, "--since", "10m").stdout == b"six\nend\n"
    assert logs(ferry, "--since", "2h").stdout == b"one\ntwo\nsix\nend\n"
    moment = datetime.now(timezone.utc) - timedelta(minutes=20)
    assert logs(ferry, "--since", moment.strftime("%Y-%m-%dT%H:%M:%SZ"), "--raw").stdout == b"two\nsix\nend\n"


def test_since_reaches_back_into_an_earlier_attempt(ferry):
    first = {"rank_0.log": b"one\ntwo\n", "times.jsonl": index((3600, 4), (700, 8))}
    second = {"rank_0.log": b"three\n", "times.jsonl": index((600, 6))}
    ended_job(ferry, first, second)
    assert logs(ferry, "--since", "20m").stdout == b"two\nthree\n"
    assert logs(ferry, "--since", "11m").stdout == b"three\n"
    assert logs(ferry, "--since", "20m", "--attempt", "2").stdout == b"three\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", {"ago_s": 600}),
        ("1h30m", {"ago_s": 5400}),
        ("90s", {"ago_s": 90}),
        ("03:00", {"unix_s": NOW - 2000}),  # it is 03:33:20
        ("3:40", {"unix_s": NOW + 400 - 86400}),  # yesterday
        ("2033-05-18T03:33:00+00:00", {"unix_s": NOW - 20}),
        ("2033-05-18T03:33:00Z", {"unix_s": NOW - 20}),
    ],
)
def test_since_takes_a_duration_or_a_time(text, expected):
    assert parse_since(text, now=datetime.fromtimestamp(NOW, timezone.utc)) == expected


@pytest.mark.parametrize("text", ["", "soon", "25:00", "10x", "2033-13-01"])
def test_since_refuses_what_is_no_time(text):
    with pytest.raises(UsageError, match="is n"):
        parse_since(text)


@pytest.mark.parametrize(("parse", "unit"), [(parse_size, "GB"), (parse_duration, "d")])
def test_number_beyond_all_measure_is_refused(parse, unit):
    with pytest.raises(UsageError, match=r"more than any disk|longer than a hundred"):
        parse("9" * 400 + unit)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("0.5s", 0.5), ("2d", 172800), ("0", 0)])
def test_duration_with_its_units_is_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["30", "0.5", "1h30"])
def test_duration_without_a_unit_is_refused(text):
    with pytest.raises(UsageError, match=r"has no unit|is not a duration"):
        parse_duration(text)


def test_dropped_part_is_said_and_the_kept_one_shown(ferry):
    dropped = json.dumps({"rank_0.log": 1_500_000, "log_max_bytes": 2_000_000}).encode()
    ended_job(ferry, {"rank_0.log": bytes(1_500_000) + b"kept\n", "dropped.json": dropped})
    done = logs(ferry)
    assert done.stdout == b"kept\n"
    assert done.stderr == b"[rank 0: 1.5 MB of this log were dropped on the host, --log-max 2.0 MB]\n"
    assert logs(ferry, "--raw").stdout == b"kept\n"


def test_endless_line_under_grep_says_that_it_was_cut(ferry):
    ended_job(ferry, {"rank_0.log": b"x" * 1_000_000 + b"\nxx\n"})
    for words in ((), ("--raw",)):
        done = logs(ferry, "--grep", "x", *words)
        assert done.stdout == b"x" * 262_144 + b"\nxx\n"
        assert done.stderr == b"[rank 0: of a longer line only the first 262.1 kB were searched and are shown]\n"


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ({"state": "succeeded"}, 0, "j succeeded"),
        ({"state": "failed", "code": 7}, 7, "j failed (exit code 7)"),
        ({"state": "stopped"}, 143, "j stopped"),
        ({"state": "lost", "code": 125, "reason": "the host was rebooted"}, 125, "j lost (the host was rebooted)"),
    ],
)
def test_ended_job_followed_gives_its_own_code_and_says_how_it_ended(ferry, status, code, says):
    ended_job(ferry, {"rank_0.log": b"x\n"}, **status)
    done = logs(ferry, "-f")
    assert (done.returncode, done.stderr.decode()) == (code, says + "\n")


# --- whoever reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["logs", "status", "ps"])
@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_reader_that_has_gone_ends_it_quietly(ferry, command, reader):
    ended_job(ferry, {"rank_0.log": b"line\n" * 200_000})
    words = ferry.argv(command, *(["j"] if command != "ps" else []), *ferry.where())
    shell = f'("$@" 2>errors; echo $? >code) | {reader}'
    subprocess.run(["sh", "-c", shell, "sh", *words], cwd=ferry.project, env=ferry.environment(), check=True)
    code, errors = ((ferry.project / name).read_text() for name in ("code", "errors"))
    assert code.strip() in ("0", "141") and (command == "status" or errors == "") and "Traceback" not in errors


def test_run_whose_reader_has_gone_says_that_the_job_goes_on(ferry):
    words = ferry.argv("run", *ferry.where(), "--no-pull", "--", "sh", "-c", "seq 200000")
    shell = '("$@" 2>../errors; echo $? >../code) | head -n 1'
    subprocess.run(["sh", "-c", shell, "sh", *words], cwd=ferry.project, env=ferry.environment(), check=True)
    errors = (ferry.project.parent / "errors").read_text()
    assert (ferry.project.parent / "code").read_text() == "141\n" and "it goes on without this client" in errors


def every_command(ferry: Ferry) -> list[list[str]]:
    ended_job(ferry, {"rank_0.log": b"10%\r20%\rdone\n"}, state="failed", code=3, reason="rank 0 exited with code 3")
    (ferry.project / "data").write_bytes(os.urandom(300_000))
    run = ["run", *ferry.where(), "--", "sh", "-c", "echo out; exit 3"]
    beside = [[name, "j", *ferry.where()] for name in ("logs", "status", "stop", "pull")]
    return [run, ["ps", *ferry.where()], ["logs", "nope"], *beside]


def test_without_a_terminal_no_escape_byte_anywhere(ferry):
    for words in every_command(ferry):
        done = ferry.run(*words)
        assert b"\x1b" not in done.stdout + done.stderr, words


def test_on_a_terminal_without_colour_no_escape_byte_either(ferry):
    ferry.env.update(NO_COLOR="1", TERM="xterm-256color")
    for words in every_command(ferry):
        shown = subprocess.run(
            ["script", "-qec", shlex.join(ferry.argv(*words)), "/dev/null"],
            cwd=ferry.project,
            env=ferry.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert shown.stdout and b"\x1b" not in shown.stdout, words
