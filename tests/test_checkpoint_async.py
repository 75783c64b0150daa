"""A checkpoint written beside the training holds the values from its step border, whatever comes after."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.test_checkpoint import ALONE, start, step
from tests.test_loop import build
from trainer import loop
from trainer.batch import Batch, LossSum
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.loading import load, read_full
from trainer.checkpoint.retention import Keep
from trainer.checkpoint.staging import Staging, copy_of, sizes_of, why_no_room
from trainer.checkpoint.writer import Writer
from trainer.dist import Dist
from trainer.hostmem import available_bytes

GIB = 2**30


class Gate:
    """Holds the writer's thread at a point of a save until it is opened."""

    def __init__(self, point: str) -> None:
        self._point = point
        self._open = threading.Event()
        self.passed: list[str] = []

    def __call__(self, point: str) -> None:
        if point == self._point:
            assert self._open.wait(30)
        self.passed.append(point)

    def open(self) -> None:
        self._open.set()


def begin(writer: Writer, folder: Path | str, at: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    writer.start(Path(folder), at, model, optimizer, {}, keep=Keep())


def mutate_during_a_save(dist: Dist, folder: str, prepared: bool) -> dict[str, torch.Tensor]:
    """Save, change everything before a byte is written; the values at the save of the model and of one moment."""
    model, optimizer = start(dist)
    step(model, optimizer)
    gate = Gate("begun")
    writer = Writer(dist, asynchronous=True, at=gate)
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
    before = run_ranks(mutate_during_a_save, ranks, str(tmp_path), prepared)[0]
    state = read_full(tmp_path / "step_000001")
    assert torch.equal(state["optimizer"]["mid.weight"]["exp_avg"], before.pop("exp_avg"))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in before.items())
    assert all(tensors["step"] == 1 for tensors in state["optimizer"].values())


def test_start_returns_before_anything_is_written(tmp_path):
    gate = Gate("begun")
    writer = Writer(ALONE, asynchronous=True, at=gate)
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
    loop.train(run, at=at)
    saves = [events[begin:end] for begin, end in pairwise([i for i, e in enumerate(events) if e == "staged"])]
    assert "forward" in saves[0][: saves[0].index("begun")]
    assert all("pruned" in save for save in saves)
    assert [events.count(point) for point in ("staged", "pruned")] == [3, 3]


def test_synchronous_save_is_written_when_start_returns(tmp_path):
    writer = Writer(ALONE, asynchronous=False)
    begin(writer, tmp_path, 1, *start(ALONE))
    assert writer.has_ended()
    assert (tmp_path / "step_000001" / "COMPLETE").exists()
    writer.close()


def test_points_of_a_save_are_told_in_order(tmp_path):
    gate = Gate("none")
    writer = Writer(ALONE, asynchronous=True, at=gate)
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
    writer = Writer(dist, asynchronous=True)
    begin(writer, folder, 1, model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        writer.result()
    writer.close()
    return str(caught.value), any(Path(folder).glob("*step*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_state_that_is_not_finite_is_not_saved(tmp_path, ranks):
    results = run_ranks(save_a_nan_beside, ranks, str(tmp_path))
    assert "exp_avg: values that are not finite" in results[-1][0]
    assert not any(left for _, left in results)


def prepare_where_one_rank_has_no_room(dist: Dist, folder: str) -> tuple[str | None, bool]:
    model, optimizer = start(dist)
    step(model, optimizer)
    writer = Writer(dist, asynchronous=True, available=0 if dist.rank == 1 else GIB)
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


def test_buffers_are_used_again_and_grow_with_the_state(tmp_path):
    model, optimizer = start(ALONE)
    writer = Writer(ALONE, asynchronous=True)
    assert not writer.is_ready()
    writer.prepare(model, optimizer)  # the optimizer has no state yet
    for number in (1, 2):
        step(model, optimizer)
        begin(writer, tmp_path, number, model, optimizer)
        assert writer.is_ready()
        writer.result()
    writer.close()
    first, second = (start(ALONE) for _ in range(2))
    load(tmp_path / "step_000001", *first, ALONE)
    load(tmp_path / "step_000002", *second, ALONE)
    step(*first)
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))


def test_tied_tensors_take_one_buffer():
    weight = torch.ones(4, 3)
    assert list(sizes_of({"model": {"a": weight, "b": weight.detach(), "c": weight.clone()}})) == [
        "/model/a",
        "/model/c",
    ]


def test_copy_keeps_values_and_other_entries_apart_from_the_original():
    state = {"model": {"a": torch.ones(2), "b": torch.empty(0, 3)}, "optimizer": {"a": {"step": 3}}}
    staging = Staging(torch.device("cpu"))
    staging.allocate(sizes_of(state))
    copied, wait = staging.copy(state)
    state["model"]["a"].zero_()
    wait()
    assert copied["model"]["a"].tolist() == [1, 1]
    assert copied["model"]["b"].shape == (0, 3)
    assert copied["optimizer"] == {"a": {"step": 3}}


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (4, True), (5, False)])
def test_copies_of_all_ranks_of_a_node_must_fit_into_its_memory(ranks, fits):
    reason = why_no_room(2 * GIB, available=10 * GIB, ranks=ranks)
    assert reason is None if fits else "5 rank(s) would copy 2.00 GiB each" in reason


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


def test_copy_of_8_bit_state_is_of_its_own_memory():
    state = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((4, 1024), block_size=256)
    state.copy_(torch.ones(4, 1024))
    kept = copy_of(state)
    state.copy_(torch.zeros(4, 1024))
    assert torch.equal(kept.dequantize(), torch.ones(4, 1024))
