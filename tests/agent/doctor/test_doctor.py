"""What the doctor says: each check in a state that it complains about, and in one that it does not."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.doctor import check_gpus, check_host, check_root, run
from deployer.agent.doctor.check_gpus import GpuFacts, Report
from deployer.agent.doctor.check_host import Network, Python
from deployer.agent.doctor.findings import Check, run_check
from deployer.agent.gc.choose import AGENT, BLOB, ENV, GcObject
from deployer.agent.gpus.health import Card, parse_report
from deployer.agent.gpus.nvidia import Gpu, Holder, Limit
from deployer.agent.gpus.view import Claim
from deployer.agent.host.cgroups import Limits
from deployer.agent.host.disk import Disk
from deployer.agent.host.layout import Root
from deployer.agent.job.status import FAILED, LOST, RUNNING, SUCCEEDED
from deployer.agent.job.views import Row
from deployer.commands.host.doctor import Contact, check_contact
from tests.support.ferry import REPO, Ferry
from tests.support.pythons import make_python
from tests.support.smi import fake_smi

FREE = Limits(None, None, None, 0)
DISK = Disk("/root/x", "ext4", ["rw"], 10**12, 10**11, 10**6, 10**5)
H100 = Gpu(0, "GPU-a", "NVIDIA H100", 81559, 4)
REPORT = Report("570.86.10", "12.8", [Card("GPU-a", True, 0, False, False)])
GPUS = GpuFacts([H100], [], REPORT)
LOST_CARD = GPUS._replace(gpus=[H100._replace(fault="[GPU is lost]")])


def gpus(*, used_mib: int = 4, holders: Any = (), cuda: str = "12.8", **card: Any) -> GpuFacts:
    report = REPORT._replace(cuda=cuda, cards=[REPORT.cards[0]._replace(**card)])
    return GpuFacts([H100._replace(memory_used_mib=used_mib)], list(holders), report)


def python(version: str = "3.12.1", **packages: str) -> Python:
    return Python("/py", version, {name.replace("_", "-"): value for name, value in packages.items()})


def kill(value: str) -> list[str]:
    return ["[Login]\n#KillUserProcesses=yes\n", f"[Login]\nKillUserProcesses={value}\n"]


GIB = 1 << 30
XID = "[1.0] NVRM: Xid (PCI:0000:06:00): %d, pid=77, name=python, GPU has fallen off the bus.\n"
CLAIMS = [Claim("lease", "a", ("GPU-a",), uid=0), Claim("ticket", "b", ("GPU-a",), uid=0)]
TORCH = python(torch="2.11.0", nvidia_cuda_runtime_cu12="12.8.90")

# name: (the check's finding, its status, a word that what it says or advises must hold)
FINDINGS: dict[str, tuple[Check | None, str, str]] = {
    "local disk": (check_root.check_root_file_system(DISK), "ok", "ext4"),
    "NFS": (check_root.check_root_file_system(DISK._replace(kind="nfs4")), "warn", "--remote-root"),
    "room": (check_root.check_root_disk(DISK), "ok", "100 GB free"),
    "no room": (check_root.check_root_disk(DISK._replace(free_bytes=10**9)), "warn", "deploy.py gc"),
    "inodes": (check_root.check_root_inodes(DISK), "ok", "100000 of 1000000"),
    "uncounted inodes": (check_root.check_root_inodes(DISK._replace(inodes=0, inodes_free=0)), "ok", "count"),
    "no inodes": (check_root.check_root_inodes(DISK._replace(inodes_free=7)), "warn", "7 of"),
    "exec": (check_host.check_noexec("x", DISK, "advice"), "ok", "/root/x"),
    "noexec": (check_host.check_noexec("x", DISK._replace(options=["rw", "noexec"]), "advice"), "warn", "advice"),
    "shm": (check_host.check_shm(DISK), "ok", "1000 GB"),
    "small shm": (check_host.check_shm(DISK._replace(size_bytes=64 << 20)), "warn", "--shm-size"),
    "no shm": (check_host.check_shm(None), "warn", "--shm-size"),
    "hub": (check_host.check_hub(DISK, 3), "ok", "3 models"),
    "full hub": (check_host.check_hub(DISK._replace(free_bytes=5), 3), "warn", "HF_HOME"),
    "files": (check_host.check_open_files(65536, 65536), "ok", "65536"),
    "unlimited files": (check_host.check_open_files(-1, -1), "ok", "none"),
    "few files": (check_host.check_open_files(1024, -1), "warn", "ulimit -n"),
    "memlock": (check_host.check_locked_memory(65536, infiniband=[]), "ok", "no InfiniBand"),
    "memlock unlimited": (check_host.check_locked_memory(-1, infiniband=["mlx5_0"]), "ok", "mlx5_0"),
    "memlock low": (check_host.check_locked_memory(65536, infiniband=["mlx5_0"]), "warn", "memlock=-1"),
    "processes": (check_host.check_processes(-1, FREE), "ok", "none"),
    "few processes": (check_host.check_processes(1000, FREE), "warn", "ulimit -u"),
    "few pids": (check_host.check_processes(-1, Limits(None, None, 5000, 4000)), "warn", "1000 of"),
    "memory": (check_host.check_memory(64 * GIB, FREE), "ok", "68.7 GB"),
    "memory limit": (check_host.check_memory(64 * GIB, Limits(60 * GIB, None, None, 0)), "ok", "limit"),
    "tight memory": (check_host.check_memory(64 * GIB, Limits(16 * GIB, None, None, 0)), "warn", "signal 9"),
    "little memory": (check_host.check_memory(2 * GIB, FREE), "warn", "2.1 GB"),
    "cpus": (check_host.check_cpus(8, Limits(None, 8.0, None, 0)), "ok", "8"),
    "cpu quota": (check_host.check_cpus(64, Limits(None, 7.5, None, 0)), "warn", "OMP_NUM_THREADS=7"),
    "swap": (check_host.check_swap(0, 0), "ok", "none"),
    "full swap": (check_host.check_swap(8 * GIB, GIB), "warn", "short of memory"),
    "overcommit": (check_host.check_overcommit("0", 0), "ok", "=0"),
    "no overcommit": (check_host.check_overcommit("2", 10**10), "warn", "sysctl vm.overcommit_memory=0"),
    "shell": (check_host.check_shell("/bin/fish", runs=True), "ok", "fish"),
    "no shell": (check_host.check_shell("/usr/sbin/nologin", runs=False), "warn", "chsh"),
    "logout": (check_host.check_logout(kill("no"), user="a", lingers=False), "ok", "off"),
    "logout of a lingerer": (check_host.check_logout(kill("yes"), user="a", lingers=True), "ok", "not for this"),
    "logout kills": (check_host.check_logout(kill("yes"), user="a", lingers=False), "warn", "enable-linger a"),
    "others": (check_host.check_hidden(True), "ok", "seen"),
    "hidepid": (check_host.check_hidden(False), "warn", "hidepid"),
    "container": (
        check_host.check_container({"HF_HOME": "/d", "HF_TOKEN": "canary"}, missing=[]),
        "ok",
        ", HF_TOKEN →",
    ),
    "stale container": (check_host.check_container({"HF_HOME": "/d"}, missing=["HF_HOME"]), "warn", "HF_HOME=DIR"),
    "container's GPUs": (check_host.check_container({"CUDA_VISIBLE_DEVICES": "0"}, missing=[]), "warn", "--gpus"),
    "clock": (check_host.check_clock(-9.0), "ok", "behind"),
    "clock off": (check_host.check_clock(60.0), "warn", "ntpd"),
    "python": (check_host.check_python([python("3.9.2"), python("3.10.0")], "3.8.1"), "ok", "3.10.0"),
    "old python": (check_host.check_python([python("3.9.18")], "3.9.18"), "warn", "--python"),
    "no python": (check_host.check_python([], "3.9.18"), "warn", "--python"),
    "uv": (check_host.check_installer("/bin/uv", []), "ok", "not tried"),
    "pip": (check_host.check_installer(None, [python(pip="25.0")]), "ok", "pip 25.0"),
    "no installer": (check_host.check_installer(None, [python()]), "warn", "neither"),
    "driver": (check_gpus.check_driver(GPUS), "ok", "570.86.10, for CUDA up to 12.8"),
    "no gpus": (check_gpus.check_driver(GpuFacts([], [], Report("", "", []))), "warn", "target.device=cpu"),
    "limit": (check_gpus.check_gpu_limit(GPUS._replace(limit=Limit("0", GPUS.gpus[:1]))), "ok", "may use GPU 0 of"),
    "limit of none": (check_gpus.check_gpu_limit(GPUS._replace(limit=Limit("", []))), "warn", "unset it"),
    "lost": (next(check_gpus.check_gpus(LOST_CARD)), "fail", "[GPU is lost]"),
    "gpu memory": (check_gpus.check_gpu_memory(GPUS), "ok", "none"),
    "ghost": (check_gpus.check_gpu_memory(gpus(used_mib=20000)), "warn", "GPU 0 (20000 MiB)"),
    "held": (check_gpus.check_gpu_memory(gpus(used_mib=20000, holders=[Holder("GPU-a", 1, "u", "c", 9)])), "ok", ""),
    "persistence": (check_gpus.check_persistence(GPUS), "ok", "on"),
    "no persistence": (check_gpus.check_persistence(gpus(persistence=False)), "warn", "nvidia-smi -pm 1"),
    "errors": (check_gpus.check_gpu_errors(GPUS), "ok", "no uncorrectable"),
    "memory errors": (check_gpus.check_gpu_errors(gpus(uncorrectable=3)), "warn", "3 uncorrectable"),
    "pending repair": (check_gpus.check_gpu_errors(gpus(pending=True)), "warn", "--gpu-reset"),
    "broken": (check_gpus.check_gpu_errors(gpus(broken=True)), "fail", "GPU 0"),
    "kernel log": (check_gpus.check_kernel_log(XID % 31), "ok", "1 Xid"),
    "no kernel log": (check_gpus.check_kernel_log(None), "ok", "may not be read"),
    "xid": (check_gpus.check_kernel_log(XID % 79), "warn", "fallen off the bus"),
    "torch": (check_gpus.check_torch([python(), TORCH]), "ok", "2.11.0 with CUDA 12.8.90 (/py)"),
    "no torch": (check_gpus.check_torch([python()]), "warn", "build an environment"),
    "torch fits": (check_gpus.check_cuda([TORCH], gpus(cuda="12.2")), "ok", "12.8.90"),
    "torch too new": (check_gpus.check_cuda([python(torch="2.11.0+cu130")], GPUS), "fail", "for CUDA 12.8"),
    "one torch fits": (check_gpus.check_cuda([python(torch="2.11.0+cu130"), TORCH], GPUS), "ok", "12.8.90"),
    "torch for CPUs": (check_gpus.check_cuda([python(torch="2.11.0+cpu")], GPUS), "warn", "--python"),
    "conda's torch": (check_gpus.check_cuda([python(torch="2.11.0")], GPUS), "ok", "not compared"),
    "interface": (check_host.check_network(Network(["eth0"], "eth0"), {}), "ok", "eth0"),
    "loopback only": (check_host.check_network(Network([], None), {}), "warn", "NCCL_SOCKET_IFNAME=lo"),
    "bridge first": (check_host.check_network(Network(["br-1", "eth0"], "eth0"), {}), "warn", "NAME=eth0"),
    "docker last": (check_host.check_network(Network(["docker0", "eth0"], "eth0"), {}), "ok", "eth0 (of docker0"),
    "InfiniBand": (check_host.check_network(Network(["eth0", "ib0"], "eth0"), {}), "ok", "ib0"),
    "named": (check_host.check_network(Network(["a", "eth0"], "a"), {"NCCL_SOCKET_IFNAME": "eth"}), "ok", "eth"),
    "misnamed": (check_host.check_network(Network(["a"], "a"), {"NCCL_SOCKET_IFNAME": "=eth0"}), "fail", "NAME=a"),
    "excluding": (check_host.check_network(Network(["a", "b"], "a"), {"NCCL_SOCKET_IFNAME": "^a"}), "ok", "^a"),
    "jobs": (check_root.check_jobs([Row("a", SUCCEEDED, ended_at="x")]), "ok", "1, 0 of them"),
    "lost job": (check_root.check_jobs([Row("a", LOST)]), "warn", "lost: a"),
    "orphan": (check_root.check_jobs([Row("a", RUNNING, unsupervised=True)]), "warn", "stop ID"),
    "other host's orphan": (
        check_root.check_jobs([Row("a", LOST, on_host="b", unsupervised=True)]),
        "ok",
        "1",
    ),
    "lease": (check_root.check_leases(CLAIMS, [Row("a", RUNNING)]), "ok", "held by a of root; 1 in the"),
    "no lease": (check_root.check_leases([], []), "ok", "none"),
    "lease of the dead": (check_root.check_leases(CLAIMS, [Row("a", FAILED)]), "warn", "stop ID"),
    "leftovers": (check_root.check_garbage([GcObject(AGENT, "a", 9, 9.0)]), "ok", "1 agent of another version"),
    "much left": (check_root.check_garbage([GcObject(BLOB, "a", 32 * 10**8, 9.0)]), "warn", "would free 3.2 GB"),
    "environment left": (check_root.check_garbage([GcObject(ENV, n, 0, 9.0) for n in "ab"]), "warn", "2 environments"),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_finding(name: str) -> None:
    found, status, word = FINDINGS[name]
    assert found is not None and found["status"] == status
    assert word in f"{found['detail']} → {found['hint']}"
    assert found["hint"] or status == "ok", "what to do is part of every complaint"
    assert "canary" not in str(found)


def findings(*contact: Any) -> dict[str, tuple[str, str]]:
    return {c.name: (c.status, f"{c.detail} {c.hint}") for c in check_contact(Contact(*contact))}


def test_a_quick_and_silent_login_is_fine() -> None:
    found = findings(0.4, 0.2, 0.1, b"")
    assert {status for status, _ in found.values()} == {"ok"}
    assert "about 0.7 s" in found["time to deploy"][1]  # 0.4 + 0.2 + half of a round trip, rounded


def test_a_noisy_slow_login_and_a_long_way_are_warnings() -> None:
    found = findings(9.0, 5.0, 0.1, b"\x1b[31mWelcome!\n")
    assert {status for status, _ in found.values()} == {"warn"}
    assert "14 bytes: \\x1b[31mWelcome!" in found["login output"][1]
    assert "4.90 s until Python runs" in found["login time"][1] and "$-" in found["login time"][1]


# --- what is read -----------------------------------------------------------------------------------------------------

SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log><driver_version>580.159.04</driver_version><cuda_version>13.0</cuda_version>
<gpu id="00000000:00:06.0"><persistence_mode>Disabled</persistence_mode><uuid>GPU-a</uuid>
<ecc_errors><volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>1</sram_uncorrectable_parity>
<dram_uncorrectable>2</dram_uncorrectable></volatile><aggregate><dram_uncorrectable>70</dram_uncorrectable></aggregate>
<unrepairable_memory>No</unrepairable_memory></ecc_errors>
<remapped_rows><remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows></gpu>
<gpu id="00000000:00:07.0"><uuid>GPU-b</uuid><ecc_errors>N/A</ecc_errors></gpu></nvidia_smi_log>"""


def test_the_report_of_nvidia_smi_is_read_and_what_a_driver_leaves_out_is_fine() -> None:
    cards = [Card("GPU-a", False, 3, True, False), Card("GPU-b", True, 0, False, False)]
    assert parse_report(SMI.encode()) == Report("580.159.04", "13.0", cards)
    assert parse_report(b"Invalid option") == Report("", "", [])


def test_interfaces_are_those_that_are_up_and_addressed(tmp_path: Path) -> None:
    for name, flags in {"lo": "0x9", "eth0": "0x1003", "down0": "0x1002", "mute0": "0x1003", "six0": "0x1003"}.items():
        (tmp_path / "sys" / name).mkdir(parents=True)
        (tmp_path / "sys" / name / "flags").write_text(flags + "\n")
    row = "{}\t{}\t010200C0\t0003\t0\t0\t0\t{}\t0\t0\t0\n"
    routes = row.format("eth0", "000200C0", "00FFFFFF") + row.format("eth0", "00000000", "00000000")
    (tmp_path / "route").write_text("Iface\tDestination\n" + routes + row.format("down0", "000300C0", "00FFFFFF"))
    (tmp_path / "if_inet6").write_text("fd00 04 40 00 82     six0\n0001 01 80 10 80       lo\n")
    assert check_host.read_network(str(tmp_path / "sys"), str(tmp_path)) == Network(["eth0", "six0"], "eth0")


def test_a_network_with_nothing_but_ipv6_has_its_way_out(tmp_path: Path) -> None:
    (tmp_path / "sys" / "six0").mkdir(parents=True)
    (tmp_path / "sys" / "six0" / "flags").write_text("0x1003\n")
    (tmp_path / "if_inet6").write_text("fd00 04 40 00 82     six0\n")
    zeros = "0" * 32
    (tmp_path / "ipv6_route").write_text(f"{zeros} 00 {zeros} 00 fe80 00000400 1 0 00450003     six0\n")
    assert check_host.read_network(str(tmp_path / "sys"), str(tmp_path)) == Network(["six0"], "six0")


def test_a_root_that_cannot_be_written_fails_and_a_good_one_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = check_root.check_root(Root(str(tmp_path / "file")))
    assert (found["status"], "--remote-root" in found["hint"]) == ("fail", True)
    assert check_root.check_root(Root(str(tmp_path / "good")))["status"] == "ok"
    assert [p for p in (tmp_path / "good").rglob("*") if p.is_file()] == []


def test_an_account_without_a_shell_is_told_apart() -> None:
    assert run.is_shell("/bin/sh")
    assert not run.is_shell("/bin/false") and not run.is_shell("/no/such/shell")


def test_folders_that_the_container_s_variables_name_and_that_are_gone_are_found(tmp_path: Path) -> None:
    env = {"VIRTUAL_ENV": str(tmp_path), "HF_HOME": str(tmp_path / "gone"), "CUDA_HOME": ""}
    assert run.missing_folders(env) == ["HF_HOME"]


# --- the whole --------------------------------------------------------------------------------------------------------


def examined(root: Path, env: dict[str, str]) -> tuple[dict[str, Any], dict[str, Check]]:
    facts, checks = run.examine(Root(str(root)), env, client_time=time.time())
    return facts, {check["name"]: check for check in checks}


def test_a_host_with_gpus_is_examined_whole(tmp_path: Path) -> None:
    make_python(tmp_path / "own", torch="2.11.0", nvidia_cuda_runtime="13.0.88")
    rows = "0, GPU-a, NVIDIA L4, 23034, 1\n1, GPU-b, NVIDIA L4, 23034, 20000\n"
    env = fake_smi(tmp_path, gpus=rows, apps=f"GPU-b, {os.getpid()}, 19000\n", then='[ "$1" != -q ] || cat "$0.xml"')
    (tmp_path / "nvidia-smi.xml").write_text(SMI.replace("13.0", "12.4"))
    facts, found = examined(tmp_path / "root", {**env, "VIRTUAL_ENV": str(tmp_path / "own")})
    assert (facts["driver"], facts["cuda"], len(facts["gpus"])) == ("580.159.04", "12.4", 2)
    complaints = {n for n, c in found.items() if c["status"] != "ok"}
    assert {"gpu 1", "gpu persistence", "gpu errors"} <= complaints and "gpu 0" not in complaints
    assert f"pid {os.getpid()}" in found["gpu 1"]["detail"]
    assert f"13.0.88 ({tmp_path}/own/bin/python)" in found["torch"]["detail"]
    assert len(found) >= 30
    page = (REPO / "docs" / "troubleshooting.md").read_text().split("## What the doctor checks")[1]
    explained = {name for line in page.splitlines() for name in line.strip("| ").split(" | ")[0].split(", ")}
    assert {re.sub(r"\d", "N", name) for name in found} <= explained
    assert set(findings(0, 0, 0, b"")) <= explained


def test_a_broken_driver_is_one_finding_among_the_others(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, then="echo NVML: Driver/library version mismatch; exit 18")
    facts, found = examined(tmp_path / "root", env)
    assert (found["gpus"]["status"], "version mismatch" in found["gpus"]["detail"]) == ("fail", True)
    assert facts["gpus"] == [] and found["root"]["status"] == "ok"


def test_a_check_that_breaks_is_a_finding_of_its_own() -> None:
    (found,) = run_check("odd", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert (found["name"], found["status"], "division by zero" in found["detail"]) == ("odd", "fail", True)


def test_doctor_ends_with_1_when_something_fails_and_says_what_to_do(ferry: Ferry) -> None:
    ferry.env["PATH"] = fake_smi(ferry.project, then="echo broken; exit 9")["PATH"]
    done = ferry.run("doctor", *ferry.where())
    assert done.returncode == 1
    assert not re.search(r"^gpus ", done.stdout.decode(), re.M)  # the checks tell of them
    assert "✗ gpus: nvidia-smi ended with 9: broken" in done.stdout.decode()
    assert "    → repair the GPU driver" in done.stdout.decode()


def test_doctor_tells_a_program_everything(ferry: Ferry) -> None:
    done = ferry.run("doctor", *ferry.where(), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["facts"]["root"] == str(ferry.root)
    assert all(set(check) == {"name", "status", "detail", "hint"} for check in found["checks"])
    assert len(found["checks"]) >= 25
