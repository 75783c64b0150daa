"""`logs` and `pull` of a job with two roles on two nodes, through the real agent, from a folder made by the test."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from deployer.connection.host import Host
from deployer.launch.logview import LogView
from deployer.pull.rounds import pull
from tests.deployer.commands.test_logs_command import ended_job, logs
from tests.deployer.commands.test_logview import make_view
from tests.support.ferry import Ferry

RANKS = [("server", 0, 0), ("server", 0, 1), ("server", 1, 0), ("trainer", 0, 0), ("trainer", 1, 0)]
SAYS = {place: f"{place[0]} {place[1]} {place[2]} one\n".encode() + b"loss 2\n" for place in RANKS}


def prefix(role: str, node: int, rank: int) -> bytes:
    return f"[{role} node{node} rank {rank}] ".encode()


def lines_of(places: list[tuple[str, int, int]], *, skip: int = 0, bare: bool = False) -> bytes:
    """What `logs` shows of these ranks: file by file, as one poll brings them."""
    lines = [(place, line) for place in places for line in SAYS[place].splitlines(True)[skip:]]
    return b"".join((b"" if bare else prefix(*place)) + line for place, line in lines)


@pytest.fixture
def ferry(ferry: Ferry) -> Ferry:
    """With an ended job `j` whose logs lie by role and node."""
    now = datetime.now(timezone.utc).timestamp()
    files = {"prepare.log": b"pip\n"}
    for role, node, rank in RANKS:
        folder = f"{role}/node{node}"
        said = SAYS[role, node, rank]
        files[f"{folder}/rank_{rank}.log"] = said
        files[f"{folder}/launcher.log"] = b"torchrun\n"
        rows = [[now - ago, 1e6 - ago, {f"rank_{rank}.log": size}] for ago, size in ((3600, len(said) - 7), (30, 99))]
        files[f"{folder}/times.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    ended_job(ferry, files)
    return ferry


def shown(ferry: Ferry, *words: str) -> tuple[bytes, bytes]:
    done = logs(ferry, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_all_are_shown_each_line_with_whose_it_is(ferry):
    assert shown(ferry) == (lines_of(RANKS), b"pip\n")


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (("--role", "server"), RANKS[:3]),
        (("--role", "trainer"), RANKS[3:]),
        (("--node", "1"), [RANKS[2], RANKS[4]]),
        (("--role", "server", "--node", "0"), RANKS[:2]),
        (("--node", "1", "--rank", "0"), [RANKS[2], RANKS[4]]),
        (("--rank", "0"), [RANKS[0], *RANKS[2:]]),
    ],
)
def test_role_node_and_rank_combine(ferry, words, places):
    assert shown(ferry, *words) == (lines_of(places), b"" if "--rank" in words else b"pip\n")


@pytest.mark.parametrize("words", [("--rank", "1"), ("--role", "trainer", "--node", "1", "--rank", "0")])
def test_one_rank_alone_is_bare(ferry, words):
    (place,) = [RANKS[1]] if words == ("--rank", "1") else [RANKS[4]]
    assert shown(ferry, *words) == (lines_of([place], bare=True), b"")


def test_launchers_say_whose_they_are(ferry):
    out, err = shown(ferry, "--launcher", "--role", "server")
    assert out == lines_of(RANKS[:3])
    assert err == b"pip\n[server node0 launcher] torchrun\n[server node1 launcher] torchrun\n"


def test_tail_since_and_grep_are_of_each_rank(ferry):
    assert shown(ferry, "--tail", "1", "--role", "trainer")[0] == lines_of(RANKS[3:], skip=1)
    assert shown(ferry, "--since", "10m", "--node", "0", "--role", "trainer")[0] == lines_of([RANKS[3]], skip=1)
    assert shown(ferry, "--grep", "^server . 0")[0] == b"".join(
        prefix(*place) + SAYS[place].splitlines(True)[0] for place in (RANKS[0], RANKS[2])
    )


def test_raw_is_one_ranks_bytes_and_says_which_there_are(ferry):
    refused = logs(ferry, "--raw")
    assert refused.returncode == 2 and b"--raw gives the bytes of one rank, and j has 5\n" in refused.stderr
    assert b"hint: add --role, --node or --rank: server node 0 rank 0 to 1, server node 1 rank 0" in refused.stderr
    assert shown(ferry, "--raw", "--role", "server", "--node", "1") == (SAYS[RANKS[2]], b"")
    assert shown(ferry, "--raw", "--rank", "1") == (SAYS[RANKS[1]], b"")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--role", "judge"), b"j has no role judge, only server, trainer"),
        (("--node", "2"), b"j has no node 2: it runs on 0 to 1"),
        (("--role", "trainer", "--rank", "1"), b"role trainer of j has no rank 1, only 0"),
        (("--role", "server", "--node", "1", "--rank", "1"), b"role server of j on node 1 has no rank 1, only 0"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(ferry, words, says):
    refused = logs(ferry, *words)
    assert refused.returncode == 2 and says in refused.stderr and b"Traceback" not in refused.stderr


def test_role_of_a_job_with_one_group_is_its_plans(ferry):
    ran = ferry.run("run", *ferry.where(), "--name", "one", "--no-pull", "--", "sh", "-c", "echo up")
    assert ran.returncode == 0, ran.stderr
    (job_id,) = [i for i in ferry.job_ids() if i.startswith("one")]
    words = ("logs", job_id, *ferry.where(), "--role")
    assert ferry.run(*words, "program", "--node", "0").stdout == b"up\n"
    refused = ferry.run(*words, "server")
    assert refused.returncode == 2 and f"{job_id} has no role server, only program".encode() in refused.stderr


def test_dropped_part_is_said_with_whose_it_is(ferry):
    folder = ferry.root / "jobs/j/logs/attempt_1/server/node1"
    (folder / "dropped.json").write_text(json.dumps({"rank_0.log": 13, "log_max_bytes": 2_000_000}))
    out, err = shown(ferry, "--role", "server", "--node", "1", "--rank", "0")
    assert out == SAYS[RANKS[2]][13:]
    assert err == b"[server node1 rank 0: 13 B of this log were dropped on the host, --log-max 2.0 MB]\n"


def test_status_lists_the_groups(ferry):
    done = ferry.run("status", "j", *ferry.where(), "--json")
    processes = json.loads(done.stdout)["processes"]
    assert [(g["role"], g["node"], g["ranks"]) for g in processes] == [
        ("server", 0, [0, 1]),
        ("server", 1, [0]),
        ("trainer", 0, [0]),
        ("trainer", 1, [0]),
    ]


def test_pull_brings_every_log_into_its_folder_and_tops_it_up(ferry, tmp_path):
    def logs_below(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.log")}

    there, here = ferry.root / "jobs/j/logs", tmp_path / "home"
    pull(Host(None, str(ferry.root)), "j", target=here)
    assert logs_below(here / "logs") == logs_below(there) and len(logs_below(there)) == 10
    assert not list(here.rglob("times.jsonl"))
    with (there / "attempt_1/server/node1/rank_0.log").open("ab") as f:
        f.write(b"more\n")
    again = pull(Host(None, str(ferry.root)), "j", target=here)
    assert (again.fetched_files, again.fetched_bytes) == (1, 5) and logs_below(here / "logs") == logs_below(there)


# --- the view ---------------------------------------------------------------------------------------------------------


def feed(view: LogView, *chunks: tuple[str, bytes]) -> None:
    for file, data in chunks:
        view.feed(file, 0, data)


def test_groups_of_one_attempt_go_on_side_by_side_and_the_next_attempt_ends_their_lines():
    view, out, err = make_view()
    feed(view, ("server/rank_0.log", b"half"), ("trainer/rank_0.log", b"a\n"), ("attempt_2/trainer/rank_0.log", b"b\n"))
    assert out.getvalue() == b"[trainer rank 0] a\n[server rank 0] half\n[trainer rank 0] b\n"
    assert err.getvalue() == b""
