"""`gc` by the command line, and the locks between a collection, launches and agents."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import subprocess
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gc.choose import BLOB, SPARE, TREE
from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Root
from deployer.agent.host.locks import hold, is_held, store_alone, store_in_use
from deployer.agent.host.typed import from_json, to_json
from deployer.agent.job.plan import Plan
from deployer.agent.requests.launch import launch
from deployer.agent.store.tree import FILE, Entry, content_hash, dump_entries, root_hash
from deployer.agent.wire.frames import Frame
from tests.support.ferry import Ferry
from tests.support.jobs import end_of, make_plan, wait_for
from tests.support.limits import HANG_S
from tests.support.storing import disk, ended, keep, make_old

# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


def test_gc_asks_and_without_a_terminal_says_how_to_answer(ferry: Ferry) -> None:
    done = ferry.run("gc", "--remote-root", str(ferry.root))
    assert done.returncode == 2 and b"--yes removes" in done.stderr


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", []), (b"n\n", ["a"])])
def test_gc_asks_at_a_terminal(ferry: Ferry, answer: bytes, left: list[str]) -> None:
    ended(Root(str(ferry.root)), "a")
    master, slave = pty.openpty()
    asking = subprocess.Popen(
        ferry.argv("gc", "--remote-root", str(ferry.root), "--keep-jobs", "0"),
        env=ferry.environment(),
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.write(master, answer)
    shown, said = asking.communicate(timeout=HANG_S)
    assert b"job a" in shown and ferry.job_ids() == left and asking.returncode == (0 if not left else 1)
    assert (b"nothing was removed" in said) == bool(left)


def test_gc_removes_old_jobs_and_the_next_launch_brings_what_it_needs_again(ferry: Ferry) -> None:
    (ferry.project / "say.py").write_text("print('said')")
    command = ("run", *ferry.where(), "--no-pull", "--", "python", "say.py")
    for _ in range(2):
        assert ferry.run(*command).stdout == b"said\n"
    wait_for(lambda: (ferry.root / "store/spare/record.json").exists())
    make_old(ferry.root)
    done = ferry.run("gc", *ferry.where(), "--keep-jobs", "0", "--yes", "--json")
    found = json.loads(done.stdout)
    assert found["removed"] and len(found["jobs"]) == 2 and ferry.job_ids() == []
    assert {row["kind"] for row in found["rest"]} == {TREE, BLOB, SPARE}
    assert ferry.run(*command).stdout == b"said\n"


def test_a_disk_without_room_for_the_agent_is_told_and_left_as_it_was(ferry: Ferry) -> None:
    with disk(ferry.root, "size=200k") as full:
        done = ferry.run("gc", *ferry.where(), "--dry-run")
        assert done.returncode == 125
        assert b"No space left on device" in done.stderr and b"hint: free some space there, or " in done.stderr
        assert list((full / "agent").iterdir()) == []


def test_gc_shows_what_would_go(ferry: Ferry) -> None:
    root = Root(str(ferry.root))
    ended(root, "a", keep(root, {"code/a": b"1"}))
    ended(root, "b", days=1)
    shown = ferry.run("gc", *ferry.where(), "--older-than", "30d", "--dry-run")
    assert b"job a" in shown.stdout and b"job b" not in shown.stdout and b"kept: 1 job, ended" in shown.stderr
    assert ferry.job_ids() == ["a", "b"]


# --- locks ------------------------------------------------------------------------------------------------------------


def test_launches_share_the_store_and_a_collection_waits_for_them(root: Root) -> None:
    with store_in_use(root), store_in_use(root):
        with pytest.raises(AgentError, match="a launch is under way"), store_alone(root, wait_s=0):
            pass
    with store_alone(root, wait_s=0):
        pass


def test_a_launch_waits_until_the_collection_is_over(root: Root) -> None:
    order: list[str] = []

    def launching() -> None:
        with store_in_use(root):
            order.append("launched")

    thread = threading.Thread(target=launching)
    with store_alone(root):
        thread.start()
        thread.join(0.2)
        order.append("collected")
    thread.join(HANG_S)
    assert order == ["collected", "launched"]


def test_a_launch_does_not_wait_for_ever_for_a_collection_that_hangs(root: Root) -> None:
    with store_alone(root), pytest.raises(AgentError, match=r"gc has been at work in .* for 0 s"):
        with store_in_use(root, wait_s=0):
            pass


class Launching:
    """The call of a `launch` request that brings one tree of one file; `free_at`: when the store could be collected."""

    def __init__(self, root: Root, plan: Plan, content: bytes, entry: Entry) -> None:
        self.root, self.plan, self.content, self.entry = root, plan, content, entry
        self.cancelled, self.revoked, self.head = threading.Event(), False, {}
        self.free_at: dict[str, bool] = {}

    def read(self, kind: type[Any]) -> Any:
        return from_json({"plan": to_json(self.plan)}, kind)

    def send_event(self, name: str, value: Any = None) -> None:
        try:
            with store_alone(self.root, wait_s=0):
                self.free_at[name] = True
        except AgentError:
            self.free_at[name] = False
        tree = Frame({}, zlib.compress(dump_entries([self.entry])))
        self._frames = [tree] if name == "need_tree" else [Frame({"blob": self.entry.hash, "last": True}, self.content)]

    def receive(self) -> list[Frame]:
        return self._frames


def test_a_launch_keeps_the_store_from_its_first_question_to_its_start(root: Root) -> None:
    entry = Entry("code/a", FILE, 1, content_hash(b"1"))
    plan = make_plan(["true"], tree=root_hash([entry]), job_id="a")
    call = Launching(root, plan, b"1", entry)
    launch(root, call)  # type: ignore[arg-type]
    assert call.free_at == {"need_tree": False, "need_blobs": False, "ack": True}
    assert end_of(root.job("a")).state == "succeeded"


def test_a_resume_waits_until_the_collection_is_over(ferry: Ferry) -> None:
    """Else what it takes over, a cache above all, could go while it begins."""
    ferry.run("run", *ferry.where(), "--no-pull", "--", "true")
    with store_alone(Root(str(ferry.root))):
        resuming = ferry.start("resume", ferry.job().name, "--no-pull")
        with pytest.raises(subprocess.TimeoutExpired):
            resuming.wait(3)
        assert not (ferry.job() / "logs/attempt_2").exists()
    resuming.communicate(timeout=HANG_S)
    assert resuming.returncode == 0 and (ferry.job() / "logs/attempt_2").exists()


def test_an_agent_s_folder_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    assert not is_held(str(tmp_path))
    agent = multiprocessing.get_context("fork").Process(target=hold, args=(str(tmp_path),))
    agent.start()
    agent.join(HANG_S)
    assert not is_held(str(tmp_path))
    held = hold(str(tmp_path))
    assert held is not None and is_held(str(tmp_path))
