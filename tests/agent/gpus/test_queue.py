"""Who gets which GPUs, decided purely: first in, first out, and nobody passes one who waits for the same GPU."""

from __future__ import annotations

import pytest

from deployer.agent.gpus.nvidia import Gpu, GpuView, Holder
from deployer.agent.gpus.queue import freest, grant, overlap, queue_line, queue_view, refusal
from deployer.agent.gpus.view import LEASE, SHARED, TICKET, Claim, Waiter

GPUS = [Gpu(n, f"GPU-{n}", "H100", 80000, used) for n, used in enumerate([300, 4, 200, 4])]


def lease(*indices: int, kind: str = LEASE) -> Claim:
    return Claim(kind, "holder", tuple(f"GPU-{n}" for n in indices), uid=0, since=1000.0)


def ticket(number: int, *indices: int, auto: int = 0) -> Claim:
    devices = tuple(f"GPU-{n}" for n in indices)
    return Claim(TICKET, f"j{number}", devices, auto, number, uid=0, file=str(number))


def granted(*claims: Claim, busy: tuple[int, ...] = ()) -> dict[int, list[int]]:
    found = grant(claims, GPUS, {f"GPU-{n}" for n in busy})
    return {int(file): [int(d[4:]) for d in devices] for file, devices in found.items()}


@pytest.mark.parametrize(
    ("claims", "busy", "expected"),
    [
        ([ticket(1, 0, 1)], (), {1: [0, 1]}),
        ([lease(1), ticket(1, 0, 1)], (), {}),
        ([ticket(1, 0, 1)], (0,), {}),
        ([lease(0, kind=SHARED), ticket(1, 0)], (), {1: [0]}),
        ([ticket(2, 0), ticket(1, 0)], (), {1: [0]}),  # by number, not by order
        ([lease(0), ticket(1, 0, 1), ticket(2, 1)], (), {}),  # 1 is free, and the first in the queue waits for it
        ([lease(0), ticket(1, 0, 1), ticket(2, 2)], (), {2: [2]}),
        ([ticket(1, auto=2)], (), {1: [1, 3]}),  # least memory in use
        ([ticket(1, auto=3)], (), {1: [1, 2, 3]}),
        ([lease(1), ticket(1, auto=2)], (3,), {1: [0, 2]}),
        ([lease(0), ticket(1, auto=4), ticket(2, 3)], (), {}),  # who takes any GPUs waits for all
        ([lease(0), ticket(1, 0), ticket(2, auto=3), ticket(3, auto=1)], (), {2: [1, 2, 3]}),
        ([ticket(1, auto=2), ticket(2, auto=2), ticket(3, auto=1)], (), {1: [1, 3], 2: [0, 2]}),
        ([lease(), ticket(1, 0), ticket(2, auto=1)], (), {}),  # it cannot be read, and could be of any
    ],
)
def test_tickets_that_may_start(claims: list[Claim], busy: tuple[int, ...], expected: dict[int, list[int]]) -> None:
    assert granted(*claims, busy=busy) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("GPU-1", "GPU-1", True),
        ("GPU-1", "GPU-1/MIG-a", True),
        ("GPU-1/MIG-a", "GPU-1", True),
        ("GPU-1/MIG-a", "GPU-1/MIG-b", False),
        ("GPU-1", "GPU-11/MIG-a", False),
    ],
)
def test_a_gpu_and_its_slices_exclude_each_other(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected


def test_freest_beside_others_takes_what_is_not_to_be_avoided_first() -> None:
    assert freest(GPUS, 2, ["GPU-1", "GPU-3"]) == ("GPU-0", "GPU-2")
    assert freest(GPUS, 3, ["GPU-1", "GPU-3"]) == ("GPU-0", "GPU-1", "GPU-2")


def test_place_in_the_queue_counts_those_who_wait_for_the_same_gpus() -> None:
    claims = [lease(0), ticket(1, 3), ticket(2, 0), ticket(3, 0)]
    view = queue_view(claims[3], claims, GpuView(GPUS, [GPUS[0]], []))
    assert (view.position, view.before) == (2, (Waiter("j2", "root"),))
    assert queue_line(view, now=1000.0 + 7200) == (
        "position 2; GPU 0 is held by job holder of user root for 2h; before you: j2 of root"
    )


def test_refusal_of_any_gpus_says_how_many_and_who_has_the_others() -> None:
    using = [Holder("GPU-2", 77, "eve", "python", 70300)]
    wanted = Claim(TICKET, "new", (), auto=3, number=9, file="mine")
    view = queue_view(wanted, [lease(0)], GpuView(GPUS, [], using))
    assert refusal(view, now=1060.0) == (
        "fewer GPUs are free than auto:3 asks for; GPU 0 is held by job holder of user root for 1m; "
        "GPU 2 is busy: pid 77 of eve, python, 70300 MiB"
    )


def test_lease_that_cannot_be_read_is_said_to_count_for_every_gpu() -> None:
    unread = lease(0)._replace(devices=())
    view = queue_view(ticket(1, 0), [unread], GpuView(GPUS, [GPUS[0]], []))
    assert (view.held[0].job, view.held[0].is_unread) == ("holder", True)
    held = "GPU 0 is held by job holder of user root for 1m"
    assert refusal(view, now=1060.0) == f"{held} (its lease cannot be read, so it counts for every GPU)"
    locked = view._replace(held=(view.held[0]._replace(locker="pid 7"),))
    both = "its lease cannot be read, so it counts for every GPU; its lease is locked by pid 7"
    assert refusal(locked, now=1060.0) == f"{held} ({both})"
