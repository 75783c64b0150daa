"""GPUs of the host by nvidia-smi; a script of that name on PATH stands for it."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from deployer.agent.gpus.nvidia import Gpu, holders, list_gpus, read_gpus
from deployer.agent.host.errors import AgentError
from deployer.agent.host.processes import is_running, process_of
from tests.support.jobs import wait_for
from tests.support.smi import fake_smi

GPUS = """\
0, GPU-aaaa1111-0000, NVIDIA H100 80GB HBM3, 81559, 4
1, GPU-aabb2222-0000, NVIDIA H100 80GB HBM3, 81559, 70321
2, GPU-cccc3333-0000, NVIDIA H100 80GB HBM3, 81559, 30000
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return fake_smi(tmp_path, gpus=GPUS, apps=f"GPU-aabb2222-0000, {os.getpid()}, 70300\n")


def test_gpus_are_listed_with_their_memory(env: dict[str, str]) -> None:
    assert list_gpus(env)[1] == Gpu(1, "GPU-aabb2222-0000", "NVIDIA H100 80GB HBM3", 81559, 70321)
    assert [gpu.index for gpu in list_gpus(env)] == [0, 1, 2]


def test_a_holder_is_named_with_user_and_command(env: dict[str, str]) -> None:
    (holder,) = holders(env)
    assert (holder.gpu_uuid, holder.pid, holder.memory_mib) == ("GPU-aabb2222-0000", os.getpid(), 70300)
    assert holder.user == getpass.getuser()
    assert "python" in holder.command


def test_a_host_without_nvidia_smi_has_no_gpus(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    assert (list_gpus(env), holders(env)) == ([], [])


def test_figures_that_the_driver_does_not_tell_count_as_zero(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, gpus="0, GPU-1, NVIDIA GH200, [N/A], [N/A]\n", apps="GPU-1, 1, [N/A]\n")
    assert list_gpus(env) == [Gpu(0, "GPU-1", "NVIDIA GH200", 0, 0)]
    assert holders(env)[0].memory_mib == 0


@pytest.mark.parametrize(
    ("requested", "indices"),
    [(["0"], [0]), (["2", "0"], [2, 0]), (["GPU-cccc3333-0000"], [2]), (["GPU-aaaa"], [0]), (["auto:2"], [])],
)
def test_gpus_are_found_by_index_uuid_or_its_beginning(
    env: dict[str, str], requested: list[str], indices: list[int]
) -> None:
    assert [gpu.index for gpu in read_gpus(requested, env).named] == indices


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
        read_gpus(requested, env)


COUNTS = [("3", "auto:3 asks for 3 GPUs"), ("1", "auto:1 asks for one GPU"), ("-1", ""), ("100", ""), ("GPU-dddd", "")]


@pytest.mark.parametrize(("requested", "says"), COUNTS)
def test_who_may_have_meant_a_number_of_gpus_is_told_how_to_ask_for_it(
    tmp_path: Path, requested: str, says: str
) -> None:
    index = "7" if requested == "1" else "0"
    with pytest.raises(AgentError) as caught:
        read_gpus([requested], fake_smi(tmp_path, gpus=f"{index}, GPU-1, NVIDIA H100, 81559, 4\n"))
    meant = f". {requested} is the index of one GPU; --gpus {says}" if says else ""
    assert caught.value.hint == "name another GPU with --gpus or target.gpu_ranks" + meant


def test_several_indices_are_no_number_of_gpus(env: dict[str, str]) -> None:
    with pytest.raises(AgentError) as caught:
        read_gpus(["0", "4"], env)
    assert caught.value.hint == "name another GPU with --gpus or target.gpu_ranks"


def test_a_slice_is_found_by_its_uuid(env: dict[str, str]) -> None:
    (found,) = read_gpus(["MIG-1234-5678"], env).named
    assert (found.index, found.uuid, found.device) == (1, "MIG-1234-5678", "GPU-aabb2222-0000/MIG-1234-5678")


def test_busy_is_a_gpu_with_a_process_or_with_memory_in_use_by_none_that_is_seen(env: dict[str, str]) -> None:
    busy = read_gpus(["0"], env).busy()
    assert list(busy) == ["GPU-aabb2222-0000", "GPU-cccc3333-0000"]
    assert busy["GPU-aabb2222-0000"].startswith(f"pid {os.getpid()} of {getpass.getuser()}, ")
    assert busy["GPU-aabb2222-0000"].endswith(", 70300 MiB")
    assert (
        busy["GPU-cccc3333-0000"] == "30000 MiB in use by a process that this login cannot see (in another container?)"
    )


def test_auto_of_more_gpus_than_the_host_has_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(AgentError, match="has 3 GPUs, fewer than auto:4 asks for"):
        read_gpus(["auto:4"], env)


def test_asking_for_a_gpu_without_nvidia_smi_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"no nvidia-smi, so no GPU 0, 1") as caught:
        read_gpus(["0", "1"], {"PATH": str(tmp_path)}, on_cpu="--device cpu")
    assert caught.value.hint == "run on its CPUs with --device cpu, or choose another machine"


def test_a_failing_nvidia_smi_is_quoted(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, then="echo Failed to initialize NVML: Driver/library version mismatch; exit 18")
    with pytest.raises(AgentError, match="ended with 18: Failed to initialize NVML: Driver/library version mismatch"):
        list_gpus(env)


def test_a_query_that_hangs_ends_with_the_one_that_failed(tmp_path: Path) -> None:
    waits = f"until [ -s {tmp_path}/pid ]; do sleep 0.01; done; exit 9"
    then = f'case "$1" in --query-gpu=*) {waits};; esac; echo $$ > {tmp_path}/pid; exec sleep 1000'
    with pytest.raises(AgentError, match="ended with 9"):
        read_gpus(["0"], fake_smi(tmp_path, then=then))
    hung = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(process_of(hung)))


def test_a_hanging_nvidia_smi_ends_in_an_error(tmp_path: Path) -> None:
    env = fake_smi(tmp_path, then="exec sleep 1000")
    with pytest.raises(AgentError, match="no answer within"):
        list_gpus(env, timeout_s=0.3)


def test_nvidia_smi_that_cannot_be_started_is_an_error_of_the_host(env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/no/such/shell\n")
    with pytest.raises(AgentError, match="nvidia-smi cannot be started: No such file or directory") as refused:
        read_gpus(["0"], env)
    assert (refused.value.kind, refused.value.hint) == ("host", "repair the GPU driver")
