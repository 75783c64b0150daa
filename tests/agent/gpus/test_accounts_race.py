"""Four accounts take and give back two GPUs, beside one that owns the folder of leases and does its worst to it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from deployer.agent.gpus.claim import claim_gpus
from deployer.agent.gpus.view import GpuRequest
from deployer.agent.host.errors import AgentError
from tests.support.accounts import ROOT_ONLY, begin_as, staying
from tests.support.smi import fake_smi
from tests.support.sshd import login_user

pytestmark = ROOT_ONLY
TWO_GPUS = "0, GPU-0, Fake H100, 81559, 4\n1, GPU-1, Fake H100, 81559, 4\n"
RACE_S = 10.0
RENAMEAT2 = ctypes.CDLL(None, use_errno=True).renameat2
AT_ONCE = "two at once"


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as /tmp is, and in it `referee` with a file for each GPU, which nobody but root can change."""
    with tempfile.TemporaryDirectory(prefix="tf-race-") as parent:
        path = Path(parent)
        path.chmod(0o1777)
        (path / "referee").mkdir()
        for gpu in "01":
            (path / "referee" / gpu).touch()
        monkeypatch.setenv("TORCHFERRY_LEASE_DIR", str(path / "leases"))
        fake_smi(path / "referee", gpus=TWO_GPUS)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
        monkeypatch.setenv("PATH", f"{path / 'referee'}:{os.environ['PATH']}:/usr/sbin")
        yield path


def take_over_and_over(referee: Path, job: str) -> dict[str, int]:
    """How often each answer came. A GPU that was given is locked at the referee, where only one can have it."""
    answers: dict[str, int] = {}
    draw = random.Random(job)
    until = time.monotonic() + RACE_S
    while time.monotonic() < until:
        gpu = draw.choice("01")
        try:
            held = claim_gpus(GpuRequest(job, (gpu,)), dict(os.environ))
        except AgentError as error:
            answers[error.message] = answers.get(error.message, 0) + 1
            continue
        with (referee / gpu).open() as only_one:
            try:
                fcntl.flock(only_one, fcntl.LOCK_EX | fcntl.LOCK_NB)
                answer = "given"
            except BlockingIOError:
                answer = AT_ONCE
            time.sleep(draw.random() * 0.05)
        held.release(ended=draw.random() < 0.5)
        answers[answer] = answers.get(answer, 0) + 1
    return answers


def swap(one: Path, other: Path) -> None:
    """Exchanges two names in one step, so that nobody else can make the one that is missing."""
    if RENAMEAT2(-100, bytes(one), -100, bytes(other), 2):
        raise OSError(ctypes.get_errno(), f"{one}, {other}")


def harm(leases: Path, draw: random.Random) -> None:
    """One of the things that the owner of the folder, or anybody in it, can do."""
    other = leases.with_name("other")
    acts: list[Callable[[], object]] = [
        lambda: [path.unlink() for path in leases.iterdir()],
        lambda: [path.rename(leases / f"junk-{draw.random()}") for path in leases.glob("job-*")],
        lambda: [path.rename(leases.with_name(f".leases-{path.name}")) for path in leases.glob("job-*")],
        lambda: make(other),
        lambda: other.symlink_to("/"),
        lambda: other.touch(),
        lambda: leases.chmod(0o700),
        lambda: [(leases / f"job-x-{draw.getrandbits(64):016x}.lock").touch() for _ in range(20)],
        lambda: [(leases.parent / f".leases-job-x-{draw.getrandbits(64):016x}.lock").touch() for _ in range(5)],
        lambda: os.link(next(leases.glob("job-*")), leases / f"job-x-{draw.getrandbits(64):016x}.lock"),
    ]
    with ExitStack() as stack:
        for path in (leases, leases.parent, *leases.parent.glob(".leases-job-*")):
            if draw.random() < 0.2:
                with suppress(OSError):
                    fd = os.open(path, os.O_RDONLY)
                    stack.callback(os.close, fd)
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError, StopIteration):
            draw.choice(acts)()
        if os.path.lexists(other):
            swap(leases, other)
        time.sleep(draw.random() * (0.2 if draw.random() < 0.2 else 0.01))
    if leases.is_symlink() or not leases.is_dir():
        swap(leases, other)
    leases.chmod(0o1777)
    with suppress(FileNotFoundError):
        other.rename(leases.with_name(f"aside-{draw.random()}"))


def make(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)


def test_no_gpu_is_given_to_two_accounts_at_once_whatever_the_owner_of_the_folder_does(tmp: Path) -> None:
    draw = random.Random(15)
    with ExitStack() as stack:
        names = [stack.enter_context(login_user("/bin/sh")) for _ in range(5)]
        *honest, mallory = [pwd.getpwnam(name).pw_uid for name in names]
        leases = tmp / "leases"
        stack.enter_context(staying(mallory, lambda: make(leases), lambda: harm(leases, draw)))
        waits = [begin_as(uid, lambda uid=uid: take_over_and_over(tmp / "referee", f"j{uid}")) for uid in honest]
        answers = [wait() for wait in waits]
        report = "\n".join(f"{count} x {text}" for each in answers for text, count in each.items())
        print(report)
        assert all(AT_ONCE not in each and each["given"] > 5 for each in answers), report
        refusals = [text for each in answers for text in each if text != "given"]
        assert any("is held by job" in text for text in refusals), report
        assert sum(names[-1] in text for text in refusals) > 2, report  # the acts were felt
        assert leases.lstat().st_uid == mallory
        unnamed = [text for text in refusals if not any(name in text for name in names)]
        assert not unnamed, unnamed
