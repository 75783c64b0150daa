"""A log followed over connections that break, by clients that are killed, stopped and starved."""

from __future__ import annotations

import io
import os
import random
import secrets
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.job.judge import judge
from deployer.agent.job.stop import request_stop
from deployer.connection.host import Host
from deployer.errors import HostError
from deployer.launch.follow import Watcher, follow_to_end
from deployer.launch.logview import LogView
from tests.support.cutproxy import CutProxy
from tests.support.ferry import Ferry
from tests.support.jobs import end_of, log_of, make_job, make_plan, python, start, wait_for
from tests.support.limits import HANG_S, PATIENCE
from tests.support.sshd import ALIAS, SshServer, start_sshd

SEED = 1729
both_ways = pytest.mark.parametrize("way", ["fabric", "openssh"])
ID = f"followed-{secrets.token_hex(4)}"
"""Not that of a job of another test: a job's processes are known by its id."""


def start_job(ferry: Ferry, code: str, *args: str) -> Job:
    """A job on the host that nobody follows yet."""
    plan = make_plan(python(code, *args))
    return start(make_job(ferry.root, ID, plan), plan)


def end_job(job: Job) -> None:
    request_stop(job, 0)
    end_of(job)


# --- bytes over broken connections ------------------------------------------------------------------------------------

MIXED = """
import os, random, sys, time
rng, left = random.Random(int(sys.argv[1])), int(sys.argv[2])
while left > 0:
    kind = rng.randrange(4)
    data = (rng.randbytes(rng.randrange(40_000)) if kind == 0 else b"step %d\\n" % left * rng.randrange(400)
            if kind == 1 else b"\\r%3d%%" % rng.randrange(100) * rng.randrange(2_000) if kind == 2 else
            "\\u00fcml\\u00e4ut \\u2713\\n".encode()[: rng.randrange(14)])
    os.write(1, data)
    left -= len(data)
"""


@both_ways
@pytest.mark.parametrize(
    ("size", "cuts", "largest"),
    [(5_000_000, 6, 700_000), pytest.param(200_000_000, 100, 2_500_000, marks=pytest.mark.soak)],
    ids=["5MB-6cuts", "200MB-100cuts"],
)
def test_connections_cut_at_random_bytes_raw_log_equals_the_hosts(remote, server, tmp_path, size, cuts, largest, way):
    job = start_job(remote, MIXED, str(SEED), str(size))
    with CutProxy(server, cuts=cuts, largest=largest, seed=SEED) as proxy:
        remote.env["TORCHFERRY_SSH_CONFIG"] = str(proxy.client_config(tmp_path))
        # the first connection may be cut before anything is known: then a person tries again
        done = wait_for(
            lambda: (d := logs_of(remote, "--raw", "-f", "--transport", way)).returncode not in (75, 125) and d,
            timeout_s=2 * HANG_S,
        )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == (Path(job.logs(1)) / "rank_0.log").read_bytes()
    assert proxy.made == cuts and b"trying again" in done.stderr and b"connected again" in done.stderr


def logs_of(ferry: Ferry, *words: str) -> subprocess.CompletedProcess[bytes]:
    return ferry.run("logs", ID, *ferry.where(), *words, timeout_s=2 * HANG_S)


def test_pattern_over_cut_connections_gives_each_matching_line_once(remote, server, tmp_path):
    start_job(remote, "for i in range(200_000): print('line', i, 'x' * (i % 7 == 0) * 20)")
    with CutProxy(server, cuts=3, largest=300_000, seed=SEED) as proxy:
        remote.env["TORCHFERRY_SSH_CONFIG"] = str(proxy.client_config(tmp_path))
        done = wait_for(lambda: (d := logs_of(remote, "--grep", "x{20}$")).returncode == 0 and d)
    assert done.stdout == b"".join(b"line %d %s\n" % (i, b"x" * 20) for i in range(0, 200_000, 7))


# --- giving up, detaching, clients that vanish ------------------------------------------------------------------------

TICKING = "import itertools, time\nfor i in itertools.count(): print('tick', i); time.sleep(0.05)"


@pytest.mark.parametrize("how", ["run", "logs"])
def test_lost_network_three_lines_and_the_job_runs_on(ferry, tmp_path, how):
    (ferry.project / "tick.py").write_text(TICKING)
    with start_sshd(tmp_path) as server:
        ferry.ssh, ferry.env["TORCHFERRY_SSH_CONFIG"] = ALIAS, str(server.client_config_path)
        if how == "run":
            client = ferry.start("run", *ferry.where(), "--give-up", "1s", "--", "python", "tick.py")
        else:
            start_job(ferry, TICKING)
            client = ferry.start("logs", ID, *ferry.where(), "--give-up", "1s")
        assert [client.stdout.readline() for _ in range(20)][-1] == b"tick 19\n"
    _, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 75
    job = Job(str(ferry.job()))
    said = err.decode().splitlines()
    assert "trying again" in said[-4]
    assert said[-3].startswith("gave up following: ") and "refuses connections" in said[-3]
    assert said[-2].startswith(f"{job.id} was running ") and "goes on without this client" in said[-2]
    assert f"logs {job.id} -f comes back" in said[-1] and f"stop {job.id} stops it" in said[-1]
    assert judge(job).state == "running"
    end_job(job)


def test_job_that_the_host_no_longer_knows_after_a_cut_is_lost(ferry):
    job, host, links = start_job(ferry, TICKING), Host(None, str(ferry.root)), []

    def connect(**request):
        links.append(host.connect(**request))
        return links[-1]

    class Cut(Watcher):
        def heard(self) -> None:
            if not Path(job.path).exists():
                return  # what was on its way at the cut
            os.kill(links[0].hello["pid"], signal.SIGKILL)
            end_job(job)
            shutil.rmtree(job.path)

    view = LogView(io.BytesIO(), io.BytesIO(), terminal=False)
    with pytest.raises(HostError, match=f"{ID} is lost: no job {ID} on this host"):
        follow_to_end(connect, ID, view=view, watcher=Cut())


@pytest.mark.parametrize("tries", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_ctrl_c_at_random_times_leaves_the_job_alone(ferry, tries):
    job = start_job(ferry, TICKING)
    rng = random.Random(SEED)
    for _ in range(tries):
        client = ferry.start("logs", ID, *ferry.where())
        with pytest.raises(subprocess.TimeoutExpired):  # a moment of any kind, not one that is waited for
            client.wait(rng.uniform(0.05, 0.9))
        client.send_signal(signal.SIGINT)
        out, err = client.communicate(timeout=HANG_S)
        in_python_itself = client.returncode == 1 and b"init_import_site" in err  # before any line of ours
        assert client.returncode in (75, 130, -signal.SIGINT) or in_python_itself, err.decode()
        assert client.returncode != 75 or f"{ID} is running; it goes on without this client" in err.decode()
        assert out == b"" or out.startswith(b"tick 0\n")
        assert judge(job).state == "running"
    assert "Traceback" not in log_of(job)
    end_job(job)


def descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(child) for child in task.read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def agents(server: SshServer) -> list[int]:
    """What runs for the server's sessions, without the sessions themselves: those of a silent client stay open."""
    commands = {pid: Path(f"/proc/{pid}/comm") for pid in descendants(server.process.pid)}
    return [pid for pid, command in commands.items() if command.exists() and "sshd" not in command.read_text()]


@both_ways
@pytest.mark.parametrize("clients", [6, pytest.param(50, marks=pytest.mark.soak)])
def test_clients_killed_while_following_leave_no_agent_behind(remote, server, clients, way):
    job = start_job(remote, TICKING)
    for first in range(0, clients, 6):
        words = ("logs", ID, *remote.where(), "--transport", way)
        batch = [remote.start(*words) for _ in range(min(6, clients - first))]
        for client in batch:
            assert client.stdout.readline() == b"tick 0\n"
            client.kill()
            client.communicate()
    wait_for(lambda: not descendants(server.process.pid))
    assert judge(job).state == "running"
    end_job(job)


@pytest.mark.soak
def test_client_that_is_frozen_holds_no_agent_for_longer_than_a_minute(remote, server):
    job = start_job(remote, TICKING)
    client = remote.start("logs", ID, *remote.where())
    client.stdout.readline()
    client.send_signal(signal.SIGSTOP)
    wait_for(lambda: not agents(server), timeout_s=60 * PATIENCE)
    client.send_signal(signal.SIGCONT)  # and it comes back where it was
    lines = [client.stdout.readline() for _ in range(2000)]
    assert lines == [b"tick %d\n" % i for i in range(1, 2001)]
    client.kill()
    client.communicate()
    end_job(job)


def test_detached_job_holds_no_session_open_also_not_by_its_children(remote, server):
    program = ("sh", "-c", "sleep 1000 & sleep 1000")
    done = remote.run("run", *remote.where(), "--detach", "--json", "--", *program)
    assert done.returncode == 0, done.stderr.decode()
    wait_for(lambda: not descendants(server.process.pid))
    job = Job(str(remote.job()))
    wait_for(lambda: judge(job).state == "running")
    end_job(job)


def test_what_waits_on_stdin_is_left_for_who_comes_next(remote):
    start_job(remote, "print('out')")
    shell = '"$@"; cat'
    words = remote.argv("logs", ID, *remote.where(), "-f")
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *words],
        cwd=remote.project,
        env=remote.environment(),
        input=b"mine",
        capture_output=True,
    )
    assert done.stdout == b"out\nmine"


# --- what comes, and when ---------------------------------------------------------------------------------------------


def test_printed_line_is_on_the_screen_within_two_seconds_without_flush(remote):
    (remote.project / "now.py").write_text(
        "import os, time\nfor n in range(3):\n    print(time.time())\n"
        "    while not os.path.exists(f'seen{n}'): time.sleep(0.02)"
    )
    client = remote.start("run", *remote.where(), "--no-pull", "--", "python", "now.py")
    after_s = []
    for n in range(3):
        after_s.append(time.time() - float(client.stdout.readline()))
        (remote.job() / "code" / f"seen{n}").touch()
    assert min(after_s) < 2 * PATIENCE, after_s  # the least of three: a busy machine may take longer once
    client.communicate(timeout=HANG_S)


def test_many_lines_at_once_come_from_the_first_to_the_last(remote):
    (remote.project / "many.py").write_text("import sys\nsys.stdout.write(''.join(f'{i}\\n' for i in range(100_000)))")
    done = remote.run("run", *remote.where(), "--no-pull", "--", "python", "many.py")
    assert done.stdout == b"".join(b"%d\n" % i for i in range(100_000))


def test_tail_then_follow_shows_each_line_once(ferry):
    code = (
        "import os, sys, time\nfor i in range(20): print(i)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
    )
    job = start_job(ferry, code + "for i in range(20, 40): print(i)", str(ferry.project / "go"))
    wait_for(lambda: log_of(job).endswith("19\n"))
    client = ferry.start("logs", ID, *ferry.where(), "--tail", "5", "-f")
    first = client.stdout.readline()
    (ferry.project / "go").touch()
    out, _ = client.communicate(timeout=HANG_S)
    assert (first + out).split() == [b"%d" % i for i in range(15, 40)] and client.returncode == 0


def test_bar_of_ten_thousand_steps_off_a_terminal_is_a_line_a_second_at_most(ferry):
    bar = "import time\nfor i in range(10_000):\n    print(end='\\r%5d/10000' % (i + 1)); time.sleep(0.0002)\nprint()"
    begun = time.monotonic()
    job = start_job(ferry, bar)
    done = ferry.run("logs", ID, *ferry.where(), "-f")
    lines = done.stdout.splitlines()
    assert lines[-1] == b"10000/10000" and len(lines) <= time.monotonic() - begun + 2
    assert ferry.run("logs", ID, *ferry.where(), "--raw").stdout == (Path(job.logs(1)) / "rank_0.log").read_bytes()


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_mib(pid: int | str) -> int:
    """The most memory that a process has held so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) >> 10


def shown_with_bounded_memory(ferry: Ferry, *words: str) -> int:
    """Bytes that `logs` writes, counted as they come; fails when the client ever holds 100 MB."""
    client, count = ferry.start("logs", ID, *ferry.where(), *words), 0
    errors: list[bytes] = []
    drain = threading.Thread(target=lambda: errors.extend(iter(lambda: client.stderr.read(1 << 16), b"")))
    drain.start()
    peak = 0
    while data := os.read(client.stdout.fileno(), 1 << 20):
        count += len(data)
        try:
            peak = max(peak, peak_mib(client.pid))
        except (OSError, IndexError):  # it has ended
            pass
    drain.join()
    assert client.wait() == 0, b"".join(errors).decode()
    assert 0 < peak < 100
    return count


@pytest.fixture
def huge_line(ferry: Ferry) -> Ferry:
    job = start_job(ferry, "import os\nfor _ in range(100): os.write(1, b'x' * 1_000_000)\nprint('end')")
    assert end_of(job).state == "succeeded"
    return ferry


@pytest.mark.parametrize(
    ("words", "shown"),
    [((), 100_000_004), (("--raw",), 100_000_004), (("--grep", "x"), 262_145), (("--tail", "1"), 1 << 20)],
)
def test_line_of_100_mb_needs_little_memory_here(huge_line, words, shown):
    assert abs(shown_with_bounded_memory(huge_line, *words) - shown) <= 1


def test_line_of_100_mb_needs_little_memory_on_the_host(huge_line):
    for grep in (None, "x"):
        with Host(None, str(huge_line.root)).connect(request={"op": "follow", "job": ID, "grep": grep}) as link:
            for name, _, _ in link.first.events():
                if name == "status":
                    assert peak_mib(link.hello["pid"]) < 50


@pytest.mark.soak
def test_log_of_1_gb_followed_with_little_memory(ferry):
    start_job(ferry, "import os\nfor i in range(10_000): os.write(1, (b'%98d\\n' % i) * 1010)")
    assert shown_with_bounded_memory(ferry, "-f") == 10_000 * 99 * 1010


def test_log_that_is_renamed_and_cut_while_followed_is_shown_with_a_notice_each_and_missed_in_words(ferry):
    code = """
import os, time
log = os.environ["TORCHFERRY_RUN_DIR"] + "/logs/attempt_1/rank_0.log"
print("one", flush=True); time.sleep(0.6)
os.rename(log, log + ".1"); print("two", flush=True); time.sleep(0.6)
os.truncate(log + ".1", 0); print("three", flush=True)
"""
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "python", "-c", code)
    assert (done.returncode, done.stdout) == (0, b"one\ntwo\nthree\n"), done.stderr.decode()
    assert done.stderr.count(b"rank_0.log was renamed to rank_0.log.1 on the host") == 1
    assert done.stderr.count(b"rank_0.log was cut on the host") == 1
    later = ferry.run("logs", ferry.job().name, *ferry.where())
    assert later.stdout == b"three\n" and b"renamed to rank_0.log.1" in later.stderr
    (ferry.job() / "logs" / "attempt_1" / "rank_0.log.1").unlink()
    gone = ferry.run("logs", ferry.job().name, *ferry.where())
    assert gone.stdout == b"" and b"rank_0.log is gone" in gone.stderr


def test_rank_that_has_printed_nothing_is_said_to_have(ferry):
    ferry.run("run", *ferry.where(), "--no-pull", "--", "true")
    assert b"rank 0 has written nothing" in ferry.run("logs", ferry.job().name, *ferry.where()).stderr
