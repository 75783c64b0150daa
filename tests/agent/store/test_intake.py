"""Blobs that arrive as one stream: in the store, in a pack, in the tree of the job; whole, or not at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Root
from deployer.agent.store.content import Store
from deployer.agent.store.intake import PACK_FROM, SMALL_BYTES, Intake, TreeWriter
from deployer.agent.store.tree import FILE, Entry, content_hash


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Root(str(tmp_path / "root")))


def some(count: int, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(source.choice([0, 1, 300, 5000])) + b"%d" % number for number in range(count)]


def tree_of(blobs: Sequence[bytes]) -> list[Entry]:
    return [Entry(f"d{n % 3}/f{n}", FILE, len(data), content_hash(data)) for n, data in enumerate(blobs)]


def take(store: Store, blobs: Sequence[bytes], *, cut: int = 1000, tree_writer: TreeWriter | None = None) -> bool:
    names = [(content_hash(data), len(data)) for data in blobs]
    intake = Intake(store, names, {name for name, _ in names}, tree_writer)
    stream = b"".join(blobs)
    for start in range(0, len(stream), cut):
        intake.feed(stream[start : start + cut])
    return intake.finish()


def read(store: Store, blobs: Sequence[bytes], folder: Path) -> list[bytes]:
    entries = tree_of(blobs)
    store.materialise(store.save_tree(entries), str(folder))
    return [(folder / entry.path).read_bytes() for entry in entries]


@pytest.mark.parametrize("cut", [1, 7, 1000, 10**9])
@pytest.mark.parametrize("count", [3, PACK_FROM + 8])
def test_stream_cut_anywhere_comes_out_as_its_blobs(store, tmp_path, cut, count):
    blobs = [b"", *some(count), b"last"]
    assert take(store, blobs, cut=cut)
    assert read(store, blobs, tmp_path / "job") == blobs
    assert list(Path(store.root.tmp).iterdir()) == []


def test_large_blob_among_many_small_ones(store, tmp_path):
    blobs = [*some(PACK_FROM), bytes(SMALL_BYTES + 1), *some(5, seed=1)]
    assert take(store, blobs, cut=48_000)
    assert read(store, blobs, tmp_path / "job") == blobs


def test_pack_is_unpacked_into_the_same_blobs(store, tmp_path):
    blobs = some(PACK_FROM)
    take(store, blobs)
    assert len(list(Path(store.root.packs).iterdir())) == 1 and not Path(store.root.blobs).exists()
    store.unpack()
    assert list(Path(store.root.packs).iterdir()) == []
    assert read(Store(store.root), blobs, tmp_path / "job") == blobs


def test_store_that_looked_before_a_pack_was_unpacked_still_finds_its_blobs(store, tmp_path):
    blobs = some(PACK_FROM)
    take(store, blobs)
    assert store.missing(tree_of(blobs)) == []
    Store(store.root).unpack()
    assert read(store, blobs, tmp_path / "job") == blobs


@pytest.mark.parametrize("size", [0, 5, 100])
def test_pack_cut_by_a_power_failure_holds_nothing(store, size):
    blobs = some(PACK_FROM)
    take(store, blobs)
    (pack,) = Path(store.root.packs).iterdir()
    pack.write_bytes(pack.read_bytes()[:size])
    assert len(Store(store.root).missing(tree_of(blobs))) == len(set(blobs))


def test_damaged_pack_is_dropped_and_its_blobs_asked_for_again(store, tmp_path):
    blobs = [*some(PACK_FROM), b"x" * 500]
    take(store, blobs)
    (pack,) = Path(store.root.packs).iterdir()
    pack.write_bytes(pack.read_bytes().replace(b"x" * 500, b"y" * 500))
    with pytest.raises(AgentError) as caught:
        read(Store(store.root), blobs, tmp_path / "job")
    assert caught.value.kind == "need" and not pack.exists()


@pytest.mark.parametrize("count", [2, PACK_FROM])
def test_other_bytes_than_announced_leave_nothing(store, count):
    blobs = [*some(count), b"announced"]
    names = [(content_hash(data), len(data)) for data in blobs]
    intake = Intake(store, names, {name for name, _ in names}, TreeWriter(store, tree_of(blobs)))
    with pytest.raises(AgentError, match="not the 9 bytes announced") as caught:
        intake.feed(b"".join([*blobs[:-1], b"different"]))
    intake.abort()
    assert "changed while it was being sent" in caught.value.hint
    assert list(Path(store.root.tmp).iterdir()) == []


def test_stream_that_ends_early_says_so_and_keeps_what_came(store):
    blobs = some(PACK_FROM)
    names = [(content_hash(data), len(data)) for data in blobs]
    intake = Intake(store, names, {name for name, _ in names})
    intake.feed(b"".join(blobs[:-1]))
    assert not intake.finish()
    assert store.missing(tree_of(blobs)) == [content_hash(blobs[-1])]


def test_blobs_that_are_here_are_passed_over(store):
    blobs = some(4)
    names = [(content_hash(data), len(data)) for data in blobs]
    intake = Intake(store, names, {names[1][0]})
    intake.feed(b"".join(blobs))
    assert intake.finish()
    assert store.missing(tree_of(blobs)) == [name for name, _ in (names[0], *names[2:])]


def test_planted_tree_has_every_path_of_a_blob(store):
    entries = [*tree_of(some(PACK_FROM)), Entry("again", "x", 301, tree_of(some(PACK_FROM))[0].hash)]
    tree_writer = TreeWriter(store, entries)
    take(store, some(PACK_FROM), tree_writer=tree_writer)
    arrived = tree_writer.finish()
    assert sorted(arrived.entries) == sorted(entries)
    assert (Path(arrived.folder) / "tree/again").read_bytes() == some(PACK_FROM)[0]
