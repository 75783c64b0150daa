"""The copy that an asynchronous save takes by way of free GPU memory, against the values as they were."""

from collections.abc import Iterator

import pytest
import torch

from trainer.saver.region import Region
from trainer.saver.staging import Staging
from trainer.train.step import copy_to_host_async

DEVICE = torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture
def staging() -> Iterator[Staging]:
    """By way of what is free on the GPU."""
    made = Staging(DEVICE)
    yield made
    torch.cuda.synchronize()
    made.close()


def state_of(sizes_mib: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Random bits, in turn as fp32, bf16 and int64; a size of 0 is a scalar."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    return {
        f"{i}": torch.randint(256, (max(8, size * MIB),), dtype=torch.uint8, device=DEVICE, generator=generator).view(
            dtypes[i % 3]
        )
        for i, size in enumerate(sizes_mib)
    }


def is_in(region: Region, packed: dict, expected: dict[str, torch.Tensor]) -> bool:
    """Whether the region holds the expected bits, NaNs included, where the description says."""
    where = packed["model"]
    found = {name: region.tensor(where[name].offset, where[name].shape, where[name].dtype) for name in expected}
    return all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0, None], ids=["none", "a part", "all", "what is free"])
def test_copy_is_what_the_state_was_though_it_changes_at_once_and_others_take_all_memory(part):
    sizes = [0, 700, 300, 33, 500, 0, 1000, 129]
    spare = None if part is None else lambda needed: torch.empty(int(part * needed), dtype=torch.uint8, device=DEVICE)
    staging, taken = Staging(DEVICE, spare=spare), []
    try:
        for seed in range(3):
            state = state_of(sizes, seed)
            expected = {name: value.cpu() for name, value in state.items()}
            packed, wait = staging.copy({"model": state})
            staging.when_settled()
            for value in state.values():
                value.zero_()
            while torch.cuda.mem_get_info(DEVICE)[0] > 3 * 2**30:  # in the training's stream, the spare memory's too
                taken.append(torch.full((2**30,), 255, dtype=torch.uint8, device=DEVICE))
            wait()
            assert is_in(staging.region, packed, expected)
            taken.clear()
            torch.cuda.empty_cache()
    finally:
        taken.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        staging.close()


def test_memory_of_the_copy_goes_to_a_training_that_runs_short_and_the_next_save_takes_none(staging):
    state = state_of([4000], 0)
    staging.copy({"model": state})[1]()
    reserved, retries = torch.cuda.memory_reserved(DEVICE), torch.cuda.memory_stats(DEVICE)["num_alloc_retries"]
    free = torch.cuda.mem_get_info(DEVICE)[0]
    large = torch.empty(free + 3 * 2**30, dtype=torch.uint8, device=DEVICE)  # fits only where the copy was
    assert torch.cuda.memory_stats(DEVICE)["num_alloc_retries"] == retries + 1
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) < reserved
    expected = {name: value.cpu() for name, value in state.items()}
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    packed, wait = staging.copy({"model": state})
    wait()
    assert torch.cuda.max_memory_allocated(DEVICE) == before
    assert is_in(staging.region, packed, expected)


def test_memory_that_was_reserved_is_what_the_first_copy_takes(staging):
    state = state_of([1000, 200], 0)
    before = torch.cuda.memory_reserved(DEVICE)
    staging.reserve(2**30 + 2**28)
    reserved = torch.cuda.memory_reserved(DEVICE)
    assert reserved >= before + 2**30
    expected = {name: value.cpu() for name, value in state.items()}
    packed, wait = staging.copy({"model": state})
    wait()
    assert torch.cuda.memory_reserved(DEVICE) == reserved
    assert is_in(staging.region, packed, expected)


def test_what_a_step_tells_does_not_wait_for_the_copy_of_a_save_to_the_host(staging):
    size = 8 * 2**30
    state, values = torch.ones(size, dtype=torch.uint8, device=DEVICE), torch.tensor([1.5, float("nan")], device=DEVICE)
    staging.allocate(size, beside=False)
    copy_to_host_async(0, 0.1, 0.0, values.double()).read()  # takes memory and loads kernels, which wait for the device
    _, wait = staging.copy({"model": {"a": state}})
    told = copy_to_host_async(1, 0.1, 0.0, values.double())
    loss, other = told.read()
    assert loss == 1.5 and other != other
    assert not staging.region.bytes[-1]  # the last piece is still to come
    wait()
    assert staging.region.bytes[-1] == 1
