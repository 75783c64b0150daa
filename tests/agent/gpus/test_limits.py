"""An outer limit on a login's GPUs: jobs get GPUs within it, or are refused with both sets named."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.agent.gpus import claim, leases, nvidia
from deployer.agent.gpus.queue import grant
from deployer.agent.gpus.view import LEASE, TICKET, Claim, GpuRequest
from deployer.agent.host.errors import AgentError
from tests.support.smi import fake_smi

EIGHT = "".join(f"{n}, GPU-{n:04}, NVIDIA H100 80GB HBM3, 81559, {4 + n}\n" for n in range(8))
LISTING = """\
GPU 0: NVIDIA H100 (UUID: GPU-0000)
GPU 1: NVIDIA H100 (UUID: GPU-0001)
  MIG 1g.10gb     Device  0: (UUID: MIG-aaaa)
  MIG 1g.10gb     Device  1: (UUID: MIG-bbbb)
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host of eight GPUs whose leases are its own."""
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases").chmod(0o1777)
    monkeypatch.setenv("TORCHFERRY_LEASE_DIR", str(tmp_path / "leases"))
    made = fake_smi(tmp_path, gpus=EIGHT)
    (tmp_path / "listing").write_text(LISTING)
    return made


def limited(host: dict[str, str], limit: str | None) -> dict[str, str]:
    return host if limit is None else {**host, "CUDA_VISIBLE_DEVICES": limit}


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (None, None),
        ("all", None),
        ("4,5", ["4", "5"]),
        (" 5 , 4 ", ["5", "4"]),
        ("GPU-0004,GPU-0007", ["4", "7"]),
        ("GPU-0004", ["4"]),
        ("0,9,1", ["0"]),  # CUDA reads up to the first that is not there: a card that is missing
        ("9,0", []),
        ("0,-1,1", ["0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # Slurm, for a job without GPUs
        ("2,2", ["2"]),
        ("MIG-aaaa,3", ["MIG-aaaa", "3"]),
        ("MIG-none", []),
        ("\x1b[2J,0", []),
    ],
)
def test_limit_is_read_as_cuda_reads_it(host: dict[str, str], limit: str | None, allowed: list[str] | None) -> None:
    env = limited(host, limit)
    found = nvidia.read_limit(env, nvidia.list_gpus(env))
    assert (None if found is None else [gpu.label for gpu in found.gpus]) == allowed


@pytest.mark.parametrize(
    ("limit", "gpus", "visible"),
    [
        ("4,5", ("4", "5"), "4,5"),
        ("4,5", ("5",), "5"),
        ("4,5", ("GPU-0005",), "GPU-0005"),
        ("4,5", ("auto:2",), "4,5"),
        ("7,2,5", ("auto:2",), "2,5"),  # the freest of the allowed, by index
        ("GPU-0006", ("auto:1",), "6"),
        ("MIG-aaaa,MIG-bbbb", ("auto:2",), "MIG-aaaa,MIG-bbbb"),
        ("MIG-aaaa", ("MIG-aaaa",), "MIG-aaaa"),
        ("1", ("MIG-bbbb",), "MIG-bbbb"),  # a slice of a whole GPU that is allowed
        (None, ("0", "1"), "0,1"),
    ],
)
@pytest.mark.parametrize("allow_busy", [False, True])
def test_job_gets_gpus_within_the_limit(
    host: dict[str, str], limit: str | None, gpus: tuple[str, ...], visible: str, allow_busy: bool
) -> None:
    wanted, env = GpuRequest("j1", gpus, allow_busy=allow_busy), limited(host, limit)
    assert claim.would_get(wanted, env) == visible
    with claim.claimed(wanted, env) as held:
        assert held.visible == visible


@pytest.mark.parametrize(
    ("limit", "gpus", "message"),
    [
        ("4,5", ("0", "1"), r"may use GPU 4, 5 of host \S+ \(CUDA_VISIBLE_DEVICES=4,5\), and 0,1 asks for GPU 0, 1"),
        ("4,5", ("4", "0"), "and 4,0 asks for GPU 4, 0"),
        ("4,5", ("auto:3",), r"of which this login may use 4, 5 \(CUDA_VISIBLE_DEVICES=4,5\), fewer than auto:3"),
        ("", ("0",), r"may use no GPU of host \S+ \(CUDA_VISIBLE_DEVICES=\)"),
        ("", ("auto:1",), "may use none"),
        ("MIG-aaaa", ("1",), "may use GPU MIG-aaaa .* asks for GPU 1"),
        ("MIG-aaaa", ("MIG-bbbb",), "asks for GPU MIG-bbbb"),
        ("MIG-aaaa", ("auto:2",), "fewer than auto:2"),
    ],
)
@pytest.mark.parametrize("queue", [False, True])
def test_what_the_limit_leaves_out_is_refused_with_both_sets(
    host: dict[str, str], limit: str, gpus: tuple[str, ...], message: str, queue: bool
) -> None:
    with pytest.raises(AgentError, match=message):
        claim.claim_gpus(GpuRequest("j1", gpus, queue=queue), limited(host, limit))


def test_queued_job_waits_for_gpus_of_its_limit_alone(host: dict[str, str]) -> None:
    env = limited(host, "4,5")
    with claim.claimed(GpuRequest("first", ("4",)), env):
        held = claim.claim_gpus(GpuRequest("second", ("auto:2",), queue=True), env)
        try:
            assert (held.claim.kind, held.claim.devices, held.claim.auto) == (TICKET, ("GPU-0004", "GPU-0005"), 2)
            [ticket] = [found for found in leases.read_claims() if found.kind == TICKET]
            assert ticket.devices == held.claim.devices
            with claim.claimed(GpuRequest("beside", ("6",)), host) as other:  # outside of what it waits for
                assert other.visible == "6"
            with pytest.raises(AgentError, match="before it in the queue for GPU 5: job second"):
                claim.claim_gpus(GpuRequest("third", ("5",)), host)
        finally:
            held.release(ended=True)


def test_ticket_of_a_limited_login_is_granted_within_it_by_everybody() -> None:
    gpus = [nvidia.Gpu(n, f"GPU-{n}", "H100", 80000, 0) for n in range(4)]
    ticket = Claim(TICKET, "j", ("GPU-2", "GPU-3"), 1, 1, file="t")
    assert grant([ticket], gpus, ()) == {"t": ("GPU-2",)}
    assert grant([ticket, Claim(LEASE, "k", ("GPU-2",))], gpus, ()) == {"t": ("GPU-3",)}
    assert grant([ticket, Claim(LEASE, "k", ("GPU-2", "GPU-3"))], gpus, ()) == {}


LOST = EIGHT.splitlines()[0] + "\n1, GPU-0001, NVIDIA H100, [GPU is lost], [GPU is lost]\n2, GPU-0002, H100, 81559, 4\n"


@pytest.mark.parametrize("then", ["exit 0", 'case "$1" in --query-gpu=*) exit 15;; esac'])
def test_card_that_is_lost_is_never_taken_and_hides_no_other(tmp_path: Path, then: str, host: dict[str, str]) -> None:
    env = fake_smi(tmp_path, gpus=LOST, then=then)
    assert [gpu.fault for gpu in nvidia.list_gpus(env)] == ["", "[GPU is lost]", ""]
    assert claim.would_get(GpuRequest("j", ("auto:2",)), env) == "0,2"
    with pytest.raises(AgentError, match=r"GPU 1 of host \S+ does not answer: \[GPU is lost\]"):
        claim.claim_gpus(GpuRequest("j", ("1",)), env)
    with pytest.raises(AgentError, match=r"has 3 GPUs, GPU 1 does not answer, fewer than auto:3 asks for"):
        claim.claim_gpus(GpuRequest("j", ("auto:3",)), env)
