"""The job's environment on the host, and what is read of a host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from deployer.agent.doctor.run import host_facts
from deployer.agent.host import environment
from deployer.agent.host.cgroups import Limits, read_limits
from deployer.agent.host.disk import mount_of, read_disk
from deployer.agent.host.layout import Root


def test_of_the_container_s_environment_only_what_matters_is_taken() -> None:
    data = b"PATH=/opt/conda/bin:/bin\0HF_HOME=/data\0CUDA_HOME=/cuda\0LANG=C\0CONDA_PREFIX=/opt/conda\0X=HF_\0broken\0"
    assert environment.parse_container_env(data) == {
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
    assert set(environment.container_env()) <= names


def test_the_session_wins_and_lists_of_folders_are_joined() -> None:
    session = {"PATH": "/usr/bin:/bin", "HF_HOME": "/mine", "HOME": "/root"}
    container = {
        "PATH": "/opt/conda/bin:/bin",
        "HF_HOME": "/image",
        "LD_LIBRARY_PATH": "/cuda/lib",
        "NCCL_DEBUG": "INFO",
    }
    assert environment.job_environment(session, container) == {
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
    assert environment.is_secret(name) == secret


def test_facts_describe_this_host(tmp_path: Path) -> None:
    facts = host_facts(Root(str(tmp_path / "not/yet/there")))
    assert facts["hostname"] == socket.gethostname()
    assert 1 <= facts["cpus"] <= (os.cpu_count() or 1)
    assert facts["disk_free_gib"] > 0 and facts["mem_gib"] > 0
    assert not (tmp_path / "not").exists()


def test_the_file_system_of_a_path_is_that_of_its_mount(tmp_path: Path) -> None:
    assert read_disk("/proc/self").kind == "proc"
    disk, status = read_disk(str(tmp_path / "not/yet")), os.statvfs(tmp_path)
    assert (disk.size_bytes, disk.path) == (status.f_blocks * status.f_frsize, str(tmp_path / "not/yet"))


MOUNTS = """\
/dev/sda / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,noexec 0 0
tmpfs /home/fast tmpfs rw 0 0
overlay / overlay rw,noatime 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "options"),
    [
        ("/home/me", "nfs4", ["rw", "noexec"]),
        ("/home/fast/x", "tmpfs", ["rw"]),
        ("/homes", "overlay", ["rw", "noatime"]),
    ],
)
def test_of_several_mounts_the_deepest_and_last_counts(path: str, kind: str, options: list[str]) -> None:
    assert mount_of(path, MOUNTS) == (kind, options)


# --- control groups ---------------------------------------------------------------------------------------------------


def groups(folder: Path, own: str, files: dict[str, str]) -> Limits:
    for name, text in {**files, "own": own}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_limits(str(folder), str(folder / "own"))


def test_the_tightest_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": "max\n",
        "a/memory.max": "4000\n",
        "memory.max": "9000\n",
        "a/b/cpu.max": "150000 100000\n",
        "a/cpu.max": "max 100000\n",
        "a/b/pids.max": "500\n",
        "a/b/pids.current": "20\n",
        "a/pids.max": "100\n",
        "a/pids.current": "90\n",
    }
    assert groups(tmp_path, "0::/a/b\n", files) == Limits(4000, 1.5, 100, 90)


def test_limits_of_the_first_version_of_control_groups_are_read_too(tmp_path: Path) -> None:
    files = {
        "memory/docker/memory.limit_in_bytes": "5000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "pids/pids.max": "max\n",
    }
    own = "4:pids:/\n3:memory:/docker\n2:cpu,cpuacct:/elsewhere\n1:name=systemd:/\n"
    assert groups(tmp_path, own, files) == Limits(5000, 2.0, None, 0)


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert read_limits(str(tmp_path), str(tmp_path / "none")) == Limits(None, None, None, 0)
