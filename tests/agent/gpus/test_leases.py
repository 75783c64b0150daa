"""Claims on GPUs: files whose lock is the hold, seen by every user of the host and freed by the kernel."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gpus.claim import JobGpus, claim_gpus
from deployer.agent.gpus.leases import HeldClaim, claiming, parse_claim, read_claims
from deployer.agent.gpus.view import LEASE, TICKET, Claim, GpuRequest
from deployer.agent.host.errors import AgentError
from tests.support.accounts import ROOT_ONLY, as_account
from tests.support.ferry import Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.smi import fake_smi
from tests.support.sshd import ALIAS, login_user, start_sshd

NOBODY = 65534


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of claims that other users reach too."""
    with tempfile.TemporaryDirectory(prefix="tf-leases-") as parent:
        Path(parent).chmod(0o755)
        path = Path(parent) / "leases"
        path.mkdir()
        path.chmod(0o1777)
        monkeypatch.setenv("TORCHFERRY_LEASE_DIR", str(path))
        yield path


def hold(job: str = "j1", *devices: str) -> HeldClaim:
    with claiming() as claims:
        return claims.hold(Claim(LEASE, job, devices or ("GPU-0",)))


def jobs_seen() -> list[str]:
    return sorted(claim.job for claim in read_claims())


def as_nobody(ask: Callable[[], Any]) -> Any:
    return as_account(NOBODY, ask)


def sleeper(held: HeldClaim) -> subprocess.Popen[bytes]:
    """A process that has the claim for its stdin, as a rank has."""
    return subprocess.Popen(["sleep", "600"], stdin=held.fd)


def test_claim_is_held_until_the_last_process_that_inherited_it_is_killed(folder: Path) -> None:
    held = hold()
    first, second = sleeper(held), sleeper(held)
    os.close(held.fd)  # as when the supervisor is killed
    first.kill()
    first.wait()
    assert jobs_seen() == ["j1"]
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert jobs_seen() == []
    assert list(folder.iterdir()) == []


def test_claim_whose_file_somebody_has_written_into_is_written_again(folder: Path) -> None:
    held = hold("j")
    (claim,), (name,) = read_claims(), folder.iterdir()
    for words in ("", "[" * 9000, name.read_text().replace("GPU-0", "GPU-1")):
        gpus = JobGpus(GpuRequest("j", ("0",)), {}, held.to_inherit())
        name.write_text(words)
        assert read_claims() != [claim]
        gpus.keep()
        assert read_claims() == [claim]
    held.release()


def test_next_supervisor_leaves_gpus_alone_that_another_job_has_by_now(folder: Path) -> None:
    ranks = hold("j")
    adopted = JobGpus(GpuRequest("j", ("0",)), {}, None)
    adopted.hold_again(["GPU-0"], "0")
    assert (jobs_seen(), adopted.devices, adopted.given_to) == (["j", "j"], ("GPU-0",), "")
    adopted.release()
    ranks.release()
    other = hold("k", "GPU-0", "GPU-1")
    late = JobGpus(GpuRequest("j", ("0",)), {}, None)
    late.hold_again(["GPU-0"], "0")
    assert (jobs_seen(), late.devices, late.given_to) == (["k"], (), "k")
    late.keep()
    assert jobs_seen() == ["k"]
    beside = JobGpus(GpuRequest("j", ("0",), allow_busy=True), {}, None)
    beside.hold_again(["GPU-0"], "0")
    assert (jobs_seen(), beside.given_to) == (["j", "k"], "")
    beside.release()
    other.release()


@pytest.mark.parametrize("words", ["", "[" * 9000, '{"kind": "lease", "job": "j", "dev'])
def test_lease_that_makes_no_sense_keeps_others_out_until_its_processes_end(folder: Path, words: str) -> None:
    held = hold("j")
    next(folder.iterdir()).write_text(words)
    (claim,) = read_claims()
    assert (claim.kind, claim.job, claim.devices, claim.uid) == (LEASE, "j", (), os.geteuid())
    held.release()
    assert read_claims() == []


def test_claim_released_while_a_process_still_has_it_stays(folder: Path) -> None:
    held = hold()
    rest = sleeper(held)
    held.release()
    assert jobs_seen() == ["j1"]
    rest.kill()
    rest.wait()
    assert jobs_seen() == []


def test_claim_as_stdin_reads_as_an_empty_file(folder: Path) -> None:
    held = hold()
    assert subprocess.run(["cat"], stdin=held.fd, capture_output=True, check=True).stdout == b""
    held.release()


@ROOT_ONLY
def test_claim_names_its_job_user_and_devices_to_another_user(folder: Path) -> None:
    before = os.umask(0o077)
    held = hold("mine", "GPU-0", "GPU-1/MIG-7")
    os.umask(before)
    seen = as_nobody(lambda: [(c.job, c.user, c.devices, c.kind) for c in read_claims()])
    assert seen == [("mine", "root", ("GPU-0", "GPU-1/MIG-7"), "lease")]
    held.release()


@ROOT_ONLY
def test_another_users_stale_claim_is_ignored_and_left_where_it_is(folder: Path) -> None:
    def leave() -> str:
        held = hold("theirs")
        os.close(held.fd)
        return Path(held.names[0]).name

    file = as_nobody(leave)
    assert jobs_seen() == []
    assert (folder / file).exists()
    as_nobody(jobs_seen)
    assert not (folder / file).exists()


@ROOT_ONLY
def test_gpu_of_another_user_is_refused_by_name_and_free_when_their_last_process_is_killed(
    folder: Path, tmp_path: Path
) -> None:
    env = fake_smi(tmp_path, gpus="0, GPU-0, Fake H100, 81559, 4\n")
    plan = GpuRequest("ours", ("0",))

    def take() -> int:
        return sleeper(hold("theirs", "GPU-0")).pid

    rank = as_nobody(take)
    with pytest.raises(AgentError, match=r"^GPU 0 is held by job theirs of user nobody for \ds$"):
        claim_gpus(plan, env)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: not jobs_seen())
    held = claim_gpus(plan, env)
    assert jobs_seen() == ["ours"]
    held.release()


@ROOT_ONLY
def test_job_of_another_account_over_ssh_waits_for_our_job_and_runs_when_it_has_ended(
    folder: Path, ferry: Ferry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    env = fake_smi(folder.parent, gpus="0, GPU-0, Fake H100, 81559, 4\n")
    ferry.env.update(env)
    with login_user("/usr/bin/zsh") as user, start_sshd(tmp_path_factory.mktemp("s"), user=user) as server:
        (server.home / ".zshenv").write_text(f"export PATH={env['PATH']} TORCHFERRY_LEASE_DIR={folder}\n")
        theirs = replace(ferry, ssh=ALIAS, root=Path("~/tf"))
        theirs.env = {**ferry.env, "TORCHFERRY_SSH_CONFIG": str(server.client_config_path)}
        ours = ferry.start(
            "run", *ferry.where(), "--gpus", "0", "--", "sh", "-c", "while [ ! -e go ]; do sleep 0.02; done"
        )
        wait_for(lambda: (ferry.root / "jobs").exists() and ferry.job_ids() and (ferry.job() / "code").exists())
        wait_for(jobs_seen)
        refused = theirs.run("run", *theirs.where(), "--gpus", "0", "--", "id", "-un")
        assert f"GPU 0 is held by job {ferry.job_ids()[0]} of user root for " in refused.stderr.decode()
        waiting = theirs.start("run", *theirs.where(), "--gpus", "0", "--queue", "--no-pull", "--", "id", "-un")
        wait_for(lambda: len(jobs_seen()) == 2)
        (ferry.job() / "code" / "go").touch()
        out, err = waiting.communicate(timeout=HANG_S)
        ours.communicate(timeout=HANG_S)
    assert (out.decode(), waiting.returncode) == (user + "\n", 0), err.decode()


def test_folder_is_made_for_everybody_whatever_the_umask(folder: Path) -> None:
    folder.rmdir()
    before = os.umask(0o077)
    assert jobs_seen() == []
    os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_link_in_the_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(AgentError, match="leases, cannot be used: it is a link of user "):
        hold()
    assert not list(tmp_path.glob("job-*"))


def test_planted_pipes_and_links_are_no_claims_and_hang_nobody(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    os.mkfifo(folder / "job-a-0123456789abcdef.lock")
    (folder / "job-b-0123456789abcdef.lock").symlink_to(secret)
    assert jobs_seen() == []
    assert secret.read_text() == "x"


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "throne"},
        {"devices": "GPU-0"},
        {"devices": ["GPU-0", "\x1b[2J"]},
        {"devices": ["GPU-0"] * 1000},
        {"auto": -1},
        {"auto": True},
        {"number": 1e300},
        {"number": "1"},
    ],
)
def test_claim_that_makes_no_sense_is_none(wrong: dict[str, Any]) -> None:
    right = {"kind": TICKET, "job": "j", "devices": ["GPU-0"], "auto": 0, "number": 1}
    assert parse_claim(json.dumps(right).encode()) == Claim(TICKET, "j", ("GPU-0",), 0, 1)
    assert parse_claim(json.dumps({**right, **wrong}).encode()) is None


def test_name_of_a_foreign_job_cannot_drive_the_terminal() -> None:
    hostile = {"kind": LEASE, "job": "a\x1b]0;x\x07" + "y" * 500, "devices": ["GPU-0"], "auto": 0, "number": 0}
    claim = parse_claim(json.dumps(hostile).encode())
    assert claim is not None
    assert claim.job == ("a?]0;x?" + "y" * 500).replace("]", "?").replace(";", "?")[:80]


LOCKS = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
input()
"""


def test_folder_that_hangs_is_given_up_naming_who_locks_it_and_is_free_when_that_is_killed(folder: Path) -> None:
    words = [sys.executable, "-c", LOCKS, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(AgentError, match=r"has had .* locked for more than 0\.1 s") as caught, claiming(0.1):
            pass
        other.kill()
    assert (
        f"pid {other.pid} of " in caught.value.message or "a process that this login cannot see" in caught.value.message
    )
    hold().release()
    assert jobs_seen() == []
