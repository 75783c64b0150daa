"""What a launch sends unasked: the difference to what the host had, or all of a first deploy; the host checks it."""

from __future__ import annotations

import base64
import random
import shutil
import stat
import zlib
from pathlib import Path

import pytest

from deployer.agent.store.tree import Entry, content_hash, root_hash
from deployer.connection.link import Link
from deployer.errors import HostError, UsageError
from deployer.launch import delta
from deployer.launch.delta import KnownTree
from deployer.launch.follow import Watcher
from deployer.launch.start import launch_and_follow
from deployer.plan.options import Options, read_config
from deployer.plan.prepare import prepare
from deployer.transport.local import LocalTransport
from tests.support.jobs import wait_for


class Tap(LocalTransport):
    """This machine as the host; keeps the command line and what goes each way."""

    def __init__(self) -> None:
        super().__init__()
        self.command, self.said, self.sent = "", b"", 0

    def open(self, command):
        self.command = command
        stream = super().open(command)
        read, write = stream.read, stream.write

        def tapped(size):
            data = read(size)
            self.said += data
            return data

        def counted(data):
            self.sent += len(data)
            write(data)

        stream.read, stream.write = tapped, counted
        return stream


class Place:
    """A project, a client's memory of it, and the root of a host."""

    def __init__(self, folder: Path) -> None:
        self.project, self.root, self.last = folder / "project", folder / "root", KnownTree(folder / "trees" / "x")
        self.last.file.parent.mkdir()
        self.project.mkdir()
        for number in range(40):
            (self.project / f"f{number}").write_text(f"content {number}\n")

    def launch(self, *, meanwhile=lambda: None) -> Tap:
        tap, options = Tap(), Options(command=("true",), keys={"target.root": str(self.root)})
        prepared = prepare(read_config(options), options=options, project=self.project)
        meanwhile()
        launch_and_follow(
            lambda **more: Link.open(tap, root=str(self.root), **more),
            prepared.plan,
            shipment=prepared.shipment,
            payload=prepared.payload,
            git=None,
            view=None,
            watcher=Watcher(),
            last=self.last,
        )
        wait_for(lambda: self.last.name() == prepared.plan.tree)
        assert files(self.root / "jobs" / prepared.plan.job_id / "code") == files(self.project)
        return tap


def files(folder: Path) -> dict[str, object]:
    return {
        str(p.relative_to(folder)): p.readlink() if p.is_symlink() else (p.read_bytes(), bool(p.stat().st_mode & 0o100))
        for p in folder.rglob("*")
        if p.is_symlink() or p.is_file()
    }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def change(place: Place) -> None:
    (place.project / "f1").write_text("changed-content")
    (place.project / "f2").unlink()
    (place.project / "f3").chmod(0o755)
    (place.project / "new").mkdir()
    (place.project / "new" / "link").symlink_to("../f1")


def test_first_deploy_brings_agent_and_files_unasked(place):
    tap = place.launch()
    assert b"need" in tap.said and b"need_tree" not in tap.said and b"need_blobs" not in tap.said


def test_what_changed_travels_unasked(place):
    place.launch()
    change(place)
    tap = place.launch()
    assert b"need" not in tap.said and 0 < tap.sent < 1000


def test_unchanged_tree_sends_nothing_but_the_command(place):
    place.launch()
    assert place.launch().sent == 0


def test_contents_and_names_do_not_show_in_the_command_line(place):
    place.launch()
    change(place)
    word = zlib.decompress(base64.b64decode(place.launch().command.rsplit(" ", 1)[1])).decode()
    assert "changed-content" not in word and content_hash(b"changed-content") not in word and "new/link" not in word


@pytest.mark.parametrize("lost", ["store", "agent", "store/trees", "store/packs", "."])
def test_host_that_lost_what_we_remember_asks_for_it(place, lost):
    place.launch()
    shutil.rmtree(place.root / lost, ignore_errors=True)
    change(place)
    place.launch()


def test_memory_of_another_tree_costs_a_question_only(place):
    place.launch()
    other = (Entry("code/x", "f", 1, content_hash(b"1")),)
    place.last.remember(root_hash(other), other)
    change(place)
    assert b"need_tree" in place.launch().said


def test_first_deploy_to_a_host_that_has_it_all_stops_at_once(place):
    (place.project / "big").write_bytes(random.Random(0).randbytes(20_000_000))
    place.launch()
    place.last.file.unlink()
    tap = place.launch()
    assert b"enough" in tap.said and tap.sent < 10_000_000


def test_same_job_asked_for_again_with_news_is_the_running_one(place):
    options = Options(command=("true",), keys={"target.root": str(place.root)})
    prepared = prepare(read_config(options), options=options, project=place.project)
    acks = []

    class Acks(Watcher):
        def started(self, ack):
            acks.append(ack.already)

    for _ in range(2):
        launch_and_follow(
            lambda **more: Link.open(LocalTransport(), root=str(place.root), **more),
            prepared.plan,
            shipment=prepared.shipment,
            payload={},
            git={"patch": "diff"},
            view=None,
            watcher=Acks(),
            last=KnownTree(place.project.parent / "nothing"),
        )
    assert acks == [False, True]


@pytest.mark.parametrize(("now", "error"), [("short", UsageError), ("other content 1\n"[:10], UsageError)])
def test_file_that_changes_while_it_is_sent_ends_the_launch(place, now, error):
    with pytest.raises((error, HostError), match=r"became shorter|not the 10 bytes announced"):
        place.launch(meanwhile=lambda: (place.project / "f1").write_text(now))
    assert not list((place.root / "jobs").iterdir()) if place.root.exists() else True


def test_damaged_memory_is_no_memory(place):
    place.launch()
    place.last.file.write_bytes(place.last.file.read_bytes()[:60])
    assert place.last.entries() == ()
    change(place)
    assert b"need_tree" in place.launch().said


def test_memory_is_private_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path))
    for number in range(delta.KEPT + 3):
        KnownTree.of("host", "~/.torchferry", Path(f"/p{number}")).remember("0" * 40, ())
    kept = list((tmp_path / "trees").iterdir())
    assert len(kept) == delta.KEPT and {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
