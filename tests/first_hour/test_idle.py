"""`--idle-timeout`: an attempt whose GPUs nobody uses ends as failed. A script stands for nvidia-smi."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deployer.agent.gpus.utilization import GpuUtilization, parse_utilization
from deployer.agent.host.layout import Job
from deployer.agent.job.judge import judge
from deployer.agent.unattended.idle import IdleGpus, IdleTime
from tests.support.ferry import Ferry
from tests.support.jobs import said, wait_for
from tests.support.smi import fake_smi

GPUS = "".join(f"{n}, GPU-{n}, NVIDIA H100, 81559, 0\n" for n in range(3))


def uses(*percents: object) -> str:
    return "".join(f"{n}, GPU-{n}, {percent}\n" for n, percent in enumerate(percents))


# --- decided ----------------------------------------------------------------------------------------------------------


def test_only_time_in_which_all_gpus_were_seen_idle_counts() -> None:
    idle = IdleTime(10)
    for at, percents in enumerate(((0, 0), (4, 0), (0, 0))):
        idle.saw(percents, 10.0 * at)
    assert idle.seconds == 20
    idle.saw((0, 5), 30)
    assert idle.seconds == 0, "one of them was used"
    idle.saw((0, 0), 40)
    idle.saw((0, 0), 50)
    idle.saw((), 60)
    idle.saw((0, 0), 1000)
    assert idle.seconds == 10, "nobody could tell in between"
    idle.saw((0, 0), 9000)
    assert idle.seconds == 40, "a supervisor that was halted has seen nothing"


def test_use_is_read_as_nvidia_smi_tells_it() -> None:
    assert parse_utilization("0, GPU-a, 97\n1, GPU-b, [N/A]\nFailed to initialize NVML\n") == [
        GpuUtilization("0", "GPU-a", 97),
        GpuUtilization("1", "GPU-b", None),
    ]


@pytest.mark.parametrize(
    ("devices", "text", "why"),
    [
        (("GPU-0/MIG-1",), uses(0), "of a slice (MIG) no use is told"),
        (("GPU-0", "GPU-1"), uses(0, "[N/A]"), "nvidia-smi does not tell the use of GPU 1"),
        (("GPU-0",), None, "the host has no nvidia-smi"),
        ((), uses(0), "it is not known which ones are the job's"),
        (("GPU-7",), uses(0), "nvidia-smi gives no answer now"),
    ],
)
def test_gpus_that_cannot_be_watched_are_named_once_and_never_idle(
    tmp_path: Path, devices: tuple[str, ...], text: str | None, why: str
) -> None:
    env = {"PATH": str(tmp_path)} if text is None else fake_smi(tmp_path, use=text)
    told: list[str] = []
    clock = [0.0]
    gpus = IdleGpus(devices, env, 10, tell=told.append, now=lambda: clock[0])
    for _ in range(40):
        clock[0] += 1.0
        assert not gpus.look()
        if gpus._query is not None:
            wait_for(lambda: gpus.look() or gpus._query is None)
    assert told == [f"--idle-timeout cannot watch the GPUs: {why}"]


# --- carried out ------------------------------------------------------------------------------------------------------


def test_attempt_whose_gpus_go_idle_fails_with_the_cause_and_starts_again(ferry: Ferry, tmp_path: Path) -> None:
    smi = tmp_path / "smi"
    smi.mkdir()
    env = fake_smi(smi, gpus=GPUS, use=uses(0, 80, 90))
    ferry.env.update(env, PATH=f"{env['PATH']}:{Path(sys.executable).parent}")
    words = ("--gpus", "0,1", "--idle-timeout", "2s", "--max-restarts", "1", "--python", sys.executable)
    code = "import os, time; print('up'); time.sleep(0 if os.environ['TORCHFERRY_ATTEMPT'] == '2' else 1000)"
    done = ferry.run("run", *ferry.where(), "--detach", *words, "--", "python", "-uc", code)
    assert done.returncode == 0, done.stderr.decode()
    job = Job(str(ferry.job()))
    said(job, "up")
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: judge(job).state != "running", timeout_s=5)
    (smi / "use").write_text(uses(1, 4, 90))  # the third is another job's
    wait_for(lambda: judge(job).state == "succeeded")
    (first, second) = judge(job).attempts
    assert (first.state, first.code, first.reason) == ("failed", 124, "GPUs 0,1 were idle (below 5 %) for 2s")
    assert second.state == "succeeded" and not judge(job).warnings


def test_job_without_gpus_of_its_own_is_refused(ferry: Ferry) -> None:
    for words in (("--device", "cpu"), ()):
        done = ferry.run("run", *ferry.where(), "--idle-timeout", "30m", *words, "--", "true")
        assert done.returncode == 2, done.stderr.decode()
        assert "--idle-timeout watches the GPUs that a job is given" in done.stderr.decode()
    assert ferry.job_ids() == []
