"""What a rank says of a GPU that is full, of NCCL and gloo texts as people have met them, and of an exit in mid-run."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from tests.support.limits import PATIENCE
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_shape
from tests.support.trainings import training_on
from trainer.dist import Dist
from trainer.failures.comm_errors import comm_facts, explain
from trainer.failures.diagnose import claim_failure, describe, is_lost_peer
from trainer.failures.oom import OutOfMemory, oom_advice, parse_oom, render_oom
from trainer.schema import Config, TargetConfig, TrainConfig
from trainer.start.launch import build_debug_env, build_launch_env
from trainer.start.rank import exit_code, run_recipe
from trainer.startup import Phase, Startup

GIB = 2**30

# --- out of memory ----------------------------------------------------------------------------------------------------

FULL = (
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of which 12.73 GiB is "
    "free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB is "
    "allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
SHARED = (
    "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 3 has a total capacity of 23.65 GiB of which 11.06 MiB is "
    "free. Including non-PyTorch memory, this process has 3.60 GiB memory in use. Of the allocated memory 2.90 GiB is "
    "allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated."
)


def test_torchs_message_gives_its_figures():
    facts = parse_oom(FULL)
    assert (facts.gpu, facts.asked, facts.total) == (0, round(22.78 * GIB), round(31.47 * GIB))
    assert (facts.free, facts.in_use) == (round(12.73 * GIB), round(18.73 * GIB))
    assert (facts.allocated, facts.in_pieces) == (round(9.08 * GIB), round(9.35 * GIB))
    assert facts.is_fragmented
    assert facts.others < GIB


def test_message_without_figures_is_told_without_them():
    text = render_oom(parse_oom("CUDA out of memory."), where="in the forward pass of step 1", estimate=GIB, savings=[])
    assert text.splitlines()[0] == "the GPU is out of memory, in the forward pass of step 1"


def run_out_of_memory(message: str, rows: str = "rows.jsonl") -> str:
    ALONE.progress.enter("backward", 7)
    config = training_on(rows, micro_batch_size=4, global_batch_size=8)
    with pytest.raises(OutOfMemory) as caught, oom_advice(lambda: config, tiny_shape(), ALONE, on_failure=lambda: None):
        raise torch.OutOfMemoryError(message)
    return str(caught.value)


def test_full_gpu_is_told_with_what_each_change_saves():
    first, second, *rest = run_out_of_memory(FULL).splitlines()
    assert first.startswith("GPU 0 is out of memory: 22.78 GiB were asked for, in the backward pass of step 7, at ")
    assert second == "  12.73 GiB of 31.47 GiB are free; 9.08 GiB hold tensors, 9.35 GiB are reserved in pieces"
    assert any(line.startswith("  train.micro_batch_size=2 saves ") for line in rest)
    assert any(line.startswith("  parallel.activation_checkpointing=full saves ") for line in rest)
    assert rest[-1] == "  target.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins the 9.35 GiB in pieces"


def test_what_the_next_start_does_is_told_after_the_advice():
    advice = oom_advice(
        lambda: training_on("rows.jsonl"), tiny_shape(), ALONE, on_failure=lambda: "another plan is next"
    )
    with pytest.raises(OutOfMemory) as caught, advice:
        raise torch.OutOfMemoryError(SHARED)
    assert str(caught.value).splitlines()[-1] == "note: another plan is next"


def test_memory_that_others_hold_is_named():
    text = run_out_of_memory(SHARED)
    assert "  other processes hold 20.04 GiB of this GPU (nvidia-smi shows them): end them or take another" in text
    assert "expandable_segments" not in text


# --- NCCL and gloo ----------------------------------------------------------------------------------------------------

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
TEXTS = {
    NCCL + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\nncclInvalidUsage: This usually "
    "reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA "
    "device 34000": "rank 1 and rank 0 use the same GPU (bus id 34000)",
    NCCL + "unhandled system error, NCCL version 2.18.6\nncclSystemError: System call (e.g. socket, malloc) or "
    "external library call failed or device error. \nLast error:\nsocketStartConnect: Connect to "
    "192.168.19.14<52822> failed : No route to host": (
        "NCCL reached for 192.168.19.14 port 52822 over the network and got: No route to host"
    ),
    NCCL + "unhandled system error, NCCL version 2.25.1\nLast error:\nError while creating shared memory segment "
    "/dev/shm/nccl-GkRn7s (size 9637888)": "/dev/shm has no room for NCCL's buffers",
    NCCL + "internal error\nLast error:\nBootstrap : no socket interface found": (
        "NCCL finds no network interface that it may use"
    ),
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
    "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.": (
        "no answer to the collective ALLREDUCE within 600000 ms: a rank never came to it"
    ),
    NCCL + "remote process exited or there was a network error, NCCL version 2.20.5\nncclRemoteError: A call failed "
    "possibly due to a network error or a remote process exiting prematurely.": (
        "another rank ended without a word, or the connection to it broke"
    ),
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to "
    "complete": "another rank did not come to a collective within 1800000 ms",
    "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error": (
        "gloo, which carries flags and barriers, cannot connect the ranks"
    ),
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(OpType="
    "ALLREDUCE), but Rank 1 is running collective: CollectiveFingerPrint(OpType=BROADCAST)": (
        "the ranks called different collectives"
    ),
    NCCL + "unhandled cuda error, NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
    "error:\nCuda failure 'out of memory'": "NCCL found no GPU memory for its own buffers",
    NCCL + "unhandled cuda error, NCCL version 2.19.3\nLast error:\nCuda failure 217 'peer access is not supported "
    "between these two devices'": "these GPUs cannot reach each other's memory",
    "The server socket on TCPStore has failed to listen on any local network address: EADDRINUSE": (
        "the port that the ranks would meet at is taken"
    ),
}


@pytest.mark.parametrize(("text", "cause"), TEXTS.items(), ids=range(len(TEXTS)))
def test_text_that_people_met_is_explained(text, cause):
    known = explain(text)
    assert known is not None
    assert known.cause == cause


LOST = "another rank ended without a word, or the connection to it broke"


def test_lost_peer_keeps_its_advice_and_this_ranks_facts():
    text = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:2"
    told = describe(RuntimeError(text)).splitlines()
    assert told[0] == f"Error: {LOST}"
    assert told[1].endswith(f": RuntimeError: {text}")
    assert told[2].startswith("hint: look for the first failing rank's message; without one a signal ended it")
    assert "  interfaces: lo 127.0.0.1" in "\n".join(told)


def test_network_errors_that_are_not_the_ranks_own_are_no_lost_peer():
    refused = next(text for text in TEXTS if "socketStartConnect" in text).replace("No route to host", "Broken pipe")
    assert not is_lost_peer(RuntimeError(refused))
    assert not is_lost_peer(BrokenPipeError(32, "Broken pipe"))


def test_text_of_something_else_is_not_explained():
    assert explain("Address already in use: the database") is None
    assert explain("shape '[3, 4]' is invalid for input of size 5") is None


def test_communication_failure_is_told_with_cause_and_this_ranks_facts():
    text = describe(RuntimeError(next(iter(TEXTS))))
    assert "\ncause: rank 1 and rank 0 use the same GPU (bus id 34000)\nhint: name each GPU once" in text
    assert "\n  interfaces: lo 127.0.0.1" in text


def test_compiler_that_fails_is_told_with_its_reason_and_the_way_on():
    """As one does that finds a damaged library in its cache."""

    def inductor() -> None: ...

    text = describe(BackendCompilerFailed(inductor, OSError("/c/a.so: file too short"), None))
    assert text.startswith(
        "Error: BackendCompilerFailed: backend='inductor' raised: OSError: /c/a.so: file too short\n"
    )
    assert "hint: parallel.compile=false runs without the compiler; " in text


def test_facts_name_the_settings_in_force():
    assert comm_facts({"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "HOME": "/"})[-1] == (
        "settings: GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO"
    )
    assert comm_facts({})[-1] == "settings: none of NCCL_*, GLOO_*"


def test_debug_distributed_sets_what_torch_and_nccl_read():
    assert build_debug_env(Config()) == {}
    config = Config(train=TrainConfig(debug_distributed="detail"), target=TargetConfig(env={"NCCL_DEBUG": "WARN"}))
    env = build_launch_env(config, {}, cores=4)
    assert (env["TORCH_DISTRIBUTED_DEBUG"], env["TORCH_FR_BUFFER_SIZE"]) == ("DETAIL", "2000")
    assert env["NCCL_DEBUG"] == "WARN"  # what target.env says comes first


def mismatched(dist: Dist) -> str:
    """The two ranks call different collectives: what the check of `detail` makes of it, as it would be told."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()
    group = torch.distributed.new_group([0, 1], backend="gloo")
    try:
        if dist.rank == 0:
            torch.distributed.all_reduce(torch.ones(1), group=group)
        else:
            torch.distributed.broadcast(torch.ones(1), src=0, group=group)
    except RuntimeError as error:
        return describe(error)
    return "nobody noticed"


def test_different_collectives_are_noticed_with_debug_distributed_detail():
    for told in run_ranks(mismatched, 2):
        assert "cause: the ranks called different collectives" in told


# --- an exit in mid-run -----------------------------------------------------------------------------------------------


def test_exit_with_0_in_mid_run_is_a_failure():
    assert exit_code(SystemExit(0)) == 1
    assert exit_code(SystemExit(None)) == 1
    assert exit_code(SystemExit(7)) == 7
    assert describe(SystemExit(0)).startswith("Error: exit(0) was called in the middle of the run\n  in ")


def fail_in_loading(dist: Dist, template: str, run_dir: str) -> None:
    """Both ranks run the recipe; the chat template of rank 1 is not there."""
    path = template if dist.rank == 0 else "/nowhere/template.jinja"
    config = training_on("builtin:stdlib-docs", backend="fsdp", hang_timeout_s=30 * PATIENCE)
    sys.exit(run_recipe(with_template(config, path), Path(run_dir), dist, debug=False))


def with_template(config: Config, path: str) -> Config:
    return replace(config, data=replace(config.data, chat_template=path))


def test_rank_that_raises_is_named_and_all_ranks_end(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RuntimeError, match="ended without a result"):
        run_ranks(fail_in_loading, 2, str(template), str(tmp_path))
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["state"], outcome["rank"]) == ("failed", 1)
    assert "/nowhere/template.jinja" in outcome["error"]


class CtrlC(Startup):
    """Interrupts the recipe in its first phase."""

    def enter(self, phase: Phase) -> None:
        raise KeyboardInterrupt


def interrupted(dist: Dist, run_dir: str) -> int:
    dist = replace(dist, startup=CtrlC.of_process({}))
    return run_recipe(training_on("builtin:stdlib-docs", backend="pytorch"), Path(run_dir), dist, debug=False)


def test_interrupted_single_process_ends_at_once_though_a_thread_may_be_saving(tmp_path):
    with pytest.raises(RuntimeError, match="ended without a result"):
        run_ranks(interrupted, 1, str(tmp_path))
    assert "interrupted" in json.loads((tmp_path / "outcome.json").read_text())["error"]


def test_of_ranks_that_fail_at_the_same_moment_one_tells(tmp_path):
    with ThreadPoolExecutor(8) as ranks:
        told = list(ranks.map(lambda rank: claim_failure(tmp_path, rank, "the same mistake"), range(8)))
    assert told.count(True) == 1
