"""The store on the host: what comes out is what went in, nothing leads out of a tree, several agents at once."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Root
from deployer.agent.store.content import Store
from deployer.agent.store.tree import Entry, content_hash, entry_of_link, root_hash
from deployer.project.manifest import scan


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Root(str(tmp_path / "root")))


def put(store: Store, data: bytes) -> str:
    digest = content_hash(data)
    writer = store.writer(digest, len(data))
    writer.write(data)
    writer.finish()
    return digest


def file(path: str, data: bytes, mode: str = "f") -> Entry:
    return Entry(path, mode, len(data), content_hash(data))


def saved(store: Store, files: dict[str, bytes]) -> str:
    for data in files.values():
        put(store, data)
    return store.save_tree([file(path, data) for path, data in files.items()])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def in_folder(folder: str | Path) -> list[Path]:
    return list(Path(folder).iterdir())


def test_a_tree_comes_out_as_it_went_in(store: Store, tmp_path: Path) -> None:
    put(store, b"x = 1\n")
    put(store, b"")
    entries = [file("code/a/b.py", b"x = 1\n"), file("run.sh", b"", "x"), entry_of_link("code/near", "a/b.py")]
    name = store.save_tree(entries)
    store.materialise(name, str(tmp_path / "job"))
    assert contents(tmp_path / "job") == {"code/a/b.py": b"x = 1\n", "code/near": b"x = 1\n", "run.sh": b""}
    assert (tmp_path / "job/code/near").readlink() == Path("a/b.py")
    assert stat.S_IMODE((tmp_path / "job/run.sh").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "job/code/a/b.py").stat().st_mode) == 0o600
    assert name == root_hash(entries) and store.load_tree(name) == sorted(entries)


def test_the_client_s_scan_of_a_copy_equals_the_scan_of_the_original(store: Store, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "pkg/é x.py").write_text("1")
    (project / "run").write_text("2")
    (project / "run").chmod(0o755)
    (project / "link").symlink_to("pkg")
    first = scan(project, hash_cache=None)
    for source in first.sources.values():
        put(store, Path(source).read_bytes())
    store.materialise(store.save_tree(first.entries), str(tmp_path / "job"))
    assert scan(tmp_path / "job/code", hash_cache=None).entries == first.entries


def test_a_copy_is_its_own_file(store: Store, tmp_path: Path) -> None:
    name = saved(store, {"a": b"before"})
    store.materialise(name, str(tmp_path / "one"))
    (tmp_path / "one/a").write_bytes(b"after")
    store.materialise(name, str(tmp_path / "two"))
    assert (tmp_path / "two/a").read_bytes() == b"before"


def test_missing_names_each_absent_blob_once(store: Store) -> None:
    put(store, b"here")
    entries = [file("a", b"here"), file("b", b"absent"), file("c", b"absent"), entry_of_link("d", "a")]
    assert store.missing(entries) == [content_hash(b"absent")]


def test_a_blob_of_another_content_is_refused_and_leaves_nothing(store: Store) -> None:
    writer = store.writer(content_hash(b"announced"), 9)
    writer.write(b"different")
    with pytest.raises(AgentError, match="are not the 9 bytes announced") as caught:
        writer.finish()
    assert caught.value.kind == "usage" and "changed while it was being sent" in caught.value.hint
    assert in_folder(store.root.tmp) == []
    assert store.missing([file("a", b"announced")]) == [content_hash(b"announced")]


def test_an_aborted_blob_leaves_nothing(store: Store) -> None:
    writer = store.writer(content_hash(b"12"), 2)
    writer.write(b"1")
    writer.abort()
    assert in_folder(store.root.tmp) == []


@pytest.mark.parametrize("damage", [b"", b"evil!", b"longer than before"])
def test_a_damaged_blob_is_asked_for_again(store: Store, tmp_path: Path, damage: bytes) -> None:
    name = saved(store, {"a": b"intact"[:5]})
    digest = content_hash(b"intact"[:5])
    Path(store.root.blobs, digest[:2], digest[2:]).write_bytes(damage)
    with pytest.raises(AgentError) as caught:
        store.materialise(name, str(tmp_path / "job"))
    assert caught.value.kind == "need"
    assert not store.has_tree(name)
    assert store.missing([file("a", b"intact"[:5])]) == [digest]


def test_a_damaged_tree_is_asked_for_again(store: Store) -> None:
    name = saved(store, {"a": b"1"})
    Path(store.root.trees, name).write_bytes(b"[]")
    with pytest.raises(AgentError) as caught:
        store.load_tree(name)
    assert (caught.value.kind, store.has_tree(name)) == ("need", False)


@pytest.mark.parametrize(
    "entries",
    [
        [entry_of_link("a", "/etc"), file("a/passwd", b"")],
        [entry_of_link("a", ".."), file("a/b/c", b"")],
        [file("a", b""), file("a/b", b"")],
        [file("a", b""), file("a", b"1")],
        [file("../a", b"")],
        [file("/etc/passwd", b"")],
        [file("a//b", b"")],
        [Entry("a", "f", 0, "")],
        [Entry("a", "f", 0, "ab")],
        [Entry("a", "d", 0, content_hash(b""))],
    ],
)
def test_a_tree_that_could_lead_out_is_refused(store: Store, entries: Sequence[Entry]) -> None:
    with pytest.raises(AgentError) as caught:
        store.save_tree(entries)
    assert caught.value.kind == "usage"
    assert not Path(store.root.trees).exists()


def test_no_link_in_the_destination_is_followed(store: Store, tmp_path: Path) -> None:
    name = saved(store, {"a/b": b"new", "c": b"new"})
    (tmp_path / "job").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "job/a").symlink_to(tmp_path / "outside")
    (tmp_path / "job/c").symlink_to(tmp_path / "outside/c")
    with pytest.raises(AgentError):
        store.materialise(name, str(tmp_path / "job"))
    (tmp_path / "job/a").unlink()
    with pytest.raises(AgentError):
        store.materialise(name, str(tmp_path / "job"))
    assert in_folder(tmp_path / "outside") == []


@pytest.mark.parametrize("left", [b"", b"print(", b"print(\0\0\0", bytes(9), None])
def test_a_copy_that_a_power_cut_damaged_is_mended(store: Store, tmp_path: Path, left: bytes | None) -> None:
    job = tmp_path / "job"
    name = saved(store, {"code/main.py": b"print(1)\n", "code/notes": b"one\n"})
    store.materialise(name, str(job))
    (job / "code/notes").write_bytes(b"ten\n")  # the job's own change
    if left is None:
        (job / "code/main.py").unlink()
    else:
        (job / "code/main.py").write_bytes(left)
    store.mend(name, str(job))
    assert contents(job) == {"code/main.py": b"print(1)\n", "code/notes": b"ten\n"}


def test_what_a_job_has_put_in_the_place_of_its_code_is_left_alone(store: Store, tmp_path: Path) -> None:
    job, outside = tmp_path / "job", tmp_path / "outside"
    files = ("code/link/a", "code/link/deep/b", "code/file/c", "code/d", "code/e")
    name = saved(store, {**dict.fromkeys(files, b"sent\n"), "code/main.py": b"print(1)\n"})
    store.materialise(name, str(job))
    (outside / "deep").mkdir(parents=True)
    for path in ("a", "deep/b", "d"):
        (outside / path).write_bytes(b"")  # as a power cut leaves a file
    for folder in ("link", "file"):
        shutil.rmtree(job / "code" / folder)
    for path in ("d", "e"):
        (job / "code" / path).unlink()
    (job / "code/link").symlink_to(outside)
    (job / "code/file").write_bytes(b"now a file\n")
    (job / "code/d").symlink_to(outside / "d")
    os.mkfifo(job / "code/e")
    (job / "code/main.py").write_bytes(b"")
    store.mend(name, str(job))
    assert (job / "code/main.py").read_bytes() == b"print(1)\n"
    assert [(outside / path).read_bytes() for path in ("a", "deep/b", "d")] == [b""] * 3
    assert (job / "code/link").is_symlink() and (job / "code/d").is_symlink() and (job / "code/e").is_fifo()
    assert (job / "code/file").read_bytes() == b"now a file\n"


def test_a_copy_is_mended_by_the_listing_beside_it_when_the_store_has_lost_its_tree(
    store: Store, tmp_path: Path
) -> None:
    job, listing = tmp_path / "job", tmp_path / "listing"
    name = saved(store, {"code/main.py": b"print(1)\n"})
    store.materialise(name, str(job))
    for _ in range(2):  # a launch that was cut off is done again
        store.keep_listing(name, str(listing))
    shutil.rmtree(store.root.trees)
    (job / "code/main.py").write_bytes(b"")
    store.mend(name, str(job), str(listing))
    assert (job / "code/main.py").read_bytes() == b"print(1)\n"
    with pytest.raises(AgentError, match="this host has no whole listing of the tree"):
        store.mend(name, str(job))


def test_a_copy_whose_listings_are_all_damaged_is_refused_each_time(store: Store, tmp_path: Path) -> None:
    job, listing = tmp_path / "job", tmp_path / "listing"
    name = saved(store, {"code/main.py": b"print(1)\n"})
    store.materialise(name, str(job))
    store.keep_listing(name, str(listing))
    whole = listing.read_bytes()
    listing.write_bytes(bytes(len(whole)))  # of the store's too: it is one file
    (job / "code/main.py").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(AgentError, match="no whole listing"):
            store.mend(name, str(job), str(listing))
    listing.unlink()
    listing.write_bytes(whole)
    store.mend(name, str(job), str(listing))
    assert (job / "code/main.py").read_bytes() == b"print(1)\n"


def test_a_copy_is_not_mended_from_a_damaged_blob(store: Store, tmp_path: Path) -> None:
    name = saved(store, {"code/main.py": b"print(1)\n"})
    store.materialise(name, str(tmp_path / "job"))
    digest = content_hash(b"print(1)\n")
    (Path(store.root.blobs) / digest[:2] / digest[2:]).write_bytes(bytes(9))
    store.mend(name, str(tmp_path / "job"))  # the copy is whole
    (tmp_path / "job/code/main.py").write_bytes(b"")
    with pytest.raises(AgentError, match=r"this host's copy of code/main\.py was damaged"):
        store.mend(name, str(tmp_path / "job"))


def test_a_copy_that_cannot_be_mended_is_refused_each_time(store: Store, tmp_path: Path) -> None:
    name = saved(store, {"code/main.py": b"print(1)\n", "code/notes": b"one\n"})
    store.materialise(name, str(tmp_path / "job"))
    (tmp_path / "job/code/main.py").unlink()
    digest = content_hash(b"print(1)\n")
    (Path(store.root.blobs) / digest[:2] / digest[2:]).unlink()
    for _ in range(2):
        with pytest.raises(AgentError, match=r"this host does not have the content of code/main\.py"):
            store.mend(name, str(tmp_path / "job"))
        assert store.has_tree(name)


def test_what_a_job_has_put_in_the_place_of_files_and_folders_is_not_mended(store: Store, tmp_path: Path) -> None:
    job, outside = tmp_path / "job", tmp_path / "outside"
    name = saved(store, {"code/out/keep": b"1\n", "code/in/keep": b"2\n", "code/log": b"3\n"})
    store.materialise(name, str(job))
    outside.mkdir()
    (outside / "log").write_bytes(b"")
    for folder in ("out", "in"):
        shutil.rmtree(job / "code" / folder)
    (job / "code/log").unlink()
    (job / "code/out").symlink_to(outside)
    (job / "code/in").write_bytes(b"no folder\n")
    (job / "code/log").symlink_to(outside / "log")
    store.mend(name, str(job))
    assert in_folder(outside) == [outside / "log"]
    assert (job / "code/in").read_bytes() == b"no folder\n"
    assert (job / "code/log").is_symlink()


def test_names_like_a_hash_only_are_looked_up(store: Store) -> None:
    for name in ("../../etc/passwd", "", "A" * 40, "a" * 39, "a" * 41, "a" * 40 + "\n"):
        with pytest.raises(AgentError):
            store.load_tree(name)


def test_shared_data_is_read_only_and_made_once(store: Store) -> None:
    name = saved(store, {"train/x.jsonl": b"{}\n"})
    path = Path(store.shared(name, "data"))
    assert path == Path(store.root.data, name, "data")
    assert contents(path) == {"train/x.jsonl": b"{}\n"}
    assert [stat.S_IMODE((path / p).stat().st_mode) for p in ("", "train", "train/x.jsonl")] == [0o500, 0o500, 0o400]
    assert store.shared(name, "data") == str(path)
    assert in_folder(store.root.tmp) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path / "train" / "x.jsonl").write_bytes(b""),
        lambda path: (path / "train" / "x.jsonl").unlink(),
        lambda path: ((path / "a").unlink(), (path / "a").mkdir()),
        lambda path: (shutil.rmtree(path), path.write_bytes(b"12")),
        lambda path: (shutil.rmtree(path), path.symlink_to("nowhere")),
    ],
)
def test_shared_data_that_was_damaged_is_made_again(store: Store, spoil: Callable[[Path], object]) -> None:
    files = {"train/x.jsonl": b"{}\n", "a": b"1"}
    name = saved(store, files)
    path = Path(store.shared(name, "data"))
    for folder in (path, path / "train"):
        folder.chmod(0o700)
        for file in folder.iterdir():
            file.chmod(0o700)
    spoil(path)
    assert store.shared(name, "data") == str(path)
    assert contents(path) == files
    assert in_folder(store.root.tmp) == []


@pytest.mark.parametrize("kind", [None, True])
def test_a_shared_file_that_was_cut_is_made_again(store: Store, kind: bool | None) -> None:
    name = saved(store, {"x.jsonl": b"{}\n"})
    path = Path(store.shared(name, "x.jsonl", file=kind))
    path.chmod(0o600)
    path.write_bytes(b"{")
    assert Path(store.shared(name, "x.jsonl", file=kind)).read_bytes() == b"{}\n"


@pytest.mark.parametrize("kind", [None, True])
def test_a_shared_file_is_the_file_itself(store: Store, kind: bool | None) -> None:
    name = saved(store, {"x.jsonl": b"{}\n"})
    assert Path(store.shared(name, "x.jsonl", file=kind)).read_bytes() == b"{}\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x"])
def test_a_shared_name_that_leads_out_is_refused(store: Store, name: str) -> None:
    with pytest.raises(AgentError):
        store.shared(saved(store, {"a": b""}), name)


def use_the_store(path: str, number: int) -> None:
    store = Store(Root(path))
    files = {f"pkg{n % 7}/f{n}.py": b"%d" % n * 1000 for n in range(60)}
    name = saved(store, files)
    store.materialise(name, f"{path}/job{number}")
    store.shared(name, "data")
    assert contents(Path(path, f"job{number}")) == files


def test_several_agents_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=use_the_store, args=(str(tmp_path), n)) for n in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0] * 6
    assert in_folder(tmp_path / "tmp") == []


def test_a_blob_beyond_the_free_space_is_refused_at_once(store: Store) -> None:
    with pytest.raises(AgentError, match=r"no room below .* are needed") as caught:
        store.writer("a" * 40, 10**18)
    assert caught.value.kind == "host" and "--remote-root" in caught.value.hint


def test_a_full_disk_says_where_and_leaves_nothing(store: Store) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = store.writer(content_hash(b"1" * 99_999), 99_999)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a quota: EFBIG, for python ignores SIGXFSZ
    try:
        with pytest.raises(AgentError, match=r"cannot write .*root/tmp.*MB are free") as caught:
            writer.write(b"1" * 99_999)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.kind == "host"
    assert in_folder(store.root.tmp) == []


def test_a_root_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentError, match=r"cannot write .*file.*: Not a directory") as caught:
        Store(Root(str(tmp_path / "file"))).save_tree([])
    assert "--remote-root" in caught.value.hint
