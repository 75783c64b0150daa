"""A checkpoint written beside the training holds the values from its step border, whatever comes after."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.ranks import FORKED, run_ranks
from tests.support.saves import Gate, begin, start, step
from tests.support.tiny import ALONE
from tests.support.trainings import build
from trainer.batch import Batch, LossSum
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.load import load, read_full
from trainer.checkpoint.shards import sharded_state
from trainer.dist import Dist
from trainer.host_memory import available_bytes
from trainer.optim.build import build_optimizer
from trainer.saver.copy_memory import RESERVE_BYTES, SpareMemory, expected_bytes, spare_bytes, why_no_room
from trainer.saver.process import Launched
from trainer.saver.region import pack, packed_bytes, unpack
from trainer.saver.staging import Staging
from trainer.saver.writer import Writer
from trainer.schema import OptimConfig
from trainer.train import loop
from trainer.train.saves import Saver
from trainer.train.step import train_step

GIB = 2**30


def mutate_during_a_save(dist: Dist, folder: str, prepared: bool) -> dict[str, torch.Tensor]:
    """Save, change everything before a byte is written; the values at the save of the model and of one moment."""
    model, optimizer = start(dist)
    step(model, optimizer)
    gate = Gate("begun")
    writer = Writer(dist, beside=FORKED, on_stage=gate)
    if prepared:
        assert writer.prepare(model, optimizer) is None
    before = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    before["exp_avg"] = whole(optimizer.state[model.mid.weight]["exp_avg"]).clone()
    begin(writer, folder, 1, model, optimizer)
    step(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(9.0)
    gate.open()
    writer.result()
    writer.close()
    return before


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("prepared", [True, False])
def test_what_changes_after_a_save_has_begun_is_not_in_it(tmp_path, ranks, prepared):
    before = run_ranks(mutate_during_a_save, ranks, str(tmp_path), prepared, savers=True)[0]
    state = read_full(tmp_path / "step_000001")
    assert torch.equal(state["optimizer"]["mid.weight"]["exp_avg"], before.pop("exp_avg"))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in before.items())
    assert all(tensors["step"] == 1 for tensors in state["optimizer"].values())


def test_start_returns_before_anything_is_written(tmp_path):
    gate = Gate("begun")
    writer = Writer(ALONE, beside=FORKED, on_stage=gate)
    begin(writer, tmp_path, 1, *start(ALONE))
    assert gate.passed == ["staged"]
    assert not writer.has_ended()
    assert list(tmp_path.glob("step_*")) == []
    gate.open()
    assert writer.result().path == tmp_path / "step_000001"
    writer.close()


def test_second_save_of_a_run_waits_for_the_first_and_the_training_between_does_not(rows, tmp_path):
    run = build(rows, tmp_path, backend="pytorch", steps=3, save_every=1, eval_every=0)
    gate, events, loss_fn = Gate("begun"), [], run.loss_fn

    def at(point: str) -> None:
        gate(point)
        events.append(point)

    def forward(module: nn.Module, batch: Batch) -> LossSum:
        if "staged" in events:
            gate.open()
        events.append("forward")
        return loss_fn(module, batch)

    run.loss_fn = forward
    loop.train(run, on_stage=at, beside=FORKED)
    saves = [events[begin:end] for begin, end in pairwise([i for i, e in enumerate(events) if e == "staged"])]
    assert "forward" in saves[0][: saves[0].index("begun")]
    assert all("pruned" in save for save in saves)
    assert [events.count(point) for point in ("staged", "pruned")] == [3, 3]


class OpensWhenTold:
    """In the place of a run's log: keeps its notes, and opens the gate when so many say that a save is waited for."""

    def __init__(self, gate: Gate, times: int) -> None:
        self.notes: list[str] = []
        self._gate, self._times = gate, times

    def note(self, text: str) -> None:
        self.notes.append(text)
        if len(self.notes) == self._times:
            self._gate.open()


def told_while_stuck(rows: str, folder: Path, *, patience_s: tuple[float, float], times: int) -> list[str]:
    run = build(rows, folder, backend="pytorch", steps=3, save_every=1, eval_every=0)
    train_step(run, 0, lr=1e-3)
    gate = Gate("begun")
    run.log = OpensWhenTold(gate, times)
    saver = Saver(run, on_stage=gate, beside=FORKED, patience_s=patience_s)
    saver.save(1, must_succeed=False)
    saver.finish()
    return run.log.notes


def test_wait_for_a_save_that_is_stuck_is_told_until_it_ends(rows, tmp_path):
    *waiting, last = told_while_stuck(rows, tmp_path, patience_s=(0.01, 0.01), times=3)
    assert len(waiting) >= 3
    assert set(waiting) == {f"note: still waiting for the save of step 1 into {tmp_path / 'checkpoints'}"}
    assert last.startswith(f"saved {tmp_path / 'checkpoints' / 'step_000001'} (")


def test_wait_for_a_save_that_is_stuck_is_told_first_after_a_time_of_its_own(rows, tmp_path):
    waiting, last = told_while_stuck(rows, tmp_path, patience_s=(0.01, 3600.0), times=1)
    assert "still waiting" in waiting and last.startswith("saved ")


def test_synchronous_save_is_written_when_start_returns(tmp_path):
    writer = Writer(ALONE, beside=None)
    begin(writer, tmp_path, 1, *start(ALONE))
    assert writer.has_ended()
    assert (tmp_path / "step_000001" / "COMPLETE").exists()
    writer.close()


def test_points_of_a_save_are_told_in_order(tmp_path):
    gate = Gate("none")
    writer = Writer(ALONE, beside=FORKED, on_stage=gate)
    begin(writer, tmp_path, 1, *start(ALONE))
    writer.close()
    points = "staged begun shards random state marker renamed committed pruned"
    assert gate.passed == points.split()


def save_a_nan_beside(dist: Dist, folder: str) -> tuple[str, bool]:
    model, optimizer = start(dist)
    step(model, optimizer)
    if dist.rank == dist.world_size - 1:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(float("inf"))
    writer = Writer(dist, beside=FORKED)
    begin(writer, folder, 1, model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        writer.result()
    writer.close()
    return str(caught.value), any(Path(folder).glob("*step*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_state_that_is_not_finite_is_not_saved(tmp_path, ranks):
    results = run_ranks(save_a_nan_beside, ranks, str(tmp_path), savers=True)
    assert "exp_avg: values that are not finite" in results[-1][0]
    assert not any(left for _, left in results)


def prepare_where_one_rank_has_no_room(dist: Dist, folder: str) -> tuple[str | None, bool]:
    model, optimizer = start(dist)
    step(model, optimizer)
    writer = Writer(dist, beside=replace(FORKED, available=0 if dist.rank == 1 else GIB))
    reason = writer.prepare(model, optimizer)
    begin(writer, folder, 1, model, optimizer)
    ended = writer.has_ended()  # a save that is not beside the training is over when start returns
    writer.result()
    writer.close()
    return reason, ended


def test_no_room_for_a_copy_on_one_rank_is_told_by_all_and_none_saves_beside(tmp_path):
    first, second = run_ranks(prepare_where_one_rank_has_no_room, 2, str(tmp_path))
    assert first == second
    assert first[0].endswith("of which 0.00 MiB are available")
    assert first[1]


def start_with_momentum() -> tuple[nn.Module, torch.optim.Optimizer]:
    """An optimizer whose state nobody expects."""
    model, _ = start(ALONE)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_memory_is_used_again_and_grows_where_the_state_is_larger_than_expected(tmp_path):
    model, optimizer = start_with_momentum()
    writer = Writer(ALONE, beside=FORKED)
    assert not writer.is_ready()
    writer.prepare(model, optimizer)
    for number in (1, 2):
        step(model, optimizer)
        begin(writer, tmp_path, number, model, optimizer)
        assert writer.is_ready()
        writer.result()
    writer.close()
    first, second = (start_with_momentum() for _ in range(2))
    load(tmp_path / "step_000001", *first, ALONE)
    load(tmp_path / "step_000002", *second, ALONE)
    step(*first)
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))


def test_memory_of_the_device_is_reserved_once_when_saves_can_be_beside_the_training():
    model, optimizer = start_with_momentum()
    writer = Writer(ALONE, beside=FORKED)
    assert not writer.reserve()
    writer.prepare(model, optimizer)
    while not writer.is_ready():
        time.sleep(0.05)
    assert writer.reserve()
    assert not writer.reserve()
    writer.close()


def no_process() -> Launched:
    raise OSError("no more processes")


def test_no_memory_of_the_device_is_reserved_where_no_saver_has_come_up():
    model, optimizer = start_with_momentum()
    writer = Writer(ALONE, beside=replace(FORKED, launch=no_process))
    writer.prepare(model, optimizer)
    while not writer.is_ready():
        time.sleep(0.05)
    assert not writer.reserve()
    writer.close()


def copy_of(state: dict, *, piece_bytes: int = 2**20, spare: int | None = None) -> dict:
    """What a saver would find of a state that was copied by way of so many bytes of spare memory."""
    taken = None if spare is None else lambda needed: torch.empty(min(needed, spare), dtype=torch.uint8)
    staging = Staging(torch.device("cpu"), piece_bytes=piece_bytes, spare=taken)
    packed, wait = staging.copy(state)
    wait()
    return unpack(packed, staging.region)


def test_tied_tensors_are_copied_once():
    weight, puts = torch.ones(4, 3), []
    state = {"model": {"a": weight, "b": weight.detach(), "c": weight.clone()}}
    packed = pack(state, lambda offset, tensor: puts.append(offset))
    assert packed["model"]["a"] == packed["model"]["b"]
    assert puts == [0, 64]
    assert packed_bytes(state) == 128


@pytest.mark.parametrize("spare", [None, 0, 100, 20_000, 30_000, 10**6], ids=str)
@pytest.mark.parametrize("piece_bytes", [4096, 2**20])
def test_copy_keeps_values_and_other_entries_whatever_the_pieces_and_the_spare_memory(piece_bytes, spare):
    tensors = {
        "long": torch.arange(5000.0),
        "turned": torch.arange(6000).view(2, 3000).t(),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    found = copy_of({"model": tensors, "optimizer": {"a": {"step": 3}}}, piece_bytes=piece_bytes, spare=spare)
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in tensors.items())
    assert found["model"]["half"].dtype == torch.bfloat16
    assert found["optimizer"] == {"a": {"step": 3}}


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [(100, 100, 50), (55, 100, 50), (40, 100, 35), (5, 100, 0), (0, 100, 0), (40, 24, 38), (30, 24, 28), (1, 24, 0)],
)
def test_a_copy_on_the_device_leaves_a_part_of_its_memory_free_and_2_gib_at_least(free, total, expected):
    assert spare_bytes(50 * 2**30, free * 2**30, total * 2**30) == expected * 2**30


def test_spare_memory_is_settled_at_the_first_save_and_none_once_memory_ran_short(monkeypatch):
    free, retries = iter([(RESERVE_BYTES + 55, 100)]), iter([3, 3, 4])  # the device is asked once
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: next(free))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(retries)})
    spare = SpareMemory(torch.device("meta"))
    assert [len(spare.take(80)) for _ in range(3)] == [55, 55, 0]


def test_only_values_that_fit_as_a_whole_go_by_way_of_spare_memory():
    spare = torch.zeros(128, dtype=torch.uint8)
    staging = Staging(torch.device("cpu"), spare=lambda needed: spare)
    first, second = torch.ones(16), torch.full((40,), 2.0)  # 64 and 160 bytes
    staging.copy({"model": {"first": first, "second": second}})
    assert torch.equal(spare[:64].view(torch.float32), first)
    assert not spare[64:].any()


def test_memory_that_cuda_does_not_pin_fails_no_kernel_that_comes_later(monkeypatch):
    kept: list[str] = []  # as CUDA keeps an error until a kernel is launched

    def register(*_: int) -> int:
        kept.append("CUDA error: out of memory")
        return 2

    def launch(*_: object, **__: object) -> None:
        raise RuntimeError(kept.pop())

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "ones", launch)
    staging = Staging(torch.device("cuda"), piece_bytes=4096)
    staging.allocate(10_000, beside=False)
    assert staging.region.size == 10_000
    assert kept == []
    staging.close()  # takes back the pins of nothing


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_memory_is_made_before_the_first_step_for_what_there_is_after_it(optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 3, bias=False))
    built = build_optimizer(model, OptimConfig(learning_rate=1e-3, optimizer=optimizer))
    expected = expected_bytes(model, built)
    model(torch.ones(2, 128)).sum().backward()
    built.step()
    needed = packed_bytes(sharded_state(model, built))
    assert needed <= expected <= 1.01 * needed + 2 * 1024  # torchao's optimizers share a table among tensors
    assert expected_bytes(model, built) == pytest.approx(needed, abs=2 * 1024)


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (3, True), (4, False)])
def test_copies_of_all_ranks_of_a_node_must_fit_into_its_memory(ranks, fits):
    reason = why_no_room(2 * GIB, available=10 * GIB, ranks=ranks)  # and their savers
    assert reason is None if fits else "4 rank(s) would copy 2.00 GiB each" in reason


def memory_files(folder: Path, *, limit: str) -> dict[str, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "a" / "b").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:       5000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    for name, text in (("max", limit), ("current", "900000"), ("stat", "anon 1\ninactive_file 300000\n")):
        (cgroups / "a" / f"memory.{name}").write_text(text)
    return {"proc": proc, "cgroups": cgroups}


@pytest.mark.parametrize(("limit", "left"), [("1000000", 400_000), ("max", 5_120_000)])
def test_available_memory_is_what_the_tightest_control_group_leaves(tmp_path, limit, left):
    assert available_bytes(**memory_files(tmp_path, limit=limit)) == left


def test_available_memory_is_unknown_where_nothing_says_it(tmp_path):
    assert available_bytes(proc=tmp_path, cgroups=tmp_path) is None


def test_copy_of_8_bit_state_is_whole_and_of_its_own_memory():
    state = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((4, 1024), block_size=256)
    state.copy_(torch.ones(4, 1024))
    found = copy_of({"a": state})["a"]
    state.copy_(torch.zeros(4, 1024))
    assert type(found) is type(state)
    assert torch.equal(found.dequantize(), torch.ones(4, 1024))
