"""The whole way on this machine: real agent, real supervisor, real torchrun, through the command line."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from deployer.agent.host.typed import to_json
from deployer.agent.store.tree import dump_entries
from deployer.connection.host import Host
from deployer.errors import UsageError
from deployer.launch.follow import Watcher
from deployer.launch.start import launch_and_follow
from deployer.plan.options import Options, read_config
from deployer.plan.prepare import Prepared, prepare
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S, PATIENCE
from tests.support.smi import fake_smi


def test_program_output_exit_code_and_results_come_home(ferry):
    done = ferry.run("run", *ferry.where(), "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.stdout == b"out\nerr\n"
    assert b"logs" in done.stderr and b" pull " not in done.stderr  # it has just done that
    assert done.returncode == 7
    (results,) = (ferry.project / "results").iterdir()
    assert json.loads((results / "status.json").read_text())["state"] == "failed"
    assert (results / "logs" / "attempt_1" / "rank_0.log").read_bytes() == b"out\nerr\n"


def test_last_line_without_end_and_code_of_a_signal(ferry):
    done = ferry.run("run", *ferry.where(), "--", "sh", "-c", "printf 'last words'; kill -9 $$")
    assert done.stdout == b"last words\n"
    assert done.returncode == 137


def test_program_gets_the_uncommitted_tree_its_arguments_and_environment_unchanged(ferry):
    ferry.write("show.py", "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['A'], os.environ['S']]))")
    nasty = "a b'\"$(touch pwned)`x`\nü\\"
    ferry.env["S"] = "secret-canary"
    done = ferry.run(
        "run", *ferry.where(), "--env", f"A={nasty}", "--secret", "S", "--", "python", "show.py", nasty, ""
    )
    assert json.loads(done.stdout) == [[nasty, ""], nasty, "secret-canary"]
    held = [p for p in ferry.root.rglob("*") if p.is_file() and b"secret-canary" in p.read_bytes()]
    assert [p.name for p in held] == ["rank_0.log"]  # where the program itself printed it


def test_large_arguments_arrive_whole(ferry):
    ferry.write("size.py", "import os, sys; print(len(sys.argv[1]), len(os.environ['BIG']))")
    done = ferry.run("run", *ferry.where(), "--env", f"BIG={'y' * 100_000}", "--", "python", "size.py", "x" * 100_000)
    assert done.stdout == b"100000 100000\n", done.stderr.decode()


def test_deleted_file_is_gone_in_the_next_deploy_and_kept_in_the_former_job(ferry):
    ferry.write("old.py", "print('old')")
    assert ferry.run("run", *ferry.where(), "--", "python", "-c", "import old").stdout == b"old\n"
    (ferry.project / "old.py").unlink()
    done = ferry.run("run", *ferry.where(), "--", "python", "-c", "import old")
    assert done.returncode == 1 and b"No module named 'old'" in done.stdout
    assert [(ferry.job(i) / "code" / "old.py").exists() for i in ferry.job_ids()].count(True) == 1


FOUR_GPUS = "".join(f"{n}, GPU-{n}, Fake H100, 81559, {9 - n}\n" for n in range(4))
PROGRAM = ("--torchrun", "--gpus", "3,1", "--", "ranks.py", "--a", "b c")
AUTO = ("--torchrun", "--gpus", "auto:2", "--", "ranks.py")  # the two with the least memory in use
CONFIG = (str(REPO / "configs" / "02_debug_sft_fsdp.py"),)


@pytest.mark.parametrize(
    ("words", "devices", "program"),
    [
        (PROGRAM, "3,1", ["ranks.py", "--a", "b c"]),
        (AUTO, "2,3", ["ranks.py"]),
        (CONFIG, "0,1,2,3", ["train.py", "{job}/config.yaml"]),
    ],
    ids=["program", "auto", "config"],
)
def test_dry_run_command_is_what_real_ranks_run(ferry, tmp_path, words, devices, program):
    (ferry.project / "trainer").mkdir()  # a project with a trainer of its own, which shows what it was started with
    ferry.write("trainer/__init__.py", "")
    for name in ("ranks.py", "train.py"):
        ferry.write(name, RANKS)
    ferry.env.update(fake_smi(tmp_path, gpus=FOUR_GPUS))
    options = ["run", *ferry.where(), "--python", sys.executable, "--name", "same"]
    shown = json.loads(ferry.run(*options, "--dry-run=remote", "--json", *words).stdout)
    done = ferry.run(*options, *words)
    assert done.returncode == 0, done.stderr.decode()
    ranks = sorted((json.loads(line.split(b"] ", 1)[1]) for line in done.stdout.splitlines()), key=lambda r: r["rank"])
    assert [r["rank"] for r in ranks] == [str(n) for n in range(len(devices.split(",")))]
    for rank in ranks:
        assert rank["stdin"].startswith(f"{tmp_path}/leases/job-same-")  # so it holds the GPUs as long as it lives
        assert rank["cmdline"] == [sys.executable, "-u", *(w.replace("{job}", str(ferry.job())) for w in program)]
        assert (rank["env"]["CUDA_VISIBLE_DEVICES"], rank["env"]["CUDA_DEVICE_ORDER"]) == (devices, "PCI_BUS_ID")
    assert (
        f"CUDA_VISIBLE_DEVICES={devices} " in shown["command"] and f"--nproc-per-node={len(ranks)}" in shown["command"]
    )
    plan, job_id = shown["plan"], ferry.job_ids()[0]
    (role,) = plan["roles"]
    filled = [_fill(text, {**shown["slots"], "job": str(ferry.job())}) for text in role["argv"]]
    assert ranks[0]["launcher"] == filled
    for name, text in role["env"].items():
        expected = _fill(text, {**shown["slots"], "job": str(ferry.job())})
        assert ranks[1]["env"][name] == expected.replace(plan["job_id"], job_id)


def _fill(text, slots):
    return text if isinstance(text, str) else "".join(p if isinstance(p, str) else slots[p["slot"]] for p in text)


RANKS = """
import json, os
def cmdline(pid):
    return open(f"/proc/{pid}/cmdline", "rb").read().decode().split("\\0")[:-1]
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
wrapper = os.getppid()
env = dict(item.split("=", 1) for item in open("/proc/self/environ").read().split("\\0") if item)
print(json.dumps({"rank": os.environ["RANK"], "cmdline": cmdline(os.getpid()), "env": env,
                  "stdin": os.readlink("/proc/self/fd/0"),
                  "launcher": cmdline(parent(wrapper))}))
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os._exit(3)", 3)], ids=["7", "9", "3"]
)
def test_failing_rank_of_a_torchrun_program_gives_its_code_and_last_lines(ferry, ending, code):
    ferry.write(
        "fail.py",
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    print('rank one is dying', flush=True)\n"
        f"    {ending}\ntime.sleep(1000)\n",
    )
    words = ("--device", "cpu", "--gpus", "0,1", "--torchrun", "--python", sys.executable)
    done = ferry.run("run", *ferry.where(), *words, "--", "fail.py")
    assert done.returncode == code, done.stderr.decode()
    assert b"rank one is dying" in done.stderr.split(b"--- last lines of rank 1")[1]
    assert b"ChildFailedError" not in done.stderr and b"--rank 1" in done.stderr
    logs = ("logs", ferry.job_ids()[0], "--tail", "1")
    assert ferry.run(*logs).stderr == b""
    assert b"====" in ferry.run(*logs, "--launcher").stderr


def test_client_killed_job_goes_on_and_a_new_shell_finds_it(ferry):
    ferry.write("slow.py", "import time\nfor i in range(10_000): print('tick', i, flush=True); time.sleep(0.1)\n")
    client = ferry.start("run", *ferry.where(), "--", "python", "slow.py")
    assert client.stdout.readline() == b"tick 0\n"
    client.send_signal(signal.SIGKILL)
    client.communicate()
    job_id = ferry.job_ids()[0]
    rows = json.loads(ferry.run("ps", "--json").stdout)
    assert [(row["id"], row["state"]) for row in rows if row["id"] == job_id] == [(job_id, "running")]
    follower = ferry.start("logs", job_id[:-2], "-f", "--tail", "1")
    assert follower.stdout.readline().startswith(b"tick")
    stopped = ferry.run("stop", job_id, "--grace", "60")
    assert stopped.returncode == 0 and b"stopped" in stopped.stderr
    assert follower.wait(HANG_S) == 143
    again = ferry.run("stop", job_id)
    assert again.returncode == 0 and b"had ended already: stopped" in again.stderr and b"stopping" not in again.stderr
    assert ferry.run("pull", job_id).returncode == 0
    pulled = ferry.project / "results" / job_id / "logs" / "attempt_1" / "rank_0.log"
    assert pulled.read_bytes() == (ferry.job() / "logs" / "attempt_1" / "rank_0.log").read_bytes()


def test_stop_goes_on_when_the_supervisor_is_killed_meanwhile(ferry):
    ferry.write(
        "slow.py",
        "import signal, time\nsignal.signal(15, lambda *_: print('asked', flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.1)\n",
    )
    client = ferry.start("run", *ferry.where(), "--no-pull", "--", "python", "slow.py")
    assert client.stdout.readline() == b"up\n"
    stop = ferry.start("stop", ferry.job_ids()[0], "--grace", "3")
    assert client.stdout.readline() == b"asked\n"
    os.kill(json.loads((ferry.job() / "status.json").read_text())["supervisor"]["pid"], signal.SIGKILL)
    assert stop.wait(HANG_S) == 0
    client.communicate(timeout=HANG_S)
    assert json.loads((ferry.job() / "status.json").read_text())["state"] == "stopped"


def test_interrupt_detaches_and_says_how_to_come_back(ferry):
    ferry.write("slow.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    client = ferry.start("run", *ferry.where(), "--", "python", "slow.py")
    assert client.stdout.readline() == b"up\n"
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 75 and b"deploy.py logs" in err and b"Traceback" not in err
    assert json.loads(ferry.run("status", ferry.job_ids()[0], "--json").stdout)["state"] == "running"
    ferry.run("stop", ferry.job_ids()[0], "--grace", "1")


@pytest.mark.parametrize("closed", ["<&-", "2</dev/null", "<&- >&- 2>&-"])
def test_streams_closed_by_the_caller_change_nothing(ferry, closed):
    words = ferry.argv("run", *ferry.where(), "--no-pull", "--", "sh", "-c", "exit 4")
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], cwd=ferry.project, env=ferry.environment())
    assert done.returncode == 4


@pytest.mark.parametrize("way", [("--detach", "--json"), ()])
def test_log_that_finds_no_room_here_ends_the_following_alone(ferry, way):
    words = ferry.argv("run", *ferry.where(), *way, "--", "sh", "-c", "echo up; sleep 1000")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(words, cwd=ferry.project, env=ferry.environment(), stdout=full, stderr=subprocess.PIPE)
    (job_id,) = ferry.job_ids()
    assert done.returncode == 75
    told = done.stderr.decode()
    assert "gave up following: No space left on device" in told and "it goes on without this client" in told
    assert ferry.run("stop", job_id, "--grace", "0").returncode == 0


@pytest.mark.parametrize("words", [("--help",), ("ps", "--json"), ("run", "--dry-run", "--", "true")])
def test_answer_that_finds_no_room_is_one_error(ferry, words):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            ferry.argv(*words), cwd=ferry.project, env=ferry.environment(), stdout=full, stderr=subprocess.PIPE
        )
    said = done.stderr.decode().splitlines()
    assert (done.returncode, said[-1]) == (125, "Error: this machine: No space left on device"), said
    assert not any("Exception" in line or "Traceback" in line for line in said)


def test_terminal_that_wants_no_colour_gets_no_escape(ferry):
    words = shlex.join(ferry.argv("status", "nope"))
    env = {**ferry.environment(), "NO_COLOR": "1"}
    done = subprocess.run(
        ["script", "-qec", words, "/dev/null"], env=env, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert b"no job nope" in done.stdout and b"\x1b" not in done.stdout


def test_detach_returns_at_once_and_logs_follow_to_the_end_with_the_code(ferry):
    done = ferry.run("run", *ferry.where(), "--detach", "--json", "--", "sh", "-c", "sleep 1; echo late; exit 4")
    started = json.loads(done.stdout)
    assert (started["id"], started["where"], started["folder"]) == (ferry.job().name, "this machine", str(ferry.job()))
    followed = ferry.run("logs", started["id"], "-f")
    assert (followed.stdout, followed.returncode) == (b"late\n", 4)


def test_exec_runs_in_the_code_folder_with_exact_arguments_and_input(ferry):
    ferry.write("here.txt", "x")
    ferry.run("run", *ferry.where(), "--", "true")
    job_id = ferry.job_ids()[0]
    done = ferry.run("exec", job_id, "--", "sh", "-c", 'ls; echo "$1"; cat; exit 5', "sh", "a  b'", stdin=b"in\x00put")
    assert (done.stdout, done.returncode) == (b"here.txt\na  b'\nin\x00put", 5)


def test_includes_named_twice_nested_linked_or_partly_tracked_all_arrive(ferry, tmp_path):
    outside, data = tmp_path / "outside", ferry.project / "data"
    for folder in (outside, data / "sub"):
        folder.mkdir(parents=True)
    ferry.write(".gitignore", "data/*\n!data/tracked\n")
    for path in (outside / "model", data / "tracked", data / "sub" / "ignored"):
        path.write_text(path.name + "\n")
    (ferry.project / "link").symlink_to(outside)
    includes = [word for path in ("data", "./data/", "data/sub", "link") for word in ("--include", path)]
    shown = ("sh", "-c", "cat data/tracked data/sub/ignored link/model")
    subprocess.run(["git", "init", "-q"], cwd=ferry.project, check=True)
    done = ferry.run("run", *ferry.where(), "--no-pull", *includes, "--", *shown)
    assert done.stdout == b"tracked\nignored\nmodel\n", done.stderr.decode()


def launch_prepared(ferry: Ferry, prepared: Prepared) -> None:
    """Starts the job without following it."""
    launch_and_follow(
        Host(None, str(ferry.root)).connect,
        prepared.plan,
        shipment=prepared.shipment,
        payload={},
        git=None,
        view=None,
        watcher=Watcher(),
    )


def test_launch_of_the_same_plan_twice_is_one_job(ferry):
    options = Options(
        command=("sh", "-c", "echo once >> $TORCHFERRY_RUN_DIR/count"), keys={"target.root": str(ferry.root)}
    )
    prepared = prepare(read_config(options), options=options, project=ferry.project)
    for _ in range(2):
        launch_prepared(ferry, prepared)
    status = wait_for(lambda: json.loads((ferry.job() / "status.json").read_text())["state"] == "succeeded")
    assert status and (ferry.job() / "count").read_text() == "once\n"


def test_connection_that_breaks_after_the_acknowledgement_of_a_detached_job_is_no_error(ferry):
    options = Options(
        command=("sh", "-c", "echo once >> $TORCHFERRY_RUN_DIR/count"), keys={"target.root": str(ferry.root)}
    )
    prepared = prepare(read_config(options), options=options, project=ferry.project)
    links = []

    def connect(**request):
        links.append(Host(None, str(ferry.root)).connect(**request))
        return links[-1]

    class Cut(Watcher):
        def started(self, ack):
            os.kill(links[-1].hello["pid"], signal.SIGKILL)  # it waits for the patch, and so has not said the last word

    git = {"commit": "0" * 40, "branch": "main", "dirty": True, "patch": "a patch"}
    shipment = prepared.shipment
    launch_and_follow(connect, prepared.plan, shipment=shipment, payload={}, git=git, view=None, watcher=Cut())
    wait_for(lambda: (ferry.job() / "count").exists() and (ferry.job() / "count").read_text() == "once\n")
    assert len(links) == 1


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("B")], ids=["gone", "changed"])
def test_file_changed_since_it_was_read_ends_the_upload_at_once(ferry, change):
    for name, size in (("a", 1), ("b", 4 << 20)):
        (ferry.project / name).write_bytes(b"a" * size)
    options = Options(command=("true",), keys={"target.root": str(ferry.root)})
    prepared = prepare(read_config(options), options=options, project=ferry.project)
    change(ferry.project / "a")
    begun = time.monotonic()
    with pytest.raises(UsageError, match=r"cannot be read any more|not the 1 bytes"):
        launch_prepared(ferry, prepared)
    assert time.monotonic() - begun < 25 * PATIENCE  # a client that is told nothing gives up after 35 s
    assert ferry.job_ids() == []


def test_client_gone_in_the_midst_of_a_file_leaves_nothing_behind(ferry):
    (ferry.project / "a").write_bytes(bytes(2_000_000))
    options = Options(command=("true",), keys={"target.root": str(ferry.root)})
    prepared = prepare(read_config(options), options=options, project=ferry.project)
    request = {"op": "launch", "plan": to_json(prepared.plan), "git": None, "follow": False}
    with Host(None, str(ferry.root)).connect(request=request) as link:
        for name, value, _ in link.first.events():
            if name == "need_tree":
                link.first.send_data(zlib.compress(dump_entries(prepared.shipment.trees[value])))
                link.first.end_data()
            elif name == "need_blobs":
                link.first.send_data(b"some of it")
                wait_for(lambda: list((ferry.root / "tmp").iterdir()))
                break
    wait_for(lambda: not list((ferry.root / "tmp").iterdir()))
    assert ferry.job_ids() == []


def test_results_that_cannot_be_written_here_leave_the_jobs_own_code(ferry):
    ferry.write("results", "a file in the way")
    done = ferry.run("run", *ferry.where(), "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert b"cannot write" in done.stderr and b"deploy.py pull" in done.stderr and b"Traceback" not in done.stderr


@pytest.fixture
def small_disk(ferry):
    """The remote root on a file system of 100 MB."""
    ferry.root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", ferry.root], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield ferry.root
    subprocess.run(["umount", "-l", ferry.root], check=True)


@pytest.mark.usefixtures("small_disk")
def test_disk_filled_by_the_jobs_own_output_leaves_its_exit_code(ferry):
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "sh", "-c", "yes | head -c 200000000; exit 9")
    assert done.returncode == 9, done.stderr.decode()
    assert json.loads((ferry.job() / "status.json").read_text())["state"] == "failed"


def test_disk_that_was_full_for_a_while_leaves_an_agent_that_works(ferry, small_disk):
    ferry.run("ps", *ferry.where())
    disk = os.statvfs(small_disk)
    (small_disk / "full").write_bytes(bytes(disk.f_bavail * disk.f_frsize - 12288))  # room for half a module's bytecode
    ferry.run("gc", *ferry.where(), "--yes")
    (small_disk / "full").unlink()
    done = ferry.run("gc", *ferry.where(), "--yes")
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr.decode()


def test_resume_on_a_full_disk_is_refused(ferry, small_disk):
    ferry.run("run", *ferry.where(), "--no-pull", "--", "false")
    (small_disk / "full").write_bytes(bytes(60_000_000))
    done = ferry.run("resume", ferry.job().name, *ferry.where())
    assert done.returncode == 125 and b"is full: 4" in done.stderr, done.stderr.decode()
    assert json.loads((ferry.job() / "status.json").read_text())["attempt"] == 1


def test_tree_that_does_not_fit_on_the_disk_leaves_no_job(ferry, small_disk):
    (ferry.project / "data").write_bytes(bytes(60_000_000))
    done = ferry.run("run", *ferry.where(), "--", "true")  # it fits into the store, and not once more into the job
    assert done.returncode == 125 and b"No space left" in done.stderr
    assert list((small_disk / "jobs").iterdir()) == []


def test_disk_that_fills_while_the_job_runs_is_named_at_its_end_in_status_and_in_json(ferry, small_disk):
    fill = "yes | head -c 200000000 > x; exit 3"
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "sh", "-c", fill)
    job = ferry.job()
    cause = f"({job}) had 0 bytes free when it ended"
    assert done.returncode == 3 and cause in done.stderr.decode(), done.stderr.decode()
    assert b"rank 0 exited with code 3" in done.stderr and b".log" not in done.stderr  # all of them are empty
    (job / "code" / "x").unlink()
    assert cause in ferry.run("status", job.name, *ferry.where()).stdout.decode().replace("\n", "")
    found = json.loads(ferry.run("status", job.name, *ferry.where(), "--json").stdout)
    assert [cause in line for line in found["causes"] + found["attempts"][0]["causes"]] == [True, True]
    assert found["log"] == ""
