"""GPUs of the host by nvidia-smi; a script of that name on PATH stands for it."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from deployer.agent.errors import AgentError
from deployer.agent.gpus import Gpu, check_gpus, holders, list_gpus, query_driver
from deployer.agent.procs import is_running, process_of
from tests.jobs import wait_for

GPUS = """\
0, GPU-aaaa1111-0000, NVIDIA H100 80GB HBM3, 81559, 4
1, GPU-aabb2222-0000, NVIDIA H100 80GB HBM3, 81559, 70321
2, GPU-cccc3333-0000, NVIDIA H100 80GB HBM3, 81559, 30000
"""
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aabb2222-0000)
  MIG 1g.10gb     Device  0: (UUID: MIG-1234-5678)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return fake_smi(tmp_path, gpus=GPUS, apps=f"GPU-aabb2222-0000, {os.getpid()}, 70300\n")


def fake_smi(folder: Path, *, gpus: str = "", apps: str = "", then: str = "exit 0") -> dict[str, str]:
    """An environment whose nvidia-smi prints these texts."""
    for name, text in {"gpus": gpus, "apps": apps, "listing": LISTING}.items():
        (folder / name).write_text(text)
    script = folder / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
case "$1" in
--query-gpu=driver_version) echo 570.86.10;;
--query-gpu=*) cat {folder}/gpus;;
--query-compute-apps=*) cat {folder}/apps;;
-L) cat {folder}/listing;;
esac
{then}
"""
    )
    script.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_gpus_are_listed_with_their_memory(env: dict[str, str]) -> None:
    assert list_gpus(env)[1] == Gpu(1, "GPU-aabb2222-0000", "NVIDIA H100 80GB HBM3", 81559, 70321)
    assert [gpu.index for gpu in list_gpus(env)] == [0, 1, 2]
    assert query_driver(env) == "570.86.10"


def test_a_holder_is_named_with_user_and_command(env: dict[str, str]) -> None:
    (holder,) = holders(env)
    assert (holder.gpu_uuid, holder.pid, holder.memory_mib) == ("GPU-aabb2222-0000", os.getpid(), 70300)
    assert holder.user == getpass.getuser()
    assert "python" in holder.command


def test_a_host_without_nvidia_smi_has_no_gpus(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    assert (list_gpus(env), holders(env), query_driver(env)) == ([], [], "")


def test_figures_that_the_driver_does_not_tell_count_as_zero(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, gpus="0, GPU-1, NVIDIA GH200, [N/A], [N/A]\n", apps="GPU-1, 1, [N/A]\n")
    assert list_gpus(env) == [Gpu(0, "GPU-1", "NVIDIA GH200", 0, 0)]
    assert holders(env)[0].memory_mib == 0


@pytest.mark.parametrize(
    ("requested", "indices"),
    [(["0"], [0]), (["2", "0"], [2, 0]), (["GPU-cccc3333-0000"], [2]), (["GPU-aaaa"], [0]), ([], [])],
)
def test_gpus_are_found_by_index_uuid_or_its_beginning(
    env: dict[str, str], requested: list[str], indices: list[int]
) -> None:
    assert [gpu.index for gpu in check_gpus(requested, env, True)] == indices


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (["0", "4"], r"no GPU 4; it has 0 \(NVIDIA H100 80GB HBM3\), 1 "),
        (["GPU-dddd"], "no GPU GPU-dddd"),
        (["GPU-aa"], "several GPUs that begin with GPU-aa"),
        (["-1"], "no GPU -1"),
        (["0", "GPU-aaaa"], "GPU 0 is named twice: 0, GPU-aaaa"),
        (["MIG-0000"], "no GPU slice MIG-0000"),
    ],
)
def test_a_gpu_that_the_host_lacks_is_refused(env: dict[str, str], requested: list[str], message: str) -> None:
    with pytest.raises(AgentError, match=message):
        check_gpus(requested, env, True)


def test_a_slice_is_found_by_its_uuid(env: dict[str, str]) -> None:
    (found,) = check_gpus(["MIG-1234-5678"], env, False)
    assert (found.index, found.uuid) == (1, "MIG-1234-5678")


def test_a_busy_gpu_is_refused_with_who_holds_it_and_which_is_free(env: dict[str, str]) -> None:
    with pytest.raises(AgentError) as caught:
        check_gpus(["0", "1"], env, False)
    assert caught.value.message.startswith(f"GPU 1 is busy: pid {os.getpid()} of {getpass.getuser()}, ")
    assert caught.value.message.endswith(", 70300 MiB")
    assert caught.value.hint == "free: --gpus 0; or run beside them with --allow-busy"
    assert [gpu.index for gpu in check_gpus(["0", "1"], env, True)] == [0, 1]


def test_memory_in_use_by_no_visible_process_counts_as_busy(env: dict[str, str]) -> None:
    with pytest.raises(AgentError, match="GPU 2 is busy: 30000 MiB in use by a process that is not seen here"):
        check_gpus(["2"], env, False)


def test_a_free_gpu_beside_busy_ones_is_given(env: dict[str, str]) -> None:
    assert [gpu.index for gpu in check_gpus(["0"], env, False)] == [0]


def test_asking_for_a_gpu_without_nvidia_smi_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"no nvidia-smi, so no GPU 0, 1") as caught:
        check_gpus(["0", "1"], {"PATH": str(tmp_path)}, False, on_cpu="--device cpu")
    assert caught.value.hint == "run on its CPUs with --device cpu, or choose another machine"


def test_a_failing_nvidia_smi_is_quoted(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, then="echo Failed to initialize NVML: Driver/library version mismatch; exit 18")
    with pytest.raises(AgentError, match="ended with 18: Failed to initialize NVML: Driver/library version mismatch"):
        list_gpus(env)


def test_a_query_that_hangs_ends_with_the_one_that_failed(tmp_path: Path) -> None:
    waits = f"until [ -s {tmp_path}/pid ]; do sleep 0.01; done; exit 9"
    then = f'case "$1" in --query-gpu=*) {waits};; esac; echo $$ > {tmp_path}/pid; exec sleep 60'
    with pytest.raises(AgentError, match="ended with 9"):
        check_gpus(["0"], fake_smi(tmp_path, then=then), False)
    hung = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(process_of(hung)))


def test_a_hanging_nvidia_smi_ends_in_an_error(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, then="exec sleep 60")
    with pytest.raises(AgentError, match="no answer within"):
        list_gpus(env, timeout_s=0.3)
