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

from deployer import render
from deployer.agent.tree import dump_entries
from deployer.errors import UsageError
from deployer.follow import Watcher
from deployer.host import Host
from deployer.launch import launch_and_follow
from deployer.plan import Command, plan_to_json
from deployer.prepare import Options, Prepared, prepare, read_config, requirements
from tests.ferry import REPO, Ferry
from tests.jobs import wait_for
from tests.limits import HANG_S
from tests.pythons import make_wheel
from tests.smi import fake_smi
from trainer.schema import Config, OptimConfig, RunConfig


def write(ferry: Ferry, name: str, text: str) -> None:
    (ferry.project / name).write_text(text)


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
    write(ferry, "show.py", "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['A'], os.environ['S']]))")
    nasty = "a b'\"$(touch pwned)`x`\nü\\"
    ferry.env["S"] = "secret-canary"
    done = ferry.run(
        "run", *ferry.where(), "--env", f"A={nasty}", "--secret", "S", "--", "python", "show.py", nasty, ""
    )
    assert json.loads(done.stdout) == [[nasty, ""], nasty, "secret-canary"]
    held = [p for p in ferry.root.rglob("*") if p.is_file() and b"secret-canary" in p.read_bytes()]
    assert [p.name for p in held] == ["rank_0.log"]  # where the program itself printed it


def test_large_arguments_arrive_whole(ferry):
    write(ferry, "size.py", "import os, sys; print(len(sys.argv[1]), len(os.environ['BIG']))")
    done = ferry.run("run", *ferry.where(), "--env", f"BIG={'y' * 100_000}", "--", "python", "size.py", "x" * 100_000)
    assert done.stdout == b"100000 100000\n", done.stderr.decode()


def test_deleted_file_is_gone_in_the_next_deploy_and_kept_in_the_former_job(ferry):
    write(ferry, "old.py", "print('old')")
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
    write(ferry, "trainer/__init__.py", "")
    for name in ("ranks.py", "train.py"):
        write(ferry, name, RANKS)
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
    filled = [_fill(text, {**shown["slots"], "job": str(ferry.job())}) for text in plan["argv"]]
    assert ranks[0]["launcher"] == filled
    for name, text in plan["env"].items():
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
    write(
        ferry,
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
    write(ferry, "slow.py", "import time\nfor i in range(10_000): print('tick', i, flush=True); time.sleep(0.1)\n")
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
    write(
        ferry,
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
    write(ferry, "slow.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    client = ferry.start("run", *ferry.where(), "--", "python", "slow.py")
    assert client.stdout.readline() == b"up\n"
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 75 and b"deploy.py logs" in err and b"Traceback" not in err
    assert json.loads(ferry.run("status", ferry.job_ids()[0], "--json").stdout)["state"] == "running"
    ferry.run("stop", ferry.job_ids()[0], "--grace", "1")


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_closed_by_the_caller_change_nothing(ferry, closed):
    words = ferry.argv("run", *ferry.where(), "--no-pull", "--", "sh", "-c", "exit 4")
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], cwd=ferry.project, env=ferry.environment())
    assert done.returncode == 4


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
    assert started == {"id": ferry.job_ids()[0], "where": "this machine", "folder": str(ferry.job())}
    followed = ferry.run("logs", started["id"], "-f")
    assert (followed.stdout, followed.returncode) == (b"late\n", 4)


def test_exec_runs_in_the_code_folder_with_exact_arguments_and_input(ferry):
    write(ferry, "here.txt", "x")
    ferry.run("run", *ferry.where(), "--", "true")
    job_id = ferry.job_ids()[0]
    done = ferry.run("exec", job_id, "--", "sh", "-c", 'ls; echo "$1"; cat; exit 5', "sh", "a  b'", stdin=b"in\x00put")
    assert (done.stdout, done.returncode) == (b"here.txt\na  b'\nin\x00put", 5)


def test_includes_named_twice_nested_linked_or_partly_tracked_all_arrive(ferry, tmp_path):
    outside, data = tmp_path / "outside", ferry.project / "data"
    for folder in (outside, data / "sub"):
        folder.mkdir(parents=True)
    write(ferry, ".gitignore", "data/*\n!data/tracked\n")
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
    options = Options(command=("sh", "-c", "echo once >> $TORCHFERRY_RUN_DIR/count"), root=str(ferry.root))
    config, command = read_config(options)
    prepared = prepare(config, command, options=options, project=ferry.project)
    for _ in range(2):
        launch_prepared(ferry, prepared)
    status = wait_for(lambda: json.loads((ferry.job() / "status.json").read_text())["state"] == "succeeded")
    assert status and (ferry.job() / "count").read_text() == "once\n"


def test_connection_that_breaks_after_the_acknowledgement_of_a_detached_job_is_no_error(ferry):
    options = Options(command=("sh", "-c", "echo once >> $TORCHFERRY_RUN_DIR/count"), root=str(ferry.root))
    config, command = read_config(options)
    prepared = prepare(config, command, options=options, project=ferry.project)
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
    options = Options(command=("true",), root=str(ferry.root))
    config, command = read_config(options)
    prepared = prepare(config, command, options=options, project=ferry.project)
    change(ferry.project / "a")
    begun = time.monotonic()
    with pytest.raises(UsageError, match=r"cannot be read any more|not the 1 bytes"):
        launch_prepared(ferry, prepared)
    assert time.monotonic() - begun < 60
    assert ferry.job_ids() == []


def test_client_gone_in_the_midst_of_a_file_leaves_nothing_behind(ferry):
    (ferry.project / "a").write_bytes(bytes(2_000_000))
    options = Options(command=("true",), root=str(ferry.root))
    config, command = read_config(options)
    prepared = prepare(config, command, options=options, project=ferry.project)
    request = {"op": "launch", "plan": plan_to_json(prepared.plan), "git": None, "follow": False}
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
    write(ferry, "results", "a file in the way")
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


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("status", "nope"), 2, "no job nope"),
        (("stop", "nope"), 2, "no job nope"),
        (("logs", "../x"), 2, "not a job id"),
        (("run",), 2, "nothing to run"),
        (("missing.py",), 2, "missing.py"),
        (("run", "--pull-max", "lots", "--", "true"), 2, "is not a size"),
        (("run", "--env", "1A=x", "--", "true"), 2, "not of the form"),
        (("run", "--secret", "NOT_SET_ANYWHERE", "--", "true"), 2, "is not set"),
        (("run", "--gpus", "0,0", "--", "true"), 2, "gpu_ranks"),
        (("run", "--remote-root", "/proc/nowhere", "--", "true"), 125, "remote root"),
        (("run", "--include", "../x", "--", "true"), 2, "not below the project"),
        (("run", "--wheels", "/nope", "--", "true"), 2, "--wheels /nope is no folder"),
        (("run", "--remote-root", "tf", "--", "true"), 2, "relative path"),
        (("run", "--json", "--", "true"), 2, "--json goes with"),
        (("run", "--gpus", "0-3", "--", "true"), 2, "--gpus 0,1,2,3"),
        (("run", "--", "python", "-u", "trian.py"), 2, "did you mean train.py?"),
        (("run", "--", "train.py", "--lr", "1"), 2, "-- python train.py --lr 1"),
        (("run", "--torchrun", "--gpus", "0", "--", "torchrun", "train.py"), 2, "--torchrun --gpus 0,1 -- train.py"),
        (("run", "--torchrun", "--gpus", "0", "--", "gone.py"), 2, "gone.py is not in the code tree"),
        (("stats", "nope"), 2, "did you mean status?"),
        (("kill", "nope"), 2, "kill is neither a command nor a config file\nhint: commands: doctor, exec, gc, gpus,"),
        (("run", "python", "train.py"), 2, "deploy.py run -- python train.py"),
        (("run", "python", "-u", "train.py"), 2, "deploy.py run -- PROGRAM"),
        (("doctor", "gpu"), 2, "doctor takes options only, not 'gpu'\nhint: did you mean --ssh gpu?"),
        (("exec", "nope", "ls", "-l"), 2, "deploy.py exec nope -- ls -l"),
    ],
)
def test_bad_input_one_clear_error_and_nothing_started(ferry, words, code, says):
    write(ferry, "train.py", "")
    done = ferry.run(*words)
    assert done.returncode == code
    assert says in done.stderr.decode() and b"Traceback" not in done.stderr
    assert ferry.job_ids() == []


def test_id_that_matches_two_jobs_names_both(ferry):
    for _ in range(2):
        ferry.run("run", *ferry.where(), "--name", "twin", "--", "true")
    done = ferry.run("status", "twin")
    assert done.returncode == 2 and all(i.encode() in done.stderr for i in ferry.job_ids())


@pytest.mark.parametrize("where", ["by this client's record", "by the host"])
def test_id_is_known_by_its_beginning_or_its_end_in_any_case(ferry, where):
    ferry.run("run", *ferry.where(), "--name", "Lora", "--no-pull", "--", "true")
    (job_id,) = ferry.job_ids()
    place = ferry.where() if where == "by the host" else []
    for typed in ("Lora", job_id[-4:].upper()):
        done = ferry.run("status", typed, *place)
        assert done.stdout.decode().split()[0] == job_id, done.stderr
        assert f"logs {job_id}".encode() in done.stderr and b"status" not in done.stderr


def test_missing_gpu_refused_with_what_to_do(ferry):
    done = ferry.run(str(REPO / "configs" / "01_debug_sft.py"), *ferry.where())
    assert done.returncode == 125
    assert b"target.device=cpu" in done.stderr


def test_status_of_a_failed_job_rounds_its_metrics_and_says_what_to_do(ferry):
    metrics = '{"step": 123456, "loss": 0.123456789, "tokens_per_s": 12345.678}'
    code = f"echo '{metrics}' > $TORCHFERRY_RUN_DIR/metrics.jsonl; exit 5"
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "sh", "-c", code)
    assert b"failed: rank 0 exited with code 5\n" in done.stderr
    status = ferry.run("status", ferry.job_ids()[0])
    shown = dict(line.rsplit(None, 1) for line in status.stdout.decode().splitlines() if line.startswith("last"))
    assert shown == {"last step": "123456", "last loss": "0.1235", "last tokens_per_s": "12,346"}
    job_id = ferry.job_ids()[0].encode()
    assert b"logs %s --rank 0" % job_id in status.stderr and b"exec %s -- ls -l" % job_id in status.stderr


@pytest.mark.parametrize("line", ["torch", "torch==2.11.0+cpu  # ours", "torch[x]>=2"])
def test_torch_is_asked_for_once_whoever_names_it(tmp_path, line):
    command = Command(("train.py",), torchrun=True)
    (tmp_path / "requirements.txt").write_text("torch-geometric\ntorch.fx\n")
    assert requirements(Config(), command, project=tmp_path)[0] == "torch>=2.0"
    (tmp_path / "requirements.txt").write_text(line + "\n")
    assert requirements(Config(), command, project=tmp_path) == (line.split("  #")[0],)


def test_trainers_environment_has_what_the_config_asks_for(tmp_path):
    config = Config(optim=OptimConfig(optimizer="adamw8bit"), run=RunConfig(trackers=["tensorboard"]))
    assert requirements(config, None, project=tmp_path)[-2:] == ("torchao>=0.14", "tensorboard")


def test_data_outside_the_project_is_said_to_stay_behind(ferry):
    config = str(REPO / "configs" / "01_debug_sft.py")
    done = ferry.run(config, "--ssh", "nobody@127.0.0.1:1", "--dry-run", "data.train=/mnt/rows.jsonl")
    assert (
        b"warning: /mnt/rows.jsonl is not part of the project and does not travel: the host must have it" in done.stderr
    )


def test_hints_name_the_program_as_it_was_called(ferry):
    checkout = ferry.run("logs", "nope")
    assert f"hint: {sys.executable} {REPO / 'deploy.py'} ps lists".encode() in checkout.stderr
    words = [sys.executable, "-c", "from deployer.cli import main; main()", "logs", "nope"]
    installed = subprocess.run(words, env=ferry.environment(), capture_output=True)
    assert b"hint: torchferry ps lists" in installed.stderr


def test_surprising_trees_are_not_sent_without_a_yes(ferry):
    home = {**ferry.environment(), "HOME": str(ferry.project)}
    words = ferry.argv("run", *ferry.where(), "--no-pull", "--", "true")
    asked = subprocess.run(words, cwd=ferry.project, env=home, stdin=subprocess.DEVNULL, capture_output=True)
    assert asked.returncode == 2 and b"everything in it would be sent" in asked.stderr
    with (ferry.project / "big").open("wb") as f:
        f.truncate(101_000_000)
    asked = ferry.run("run", *ferry.where(), "--no-pull", "--", "true")
    assert asked.returncode == 2 and b"big (101 MB)" in asked.stderr and b"--yes" in asked.stderr
    assert ferry.job_ids() == []


def test_wheels_sent_along_become_the_environment_of_a_host_that_lacks_them(ferry, tmp_path):
    make_wheel(tmp_path / "wheels", "ferry_lone", "1.0")
    write(ferry, "requirements.txt", "ferry-lone==1.0\n")
    words = ("run", *ferry.where(), "--no-pull", "--wheels", str(tmp_path / "wheels"))
    program = ("--", "python", "-c", "import ferry_lone; print(ferry_lone.version)")
    shown = ferry.run(*words, "--dry-run=remote", *program).stdout.decode()
    assert "# $PYTHON  to be built there: " in shown and "lacks ferry-lone==1.0 (not installed)" in shown
    assert shown.splitlines()[-1].split(" -c ")[0].endswith(" $PYTHON")
    done = ferry.run(*words, *program)
    assert done.stdout == b"1.0\n", done.stderr.decode()


def test_launch_line_names_three_rules_that_left_out_most_and_counts_the_others(ferry):
    for number, rule in enumerate(("a", "b", "c", "d", "e")):
        (ferry.project / rule).mkdir()
        for file in range(9 - number):
            write(ferry, f"{rule}/{file}", "")
    write(ferry, ".gitignore", "a/\nb/\nc/\nd/\ne/\n")
    shown = ferry.run("run", "--dry-run", "--", "true").stdout
    assert b"; left out a/, b/, c/ and 2 more rules (35 files)\n" in shown


def test_dry_run_without_the_host_says_that_its_interpreter_is_not_known(ferry):
    write(ferry, "a.py", "")
    shown = ferry.run("run", "--dry-run", "--", "python", "a.py").stdout.decode()
    assert "Here python3 stands for it, --dry-run=remote asks the host\nPYTHON=python3\n" in shown
    named = ferry.run("run", "--dry-run", "--python", "/opt/my env/python", "--", "python", "a.py").stdout.decode()
    assert "PYTHON='/opt/my env/python'\n" in named and "stands for it" not in named


def test_single_file_is_counted_as_one(ferry):
    write(ferry, "only.py", "print('done')")
    words = ("--no-pull", "--", "python", "only.py")
    assert "# files    1 file, " in ferry.run("run", "--dry-run", *words).stdout.decode()
    assert ": 1 file, " in ferry.run("run", *ferry.where(), *words).stderr.decode()
    assert render.counted(1200, "file") == "1,200 files"
