"""train.py: what it decides before torch is imported, and whole runs through the real torchrun."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import yaml

from deployer.errors import FerryError
from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from trainer.commands import cli
from trainer.config.load import ConfigError, config_from_dict, load_config
from trainer.failures import diagnose
from trainer.metrics.flops import card_peak_flops
from trainer.metrics.log import Screen, drop_records_after, render_bar, render_duration, render_train
from trainer.schema import Config, RunConfig, TargetConfig
from trainer.start import launch, torchrun
from trainer.start.launch import HostGpus

TWO_GPUS = "0, GPU-11111111\n1, GPU-22222222\n"


def targeting(**target) -> Config:
    return config_from_dict({"target": target})


def run_train(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environ.pop(name, None)
    command = [sys.executable, str(REPO / "train.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=HANG_S)


def test_interrupt_while_torch_is_imported_ends_with_130(tmp_path):
    command = [sys.executable, str(REPO / "train.py"), str(REPO / "configs/01_debug_sft.py")]
    command += ["target.device=cpu", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("run folder")
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130 and "interrupted" in said and "Aborted" not in said


# --- deciding ---------------------------------------------------------------------------------------------------------


def test_output_without_room_is_one_line():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "train.py", "--help"], cwd=REPO, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"Error: train.py: No space left on device\n")


def test_error_that_finds_no_room_keeps_its_exit_code():
    for program in ("train.py", "deploy.py"):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run([sys.executable, program, "no-such.yaml"], cwd=REPO, stderr=full)
        assert done.returncode == 2, program


@pytest.mark.parametrize("words", [("keys", "--json", "zzzqq"), ("inspect", "no-such.yaml", "--json")])
def test_error_of_a_command_with_json_is_json_as_the_deployers_is(words):
    done = run_train(*words)
    told = json.loads(done.stdout)["error"]
    assert done.returncode == told["exit_code"] == 2 and told["message"] in done.stderr
    assert told.keys() == FerryError("").as_json().keys()


def test_folder_of_checkpoints_that_cannot_be_read_is_named_in_one_line(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.symlink_to("checkpoints")
    done = run_train("export", str(tmp_path))
    said = f"Error: train.py: {folder}: Too many levels of symbolic links\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_run_folder_that_cannot_be_locked_is_one_error(tmp_path, rows, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", refuse)  # as on a file system without locks
    with pytest.raises(ConfigError) as caught, cli.holding(tmp_path):
        raise AssertionError("it was taken")
    assert caught.value.render().endswith(f"{tmp_path} cannot be written: it cannot be locked: Operation not supported")


def test_torchrun_argv_names_this_python_and_one_process_for_each_device():
    argv = launch.build_torchrun_argv("/py", "train.py", Path("/r/config.yaml"), processes=3, debug=False)
    assert argv == [
        *["/py", str(REPO / "trainer/start/torchrun.py"), "--standalone", "--nproc-per-node=3", "--max-restarts=0"],
        *["train.py", "/r/config.yaml"],
    ]


def test_environment_shows_the_named_gpus_in_their_order():
    config = targeting(gpu_ranks=[3, 0], env={"NCCL_DEBUG": "INFO"})
    assert launch.build_launch_env(config, {}, cores=8) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "3,0",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4",
        "NCCL_DEBUG": "INFO",
    }


def test_environment_on_the_cpu_shows_no_gpu():
    env = launch.build_launch_env(targeting(device="cpu", gpu_ranks=[0, 1]), {"OMP_NUM_THREADS": "7"}, cores=8)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "OMP_NUM_THREADS" not in env


USAGE = [launch.GpuUsage(0, 300), launch.GpuUsage(1, 70000), launch.GpuUsage(2, 4), launch.GpuUsage(3, 200)]


def test_freest_gpus_are_chosen_in_the_order_of_their_index():
    config = targeting(gpu_ranks=["auto:2"])
    assert launch.choose_gpus(config, {}, USAGE).target.gpu_ranks == [2, 3]


def test_gpus_that_the_launcher_chose_are_kept():
    given = {"TORCHFERRY_JOB_ID": "j", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert launch.choose_gpus(targeting(gpu_ranks=["auto:2"]), given, None).target.gpu_ranks == [1, 0]


@pytest.mark.parametrize(
    ("usage", "message"),
    [
        (USAGE, "auto:4, and of this host's 4 GPUs 3 are free; busy: 1 (70000 MiB in use)"),
        (None, "auto:4, but nvidia-smi does not tell which GPUs are free"),
    ],
)
def test_more_gpus_than_are_free_are_refused_with_the_reason(usage, message):
    with pytest.raises(ConfigError) as caught:
        launch.choose_gpus(targeting(gpu_ranks=["auto:4"]), {"CUDA_VISIBLE_DEVICES": "0"}, usage)
    assert message in caught.value.message


def test_gpu_beyond_those_of_the_host_is_refused():
    with pytest.raises(ConfigError) as caught:
        launch.check_gpus([0, 2], launch.parse_gpus(TWO_GPUS))
    assert caught.value.render().startswith(
        "Error: target.gpu_ranks names 2, and this host has indices 0 to 1\nhint: `nvidia-smi -L`"
    )


def test_gpus_are_known_by_index_and_by_uuid():
    launch.check_gpus(["GPU-22222222", "1", "MIG-33333333"], launch.parse_gpus(TWO_GPUS))
    launch.check_gpus([7], HostGpus(present=True))  # no nvidia-smi: the ranks will see


def test_host_without_gpu_is_told_of_the_cpu():
    with pytest.raises(ConfigError, match="no GPU") as caught:
        launch.check_target(targeting(), HostGpus(present=False), {})
    assert "target.device=cpu" in caught.value.hint


def test_missing_secret_is_named():
    config = targeting(device="cpu", secrets=["A_TOKEN", "B_TOKEN"])
    with pytest.raises(ConfigError, match="names B_TOKEN, which"):
        launch.check_target(config, HostGpus(present=False), {"A_TOKEN": "x"})


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    config = Config(run=RunConfig(name="sft", dir=str(tmp_path)), target=TargetConfig(device="cpu"))
    moment = time.struct_time((2026, 3, 4, 5, 6, 7, 0, 0, 0))
    first, second = launch.new_run_dir(config, moment), launch.new_run_dir(config, moment)
    assert (first.name, second.name) == ("sft-20260304-050607", "sft-20260304-050607-2")


@pytest.mark.parametrize(
    "option", [["run.dir={}/rows.jsonl"], ["run.dir={}/rows.jsonl/x"], ["--run-dir={}/rows.jsonl/x"]]
)
def test_run_folder_that_cannot_be_made_is_one_error(tmp_path, rows, option):
    config = small_config(tmp_path, gpus="0", rows=rows)
    done = run_train(str(config), *(part.format(tmp_path) for part in option))
    assert (done.returncode, done.stderr.splitlines()[0][:22]) == (2, "Error: the run folder ")
    assert "Traceback" not in done.stderr


def test_deciding_imports_no_torch():
    code = "import sys, trainer.commands.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_missing_torch_is_one_error_and_no_run_folder(tmp_path):
    for package in (click, yaml):  # all that a base install and this need; -S leaves out the rest of this environment
        folder = Path(package.__file__).parent
        (tmp_path / folder.name).symlink_to(folder)
    code = (
        "import runpy, sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[:3]; runpy.run_path(sys.argv[0], {}, '__main__')"
    )
    paths = [str(REPO), str(tmp_path), str(REPO / "train.py"), str(REPO / "configs/01_debug_sft.py")]
    command = [sys.executable, "-S", "-c", code, *paths, "target.device=cpu", f"run.dir={tmp_path}/runs"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            f"Error: torch is not installed for this Python ({sys.executable})",
            "hint: pip install -e '.[train]'",
        ],
    )
    assert not (tmp_path / "runs").exists()


def test_help_shows_an_example():
    done = run_train("--help")
    assert done.returncode == 0
    assert "python train.py my.yaml target.device=cpu" in done.stdout
    assert "python train.py export RUN  " in done.stdout


def test_help_imports_neither_torch_nor_yaml():
    code = (
        "import atexit, sys; from trainer.commands import cli\n"
        "atexit.register(lambda: print({'torch', 'yaml', 'numpy', 'rich'} & set(sys.modules)))\n"
        "cli.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "set()")


def test_unknown_key_ends_with_2_and_names_the_nearest(tmp_path):
    done = run_train(str(REPO / "configs/01_debug_sft.py"), "train.stepz=3")
    assert done.returncode == 2
    assert done.stderr == "Error: train.stepz is not a key\n  on the command line\nhint: did you mean train.steps?\n"


def test_key_that_is_gone_is_told_of_once(tmp_path):
    words = ["parallel.use_orig_params=false", "data.train=missing.jsonl", f"run.dir={tmp_path}"]
    done = run_train(str(REPO / "configs/01_debug_sft.py"), *words)
    assert done.returncode == 2
    note = "note: parallel.use_orig_params: no effect, FSDP2 has no flat parameter and the mathematics is the same\n"
    assert done.stderr.startswith(note) and done.stderr.count("use_orig_params") == 1


# --- telling ----------------------------------------------------------------------------------------------------------


def test_only_the_first_failing_rank_of_a_start_tells_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert diagnose.claim_failure(tmp_path, 1, "Error: a")
    assert not diagnose.claim_failure(tmp_path, 0, "Error: b")
    assert json.loads((tmp_path / "outcome.json").read_text()) == {"state": "failed", "rank": 1, "error": "Error: a"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert diagnose.claim_failure(tmp_path, 0, "Error: c")


def test_failure_is_told_though_the_run_folder_takes_no_file(tmp_path):
    (tmp_path / "control").write_text("")  # a file where the folder should be, as root writes through permissions
    assert diagnose.claim_failure(tmp_path, 0, "Error: a")
    assert diagnose.write_traceback(tmp_path / "control", 0, ValueError()) is None


def test_out_of_memory_names_the_ways_out():
    text = diagnose.describe(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert text.startswith("Error: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n  in ")
    assert "train.micro_batch_size" in text


def test_lost_peer_is_not_told_as_a_fault_of_this_rank():
    text = diagnose.describe(RuntimeError("[pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer. GLHF!"))
    assert text.startswith("Error: another rank ended without a word, or the connection to it broke\n")


def test_terminal_gets_a_bar_below_the_lines_and_a_file_does_not(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for stream in (Terminal(), io.StringIO()):
        screen = Screen(stream)
        screen.line("one")
        screen.bar(1, 2)
        screen.line("two")
        shown[type(stream)] = stream.getvalue()
    bar = render_bar(1, 2)
    assert shown == {Terminal: f"one\n{bar}\r\x1b[Ktwo\n{bar}", io.StringIO: "one\ntwo\n"}


def test_records_after_the_resumed_step_and_half_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "eval_loss": 1.0}\n{"st')
    drop_records_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1.0}\n'


def test_console_line_reads_well():
    record = {"step": 12, "loss": 3.12345, "lr": 9.8e-4, "grad_norm": 1.234, "tokens_per_s_per_gpu": 12345.0}
    line = render_train({**record, "mfu": 0.412, "mem_gib": 3.21}, 200, 83.9)
    assert line == (
        "step 12/200  loss 3.1235  lr 9.80e-04  grad 1.23  12.3k tok/s/gpu  mfu 41.2%  mem 3.2 GiB  eta 1:23"
    )
    assert render_train({**record, "mem_gib": None}, 200, None).endswith("grad 1.23  12.3k tok/s/rank")


def test_bar_and_durations():
    assert render_bar(50, 200, width=8) == "[##------] 25 %"
    assert [render_duration(s) for s in (7, 83, 7384)] == ["0:07", "1:23", "2:03:04"]


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-40GB", 312e12)],
)
def test_peak_of_known_cards(card, peak):
    assert card_peak_flops(card) == peak


@pytest.mark.parametrize("card", ["NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090"])
def test_other_cards_have_no_peak(card):
    assert card_peak_flops(card) is None


# --- whole runs -------------------------------------------------------------------------------------------------------

SMALL = """
target: {{device: cpu, gpu_ranks: [{gpus}]}}
model: {{hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 1}}
data: {{train: ["{rows}"], eval_fraction: 0.2, seq_len: 96}}
optim: {{learning_rate: 1.0e-2, warmup_steps: 2}}
train: {{steps: 6, micro_batch_size: 2, eval_every: 3, save_every: 0}}
"""


def small_config(folder: Path, *, gpus: str, rows: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(SMALL.format(gpus=gpus, rows=rows))
    return path


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    pairs = [{"question": f"what is {n}?", "answer": "na " * (1 + n * n % 13) + str(n)} for n in range(60)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def test_two_ranks_train_export_and_report_through_torchrun(tmp_path, rows):
    from transformers import AutoModelForCausalLM

    done = run_train(str(small_config(tmp_path, gpus="0, 1", rows=rows)), "train.seed=5", f"run.dir={tmp_path}/runs")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run folder: {run}" in done.stdout
    assert load_config(run / "config.yaml").train.seed == 5
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["state"], outcome["steps"], outcome["export"]) == ("succeeded", 6, "export")
    assert outcome["eval_loss_last"] < 0.9 * outcome["eval_loss_first"]
    assert "first step after " in done.stdout
    assert {"launcher", "imports", "data", "model", "first step"} <= outcome["start_s"].keys()
    first = json.loads(next(line for line in (run / "metrics.jsonl").open() if '"loss"' in line))
    assert first["start_s"] == pytest.approx(sum(outcome["start_s"].values()), abs=0.1)
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    compared = outcome["compared"]
    for row, predicted in zip(compared["rows"], compared["predicted"], strict=True):
        assert model(torch_tensor([row])).logits[0].argmax(dim=-1).tolist() == predicted


def torch_tensor(values):
    import torch

    return torch.tensor(values)


def test_ctrl_c_on_two_ranks_saves_and_exits_with_0(tmp_path, rows):
    config = small_config(tmp_path, gpus="0, 1", rows=rows)
    command = [sys.executable, str(REPO / "train.py"), str(config), "--run-dir", str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "train.steps=100000"], start_new_session=True, **pipes) as process:
        next(line for line in process.stdout if line.startswith("step 1/"))
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=HANG_S)
    assert (process.returncode, told) == (0, "")
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["state"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step_*/COMPLETE"))


@pytest.mark.parametrize(
    ("codes", "late", "code"),
    [
        ((1, -9, 1), (), 137),  # rank 0 only told that it lost rank 1
        ((2, 1, 1), (), 2),
        ((2, -15, -9), (2,), 2),  # torchrun itself ended the others
    ],
)
def test_exit_code_is_that_of_the_rank_from_which_the_others_failures_follow(codes, late, code, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    diagnose.claim_failure(tmp_path, 0, "Error: a")
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes)}
    for rank in late:
        failures[rank].timestamp += 30
    assert torchrun.report(ChildFailedError("train.py", failures), tmp_path) == code


def test_one_process_uses_the_given_run_folder_and_resumes_there(tmp_path, rows):
    config, run = small_config(tmp_path, gpus="0", rows=rows), tmp_path / "job"
    first = run_train(str(config), "train.stop_after_steps=2", TORCHFERRY_RUN_DIR=str(run))
    assert json.loads((run / "outcome.json").read_text())["state"] == "stopped", first.stderr
    assert first.stdout.splitlines()[-1] == "stopped after 2 of 6 steps"  # without a comparison of step 0 with itself
    second = run_train(str(config), "run.export=false", "--run-dir", str(run))
    assert "resuming after step 2" in second.stdout, second.stderr
    assert json.loads((run / "outcome.json").read_text())["state"] == "succeeded"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if "grad" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_missing_data_file_ends_with_2_before_any_rank_starts(tmp_path):
    config = small_config(tmp_path, gpus="0, 1", rows=tmp_path / "absent.jsonl")
    done = run_train(str(config), "--run-dir", str(tmp_path / "run"))
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"Error: there is no {tmp_path}/absent.jsonl")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("job", "state"), [("j1", "stopped"), ("", "succeeded")])
def test_stop_asked_while_a_deployed_job_starts_is_heard_and_a_stale_one_by_hand_is_not(tmp_path, rows, job, state):
    run = tmp_path / "run"
    (run / "control").mkdir(parents=True)
    (run / "control" / "stop.json").write_text("{}")
    env = {"TORCHFERRY_RUN_DIR": str(run)} | ({"TORCHFERRY_JOB_ID": job} if job else {})
    run_train(str(small_config(tmp_path, gpus="0", rows=rows)), "run.export=false", **env)
    assert json.loads((run / "outcome.json").read_text())["state"] == state


def test_torchrun_by_hand_shows_the_gpus_that_the_config_names(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "stop.json").write_text("{}")
    cli.prepare_rank(targeting(gpu_ranks=[3, 2]), tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert not (tmp_path / "control" / "stop.json").exists()


def test_config_mistake_under_torchrun_is_told_by_rank_0_alone():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(REPO / "train.py"), str(REPO / "configs/01_debug_sft.py"), "train.stepz=3"],
        capture_output=True,
        text=True,
    )
    assert done.stderr.count("Error: train.stepz is not a key") == 1


def test_mistake_is_told_at_once_where_a_rank_is_named_and_no_torchrun_runs(tmp_path):
    command = [sys.executable, str(REPO / "train.py"), str(tmp_path / "nosuch.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RANK": "1"}, timeout=HANG_S)
    assert (done.returncode, done.stderr.count("Error: ")) == (2, 1)


def test_mistake_that_all_ranks_find_is_told_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"colour": "red"}\n')
    config = small_config(tmp_path, gpus="0, 1", rows=tmp_path / "rows.jsonl")
    done = run_train(str(config), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count("Error") == 1  # no ChildFailedError of torchrun's
    assert "Traceback" not in done.stderr
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["state"] == "failed"
    assert "colour" in outcome["error"]


def test_home_of_nobody_is_a_folder_that_is_not_there(tmp_path):
    done = run_train(str(REPO / "configs/01_debug_sft.py"), "target.device=cpu", "data.train=~nobody_at_all/rows.jsonl")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "~nobody_at_all/rows.jsonl" in done.stderr
