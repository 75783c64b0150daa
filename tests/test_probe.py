"""The job's environment on the host, and what the doctor says about a host."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from deployer.agent import checkup, probe
from deployer.agent.layout import Root
from tests.test_gpus import fake_smi
from tests.test_runtime import make_python


def test_of_the_container_s_environment_only_what_matters_is_taken() -> None:
    data = b"PATH=/opt/conda/bin:/bin\0HF_HOME=/data\0CUDA_HOME=/cuda\0LANG=C\0CONDA_PREFIX=/opt/conda\0X=HF_\0broken\0"
    assert probe.parse_container_env(data) == {
        "PATH": "/opt/conda/bin:/bin",
        "HF_HOME": "/data",
        "CUDA_HOME": "/cuda",
        "CONDA_PREFIX": "/opt/conda",
    }


def test_the_container_s_environment_is_that_of_process_1() -> None:
    try:
        names = {item.partition(b"=")[0].decode() for item in Path("/proc/1/environ").read_bytes().split(b"\0")}
    except OSError:
        names = set()
    assert set(probe.container_env()) <= names


def test_the_session_wins_and_lists_of_folders_are_joined() -> None:
    session = {"PATH": "/usr/bin:/bin", "HF_HOME": "/mine", "HOME": "/root"}
    container = {
        "PATH": "/opt/conda/bin:/bin",
        "HF_HOME": "/image",
        "LD_LIBRARY_PATH": "/cuda/lib",
        "NCCL_DEBUG": "INFO",
    }
    assert probe.job_environment(session, container) == {
        "PATH": "/usr/bin:/bin:/opt/conda/bin",
        "HF_HOME": "/mine",
        "HOME": "/root",
        "LD_LIBRARY_PATH": "/cuda/lib",
        "NCCL_DEBUG": "INFO",
    }


@pytest.mark.parametrize(
    ("name", "secret"), [("HF_TOKEN", True), ("wandb_api_key", True), ("DB_PASSWORD", True), ("HF_HOME", False)]
)
def test_secrets_are_known_by_their_names(name: str, secret: bool) -> None:
    assert probe.is_secret(name) == secret


def test_facts_describe_this_host(tmp_path: Path) -> None:
    facts = probe.host_facts(Root(str(tmp_path / "not/yet/there")))
    assert facts["hostname"] == socket.gethostname()
    assert 1 <= facts["cpus"] <= (os.cpu_count() or 1)
    assert facts["disk_free_gib"] > 0 and facts["mem_gib"] > 0
    assert not (tmp_path / "not").exists()


def statuses(checks: list[dict[str, str]]) -> dict[str, str]:
    return {c["name"]: c["status"] for c in checks}


def test_the_doctor_checks_a_host_with_gpus(tmp_path: Path) -> None:
    gpus = "0, GPU-1, NVIDIA L4, 23034, 1\n1, GPU-2, NVIDIA L4, 23034, 20000\n"
    env = {**os.environ, **fake_smi(tmp_path, gpus=gpus, apps=f"GPU-2, {os.getpid()}, 19000\n")}
    checks = checkup.run_checks(Root(str(tmp_path / "root")), env, client_time=time.time())
    found = statuses(checks)
    assert (found["driver"], found["gpu 0"], found["gpu 1"], found["clock"]) == ("ok", "ok", "warn", "ok")
    assert all(set(c) == {"name", "status", "detail", "hint"} for c in checks)
    assert f"pid {os.getpid()}" in next(c["detail"] for c in checks if c["name"] == "gpu 1")


def test_a_root_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = checkup.check_root(Root(str(tmp_path / "file")))
    assert (found["status"], "cannot be written" in found["detail"]) == ("fail", True)
    assert "--remote-root" in found["hint"]


def test_a_broken_driver_fails_with_its_own_words(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, then="echo NVML: Driver/library version mismatch; exit 18")
    (found,) = checkup.check_gpus(env)
    assert (found["status"], "version mismatch" in found["detail"]) == ("fail", True)


def test_a_host_without_gpus_is_a_warning(tmp_path: Path) -> None:
    (found,) = checkup.check_gpus({"PATH": str(tmp_path)})
    assert (found["status"], "target.device=cpu" in found["hint"]) == ("warn", True)


def test_torch_is_found_with_its_version_and_interpreter(tmp_path: Path) -> None:
    make_python(tmp_path / "own", torch="2.11.0", nvidia_cuda_runtime_cu12="12.8.90")
    env = {"VIRTUAL_ENV": str(tmp_path / "own"), "PATH": ""}
    found = checkup.check_torch(env, Root(str(tmp_path / "root")))
    assert found["status"] == "ok"
    assert found["detail"].startswith(f"2.11.0 with CUDA 12.8.90 ({tmp_path}/own/bin/python)")


@pytest.mark.parametrize(("ahead", "status"), [(0.5, "ok"), (-9.0, "ok"), (60.0, "warn"), (-3600.0, "warn")])
def test_a_clock_that_is_off_is_a_warning(ahead: float, status: str) -> None:
    assert checkup.check_clock(ahead)["status"] == status


def test_the_file_system_of_a_path_is_that_of_its_mount() -> None:
    assert checkup.filesystem_of("/proc/self") == "proc"
    assert checkup.filesystem_of("/dev/shm/none") in {"tmpfs", ""}


def test_the_doctor_leaves_nothing_behind(tmp_path: Path) -> None:
    checkup.check_root(Root(str(tmp_path)))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
