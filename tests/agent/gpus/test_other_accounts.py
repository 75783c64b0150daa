"""What another account of the host can do to leases, tickets and their folder, tried as one. The host has one GPU."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.doctor.check_root import check_leases
from deployer.agent.gpus.claim import JobGpus, claim_gpus
from deployer.agent.gpus.leases import MAX_NUMBER, claiming, read_claims
from deployer.agent.gpus.places import MAX_OF_ONE, exposed, opened
from deployer.agent.gpus.queue import queue_of
from deployer.agent.gpus.view import LEASE, TICKET, Claim, GpuRequest
from deployer.agent.host.errors import AgentError
from tests.support.accounts import ROOT_ONLY, as_account, staying
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.smi import fake_smi

pytestmark = ROOT_ONLY
ALICE, BOB, MALLORY = 61001, 61002, 61666
"""Numbers stand for their names: they have no entry here."""
ONE_GPU = "0, GPU-0, Fake H100, 81559, 4\n"


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as /tmp is: root's, sticky, everybody's. Leases are in tmp/leases, which nobody has made yet."""
    with tempfile.TemporaryDirectory(prefix="tf-accounts-") as parent:
        path = Path(parent)
        path.chmod(0o1777)
        monkeypatch.setenv("TORCHFERRY_LEASE_DIR", str(path / "leases"))
        smi = path / "smi"
        smi.mkdir()
        fake_smi(smi, gpus=ONE_GPU)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
        monkeypatch.setenv("PATH", f"{smi}:{os.environ['PATH']}")
        yield path


@pytest.fixture
def leases(tmp: Path) -> Path:
    """The folder, made by root."""
    with opened():
        return tmp / "leases"


@pytest.fixture
def hers(tmp: Path) -> Path:
    """The folder, made by Mallory, who may do anything to it."""
    path = tmp / "leases"
    path.mkdir()
    path.chmod(0o1777)
    os.chown(path, MALLORY, MALLORY)
    return path


# --- what an account does ---------------------------------------------------------------------------------------------

KEPT: list[Any] = []
"""What the process of an account keeps: its claims."""


def hold(job: str = "j1", kind: str = LEASE, number: int = 0) -> str:
    """Makes a claim that the process holds from now on; its path."""
    with claiming() as claims:
        KEPT.append(claims.hold(Claim(kind, job, ("GPU-0",), number=number)))
    return KEPT[-1].names[0]


def ask(job: str = "asks") -> str:
    """What a launch for the GPU says: the job that it would hold it for, or why not."""
    try:
        held = claim_gpus(GpuRequest(job, ("0",)), dict(os.environ))
    except AgentError as error:
        return f"{error.message} | {error.hint}"
    held.release()
    return held.claim.job


def wait_short() -> str:
    """What the folder of leases says to one who waits a moment for it."""
    try:
        with claiming(0.1):
            return "claimed"
    except AgentError as error:
        return error.message


def seen() -> list[list[str]]:
    return sorted([claim.job, claim.user] for claim in read_claims())


def fill(folder: Path, form: str, count: int) -> None:
    for number in range(count):
        os.close(os.open(folder / (form % number), os.O_WRONLY | os.O_CREAT, 0o644))


def lock(path: Path, how: int = fcntl.LOCK_EX) -> None:
    fcntl.flock(os.open(path, os.O_RDONLY), how | fcntl.LOCK_NB)


def supervise(job: str) -> None:
    """Holds the GPU as a job's supervisor does."""
    plan = GpuRequest(job, ("0",))
    KEPT.append(JobGpus(plan, dict(os.environ), claim_gpus(plan, dict(os.environ)).to_inherit()))


def keep() -> None:
    """What a supervisor does several times a second."""
    KEPT[-1].keep()
    time.sleep(0.02)


def refused(act: Callable[[], object]) -> str:
    """The error that the system gives an act."""
    try:
        act()
    except OSError as error:
        return str(error.strerror)
    return "done"


def names_of(job: str) -> list[Path]:
    """The names of a job's lease, in the folder and beside it."""
    folder = Path(os.environ["TORCHFERRY_LEASE_DIR"])
    return sorted([*folder.glob(f"job-{job}-*"), *folder.parent.glob(f".leases-job-{job}-*")])


# --- fill -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [".", "leases"])
def test_sixty_thousand_files_beside_leases_hide_none(tmp: Path, leases: Path, where: str) -> None:
    as_account(MALLORY, lambda: fill(tmp / where, "junk-%d", 60_000))
    with staying(ALICE, lambda: hold("hers")):
        assert as_account(BOB, ask).startswith(f"GPU 0 is held by job hers of user {ALICE} for ")
    assert as_account(BOB, ask) == "asks"


def test_more_files_that_look_like_leases_than_one_can_open_refuse_and_name_their_user(leases: Path) -> None:
    with staying(ALICE, lambda: hold("hers")):
        as_account(MALLORY, lambda: fill(leases, "job-x-%016x.lock", MAX_OF_ONE + 1))
        answer = as_account(BOB, ask)
        assert f"{MAX_OF_ONE + 1} files of user {MALLORY} | remove that user's files there" in answer
        assert "cannot be used: more than 1000 files that look like leases" in answer
    assert as_account(MALLORY, ask) == "asks"  # who can count on his own


def test_more_names_than_one_can_list_refuse_and_name_their_user(leases: Path) -> None:
    as_account(MALLORY, lambda: fill(leases, "junk-%d", 21))
    with opened() as places, pytest.raises(AgentError, match=rf"more than 20 files in .*: 21 files of user {MALLORY}"):
        places.candidates(most=20)


def test_full_disk_refuses_and_names_who_fills_it(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = tmp / "small"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=40,mode=1777", "x", mounted], check=False)
    if done.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        monkeypatch.setenv("TORCHFERRY_LEASE_DIR", str(mounted / "leases"))
        with opened():
            as_account(MALLORY, lambda: refused(lambda: fill(mounted / "leases", "junk-%d", 100)))
        answer = as_account(ALICE, ask)
        assert "cannot be used: No space left on device: " in answer
        assert re.search(rf"leases has 3\d files of user {MALLORY}", answer), answer
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_huge_file_that_looks_like_a_lease_costs_its_first_bytes_and_is_none(
    leases: Path,
) -> None:
    def plant() -> None:
        path = leases / "job-x-0123456789abcdef.lock"
        path.touch()
        os.truncate(path, 1 << 40)
        lock(path)

    with staying(MALLORY, plant):
        assert as_account(ALICE, ask) == "asks"


# --- hold -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [".", "leases"])
def test_folder_locked_for_ever_is_refused_by_the_process_and_its_user(tmp: Path, leases: Path, where: str) -> None:
    with staying(MALLORY, lambda: [lock(tmp / where), os.getpid()][1]) as pid:
        answer = as_account(ALICE, wait_short)
        assert f"pid {pid} of {MALLORY}, " in answer
        assert f"has had {tmp / where} locked".replace("/.", "") in answer
    assert as_account(ALICE, ask) == "asks"


def test_lease_that_is_held_cannot_be_locked_and_a_lock_to_share_keeps_no_stale_one(leases: Path) -> None:
    with staying(ALICE, lambda: hold("hers")) as path:
        for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            assert as_account(MALLORY, lambda how=how: refused(lambda: lock(path, how))) != "done"
        assert as_account(BOB, seen) == [["hers", str(ALICE)]]
    with staying(MALLORY, lambda: lock(path, fcntl.LOCK_SH)):
        assert as_account(BOB, ask) == "asks"
        as_account(ALICE, seen)
        assert not Path(path).exists()


def test_stale_lease_that_another_locks_looks_held_and_says_by_whom(leases: Path) -> None:
    path = as_account(ALICE, lambda: hold("hers"))
    with staying(MALLORY, lambda: [lock(path), os.getpid()][1]) as pid:
        answer = as_account(BOB, ask)
        assert re.match(
            rf"GPU 0 is held by job hers of user {ALICE} for \ds \(its lease is locked by pid {pid} ", answer
        )
        assert f"of user {MALLORY})" in answer
        Path(path).unlink()  # as Alice can
        assert as_account(BOB, ask) == "asks"


@pytest.mark.parametrize("rank_lives", [False, True])
def test_lease_of_an_ended_job_goes_though_another_waits_to_lock_it(leases: Path, tmp: Path, rank_lives: bool) -> None:
    go, ended = tmp / "go", tmp / "ended"

    def end() -> None:
        wait_for(go.exists)
        if rank_lives and os.fork() == 0:
            signal.alarm(int(HANG_S))
            while tmp.exists():
                time.sleep(0.05)
            os._exit(0)
        KEPT.pop().release(ended=True)
        ended.touch()
        signal.pause()

    def lock_when_free() -> None:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
        signal.pause()

    with staying(ALICE, lambda: hold("hers"), end) as path, staying(MALLORY, os.getpid, lock_when_free) as pid:
        wait_for(lambda: re.search(rf"-> FLOCK .* {pid} ", Path("/proc/locks").read_text()))
        go.touch()
        wait_for(ended.exists)
        assert Path(path).exists() == rank_lives
        assert ("held by job hers" in as_account(BOB, ask)) == rank_lives


# --- rename, remove, replace, forge -----------------------------------------------------------------------------------


def test_lease_and_folder_of_others_cannot_be_touched(leases: Path, tmp: Path) -> None:
    acts: dict[str, Callable[[Path], object]] = {
        "remove": lambda path: path.unlink(),
        "rename": lambda path: path.rename(leases / "elsewhere"),
        "replace": lambda path: Path(hold("mine")).rename(path),
        "write": lambda path: path.write_text(""),
        "chmod": lambda path: path.chmod(0o600),
        "chown": lambda path: os.chown(path, MALLORY, -1),
        "date": lambda path: os.utime(path, (0, 0)),
        "rename the folder": lambda path: leases.rename(tmp / "elsewhere"),
        "replace the folder": lambda path: leases.rmdir(),
        "close the folder": lambda path: leases.chmod(0o700),
    }
    with staying(ALICE, lambda: hold("hers")) as path:
        for name, act in acts.items():
            assert as_account(MALLORY, lambda act=act: refused(lambda: act(Path(path)))) != "done", name
        assert ["hers", str(ALICE)] in as_account(BOB, seen)


def test_forged_lease_keeps_others_out_under_the_name_of_who_made_it(leases: Path) -> None:
    def forge() -> None:
        path = Path(hold("forged"))
        path.chmod(0o644)
        path.write_text(path.read_text().replace('"kind"', f'"uid": {ALICE}, "user": "alice", "kind"'))

    with staying(MALLORY, forge):
        assert as_account(BOB, ask).startswith(f"GPU 0 is held by job forged of user {MALLORY} for ")
    assert as_account(BOB, ask) == "asks"


def test_forged_first_place_in_the_queue_is_seen_and_ends_with_its_process(leases: Path) -> None:
    with staying(ALICE, lambda: hold("hers", TICKET, 7)), staying(MALLORY, lambda: hold("first", TICKET, 0)):
        answer = as_account(BOB, ask)
        assert f"before it in the queue for GPU 0: job first of user {MALLORY}, job hers of user {ALICE}" in answer
    assert as_account(BOB, ask) == "asks"


def test_forged_last_number_leaves_the_order_of_those_after_it(leases: Path) -> None:
    def wait(job: str) -> str:
        plan = GpuRequest(job, ("0",), queue=True)
        KEPT.append(claim_gpus(plan, dict(os.environ)))
        return KEPT[-1].claim.kind

    with staying(MALLORY, lambda: hold("last", TICKET, MAX_NUMBER)):
        with staying(ALICE, lambda: wait("first")) as kind, staying(BOB, lambda: wait("second")):
            assert kind == TICKET
            order = [ticket.job for ticket in queue_of(read_claims())]
            assert order == ["last", "first", "second"]


def test_anything_but_a_file_under_a_leases_name_is_none_and_hangs_nobody(leases: Path, tmp: Path) -> None:
    def plant(form: str = "job-x-%016x.lock") -> None:
        os.mkfifo(leases / (form % 1))
        (leases / (form % 2)).mkdir()
        (leases / (form % 3)).symlink_to("/dev/zero")
        socket.socket(socket.AF_UNIX).bind(str(leases / (form % 4)))
        os.mkfifo(tmp / (".leases-" + form % 1))

    as_account(MALLORY, plant)
    assert len(list(leases.iterdir())) == 4
    assert as_account(ALICE, ask) == "asks"


def test_lease_that_cannot_be_read_refuses_by_its_user(leases: Path) -> None:
    with staying(MALLORY, lambda: Path(hold("shut")).chmod(0o600)):
        assert f" of user {MALLORY} cannot be read: Permission denied" in as_account(ALICE, ask)


def test_others_read_who_holds_what_and_nothing_else(leases: Path) -> None:
    with staying(ALICE, lambda: hold("hers")) as path:
        text = as_account(MALLORY, lambda: Path(path).read_text())
    assert json.loads(text) == {"kind": "lease", "job": "hers", "devices": ["GPU-0"], "auto": 0, "number": 0}


def test_second_name_that_another_gave_a_lease_counts_once_and_ends_with_it(leases: Path) -> None:
    with staying(ALICE, lambda: hold("hers")) as path:
        os.link(path, leases / "job-hers-0123456789abcdef.lock")  # where the system lets everybody link anything
        assert as_account(BOB, seen) == [["hers", str(ALICE)]]
    assert as_account(BOB, ask) == "asks"
    assert as_account(ALICE, seen) == [] and list(leases.iterdir()) == []


# --- who made the folder ----------------------------------------------------------------------------------------------


def attack(leases: Path, how: str) -> None:
    """What the folder's owner alone can do."""
    aside = leases.with_name("aside")
    if how == "remove":
        for path in leases.glob("job-*"):
            path.unlink()
    elif how == "rename":
        for path in leases.glob("job-*"):
            path.rename(leases / "junk")
    else:
        leases.rename(aside)
    if how == "replace":
        leases.mkdir()
        leases.chmod(0o1777)


@pytest.mark.parametrize("how", ["remove", "rename", "take away", "replace"])
def test_owner_of_the_folder_can_hide_no_lease_and_its_name_comes_back(hers: Path, how: str) -> None:
    with staying(ALICE, lambda: supervise("hers"), keep):
        before = names_of("hers")
        assert len(before) == 2
        as_account(MALLORY, lambda: attack(hers, how))
        assert as_account(BOB, ask).startswith(f"GPU 0 is held by job hers of user {ALICE} for ")
        wait_for(lambda: len(names_of("hers")) == 2 and names_of("hers") != before)
    assert as_account(BOB, ask) == "asks"
    as_account(ALICE, seen)
    assert names_of("hers") == []


def test_two_that_claim_at_once_exclude_each_other_though_the_folder_is_replaced_between_them(hers: Path) -> None:
    def enter() -> int:
        KEPT.append(claiming())
        KEPT[-1].__enter__()
        return os.getpid()

    with staying(ALICE, enter) as pid:
        as_account(MALLORY, lambda: attack(hers, "replace"))
        assert f"pid {pid} of {ALICE}, " in as_account(BOB, wait_short)


def test_folder_that_its_owner_shuts_is_refused_by_name(hers: Path) -> None:
    with staying(ALICE, lambda: hold("hers")):
        for mode in (0o700, 0o755, 0o777):
            hers.chmod(mode)
            assert f"{MALLORY}, whose it is, lets not everybody in" in as_account(BOB, ask)


def test_what_lies_in_the_place_of_the_folder_is_refused_by_its_user(tmp: Path) -> None:
    plants: dict[str, Callable[[Path], object]] = {
        "a link": lambda path: path.symlink_to(tmp),
        "a file": lambda path: path.touch(),
    }
    for what, plant in {**plants, "a file ": os.mkfifo}.items():
        as_account(MALLORY, lambda plant=plant: plant(tmp / "leases"))
        assert f"cannot be used: it is {what.strip()} of user {MALLORY}" in as_account(ALICE, ask)
        (tmp / "leases").unlink()
    assert not list(tmp.glob("job-*"))


def test_folder_whose_rights_shut_one_account_out_of_new_leases_hides_none_from_it(hers: Path) -> None:
    shut = struct.pack("<I", 2)
    for tag, rights, who in ((1, 7, -1), (2, 0, BOB), (4, 7, -1), (16, 7, -1), (32, 7, -1)):
        shut += struct.pack("<HHi", tag, rights, who)
    try:
        os.setxattr(hers, "system.posix_acl_default", shut)
    except OSError:
        pytest.skip("no access lists on this file system")
    with staying(ALICE, lambda: hold("hers")):
        assert as_account(BOB, ask).startswith(f"GPU 0 is held by job hers of user {ALICE} for ")
    as_account(MALLORY, lambda: attack(hers, "remove"))
    os.setxattr(hers.parent, "system.posix_acl_default", shut)
    with staying(ALICE, lambda: hold("hers")) as path:
        assert f" of user {ALICE} cannot be read: Permission denied" in as_account(BOB, ask), path


def test_root_takes_over_the_folder_and_still_sees_the_leases_of_others(hers: Path) -> None:
    with staying(ALICE, lambda: hold("hers")):
        as_account(MALLORY, lambda: attack(hers, "remove"))
        assert [claim.job for claim in read_claims()] == ["hers"]
        assert (hers.stat().st_uid, stat.S_IMODE(hers.stat().st_mode)) == (0, 0o1777)
        assert as_account(MALLORY, lambda: refused(lambda: attack(hers, "replace"))) == "Operation not permitted"


def test_doctor_warns_of_a_folder_whose_owner_can_hide_leases(hers: Path, tmp: Path) -> None:
    assert as_account(ALICE, exposed) == ""
    os.chown(tmp, MALLORY, MALLORY)
    said = as_account(ALICE, exposed)
    assert said == f"{hers} belongs to user {MALLORY}"
    found = check_leases([], [], exposed=said)
    assert (found["status"], found["hint"]) == ("warn", "as root: chown root that folder")


def test_folder_that_is_no_absolute_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFERRY_LEASE_DIR", "leases")
    with pytest.raises(AgentError, match="TORCHFERRY_LEASE_DIR=leases is no absolute path"):
        read_claims()
