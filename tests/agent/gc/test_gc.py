"""What `gc` removes on the disk, and that it never takes what a job, a launch or a process still needs."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gc import collect
from deployer.agent.gc.choose import AGENT, BLOB, CACHE, DATA, ENV, PACK, SPARE, TREE
from deployer.agent.host.files import remove_folder
from deployer.agent.host.layout import Root
from deployer.agent.host.locks import hold
from deployer.agent.host.machine import own_identity
from deployer.agent.host.typed import from_json
from deployer.agent.job.status import STOPPED, GroupStatus, Status, write_status
from deployer.agent.job.stop import request_stop
from deployer.agent.store import spare
from deployer.agent.store.content import Store
from deployer.agent.store.packs import PackWriter
from deployer.agent.store.tree import content_hash
from tests.support.jobs import end_of, make_job, make_plan, python, said, start, wait_for
from tests.support.storing import DAY_S, disk, ended, keep, make_old


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


class Called:
    """The call of a `gc` request; `found` is its answer."""

    def __init__(self, root: Root, **head: Any) -> None:
        self.head, self.found = head, {}  # type: dict[str, Any], dict[str, Any]
        collect.gc(root, self)  # type: ignore[arg-type]

    def read(self, kind: type[Any]) -> Any:
        return from_json(self.head, kind)

    def send_event(self, name: str, value: Any) -> None:
        self.found = {kind: row["count"] for kind, row in ((row["kind"], row) for row in value["rest"])}
        self.jobs = [row["id"] for row in value["jobs"]]
        self.kept = {row["what"]: row["count"] for row in value["kept_jobs"]}
        self.value = value


def make_cache(root: Root, name: str = "torch-2.13.0_cudnn") -> Path:
    cache = Path(root.cache) / "compile" / name
    (cache / "fxgraph").mkdir(parents=True)
    (cache / "fxgraph" / "a").write_bytes(bytes(100_000))
    return cache


def listed(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def blobs_in(root: Root) -> list[bytes]:
    return sorted(path.read_bytes() for path in Path(root.blobs).rglob("*") if path.is_file())


def test_files_of_trees_that_no_job_names_are_collected_and_others_stay_whole(root: Root, tmp_path: Path) -> None:
    old, needed = keep(root, {"code/a": b"1", "code/b": b"shared"}), keep(root, {"code/c": b"2", "code/b": b"shared"})
    ended(root, "a", needed)
    make_old(root.path)
    assert Called(root).found == {TREE: 1, BLOB: 1}
    assert not Store(root).has_tree(old)
    Store(root).materialise(needed, str(tmp_path / "copy"))
    assert blobs_in(root) == [b"2", b"shared"]


def test_a_pack_goes_when_no_tree_needs_a_file_of_it(root: Root) -> None:
    needed = keep(root, {"code/a": b"1"})
    ended(root, "a", needed)
    for content in (b"1", b"2"):
        pack = PackWriter(root)
        pack.add(content_hash(content), content)
        pack.publish()
    Path(root.packs, "1-" + "0" * 16).write_bytes(b"broken")
    make_old(root.path)
    assert Called(root).found == {PACK: 2}
    assert Store(root).packs.read(content_hash(b"1")) == b"1"


def test_a_dry_run_removes_nothing_and_tells_the_same(root: Root) -> None:
    keep(root, {"code/a": b"1"})
    make_old(root.path)
    shown = Called(root, dry_run=True)
    assert blobs_in(root) == [b"1"]
    assert Called(root).found == shown.found == {TREE: 1, BLOB: 1}


def test_what_came_within_the_hour_stays(root: Root) -> None:
    keep(root, {"code/a": b"1"})
    assert Called(root).found == {}


def test_jobs_go_by_age_with_what_only_they_needed(root: Root) -> None:
    ended(root, "old", keep(root, {"code/a": b"1"}), days=40)
    ended(root, "new", keep(root, {"code/b": b"2"}), days=20)
    make_old(Path(root.path) / "store")
    called = Called(root, older_than_s=30 * DAY_S)
    assert (called.jobs, called.found, blobs_in(root)) == (["old"], {TREE: 1, BLOB: 1}, [b"2"])
    assert listed(root.jobs) == ["new"] and listed(root.tmp) == []


def test_a_job_whose_launch_broke_off_goes_too(root: Root) -> None:
    job = root.job("half")
    Path(job.control).mkdir(parents=True)
    Path(job.lock).touch()
    make_old(root.path)
    assert Called(root, older_than_s=30 * DAY_S).jobs == ["half"]
    assert listed(root.jobs) == []


def test_a_job_whose_checkpoint_another_one_began_from_stays(root: Root) -> None:
    source = ended(root, "source")
    ended(root, "follower", days=1, text=f"train:\n  resume: {source.path}/checkpoints/step_000010\n")
    assert Called(root, older_than_s=30 * DAY_S).jobs == []
    assert Called(root, older_than_s=0).jobs == ["follower", "source"]


def test_a_job_of_another_machine_stays(root: Root) -> None:
    elsewhere = own_identity()._replace(machine_id="other/box", hostname="box")
    ended(root, "theirs", supervisor=elsewhere)
    called = Called(root, older_than_s=0)
    assert (called.jobs, called.kept) == ([], {"of other machines": 1})


def test_a_cache_stays_while_a_job_of_another_machine_runs(root: Root) -> None:
    elsewhere = own_identity()._replace(machine_id="other/box", hostname="box")
    cache, theirs = make_cache(root), ended(root, "theirs", state="running", supervisor=elsewhere)
    make_old(root.path)
    assert Called(root, max_bytes=0).found == {} and cache.exists()
    write_status(theirs, Status(STOPPED, supervisor=elsewhere))
    assert Called(root, max_bytes=0).found == {CACHE: 1} and not cache.exists()


def test_a_running_job_keeps_all_that_it_needs_and_goes_after_its_end(root: Root) -> None:
    plan = make_plan(python("import time; print('up'); time.sleep(1000)"), tree=keep(root, {"code/a": b"1"}))
    cache = make_cache(root)
    running = start(make_job(Path(root.path), "up", plan), plan)
    said(running, "up")
    make_old(root.path)
    try:
        assert (called := Called(root, older_than_s=0)).jobs == [] and called.kept == {"not ended yet": 1}
        assert Called(root, max_bytes=0).found == {}
        assert blobs_in(root) == [b"1"] and cache.exists()
    finally:
        request_stop(running, 0)
        end_of(running)
    assert Called(root, older_than_s=0).jobs == ["up"] and blobs_in(root) == [] and not cache.exists()


def test_an_ended_job_of_which_a_process_runs_on_stays(root: Root) -> None:
    left = ended(root, "left")
    argv = ["sleep", "1000"]
    pid = os.posix_spawnp("sleep", argv, {**os.environ, "TORCHFERRY_JOB_ID": left.id})
    try:
        wait_for(lambda: b"TORCHFERRY_JOB_ID=left" in Path(f"/proc/{pid}/environ").read_bytes())
        assert Called(root, older_than_s=0).jobs == []
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_job_that_somebody_is_starting_again_stays_with_what_it_began_from(root: Root) -> None:
    source = ended(root, "source")
    again = ended(root, "again", days=40, text=f"resume: {source.path}/checkpoints/step_1")
    with Path(again.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Called(root, older_than_s=0).jobs == []
    assert Called(root, older_than_s=0).jobs == ["again", "source"]


def test_data_environments_agents_and_leftovers_go_when_nobody_uses_them(root: Root) -> None:
    store = Store(root)
    used, unused = keep(root, {"set/x": b"1"}), keep(root, {"set/y": b"2"})
    for tree in (used, unused):
        store.shared(tree, "set")
    (env, other_env), (agent, other_agent) = ("0" * 20, "1" * 20), ("a" * 20, "b" * 20)
    folders = f"envs/{env}/bin envs/{other_env}/bin agent/{agent}/agent agent/{other_agent}/agent tmp/blob-1-ab"
    for folder in folders.split():
        (Path(root.path) / folder).mkdir(parents=True)
    slots = {"python": f"{root.envs}/{env}/bin/python", "agent": f"{root.agents}/{agent}/agent"}
    ended(root, "a", used, groups=(GroupStatus(slots=slots),))
    make_old(root.path)
    held = hold(f"{root.agents}/{other_agent}")
    assert Called(root).found == {TREE: 1, BLOB: 1, DATA: 1, ENV: 1, AGENT: 1, "tmp": 1}
    assert (listed(root.data), listed(root.envs), listed(root.agents)) == ([used], [env], [other_agent])
    assert held is not None and os.close(held) is None


def test_caches_of_compiled_code_are_collected_when_nobody_uses_them(root: Root) -> None:
    caches = ["compile/torch-2.11.0+cu130_triton-3.6.0_cudnn", "compile/torch-2.13.0_cudnn", "bytecode"]
    for name in [*caches, "compile/mine", "other"]:
        (Path(root.cache) / name).mkdir(parents=True)
    make_old(root.path)
    os.utime(Path(root.cache) / caches[1])  # as a start does
    assert Called(root).found == {CACHE: 2}
    assert sorted(str(p.relative_to(root.cache)) for p in Path(root.cache).rglob("*")) == [
        "compile", "compile/mine", caches[1], "other",
    ]  # fmt: skip


def test_bytecode_of_a_job_s_code_goes_after_the_job(root: Root) -> None:
    there, gone = ended(root, "there"), ended(root, "gone")
    bytecode = Path(root.cache) / "bytecode-01234567"
    for made in (there, gone):
        (bytecode / made.code.lstrip("/")).mkdir(parents=True)
    shutil.rmtree(gone.path)
    make_old(root.path)
    os.utime(bytecode)  # as a start does
    assert Called(root).found == {"tmp": 1}
    assert listed(f"{bytecode}{root.jobs}") == ["there"]


def test_a_cache_that_is_a_link_is_its_user_s_and_stays(root: Root, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    make_cache(root, "torch-2.11.0_cudnn")
    link = Path(root.cache) / "compile" / "torch-2.13.0_cudnn"
    link.symlink_to(tmp_path / "elsewhere")
    make_old(root.path)
    assert Called(root, max_bytes=0).found == {CACHE: 1}
    assert link.is_dir()


def test_what_a_link_leads_to_is_neither_counted_nor_changed(root: Root, tmp_path: Path) -> None:
    moved = ended(root, "moved")
    elsewhere = tmp_path / "elsewhere"
    Path(moved.path).rename(elsewhere)
    (elsewhere / "big").write_bytes(bytes(1_000_000))
    elsewhere.chmod(0o750)
    Path(moved.path).symlink_to(elsewhere)
    called = Called(root, older_than_s=0)
    assert called.jobs == ["moved"] and called.value["total_bytes"] < 100_000
    assert (elsewhere / "big").exists() and elsewhere.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("name", ["jobs", "cache"])
def test_a_folder_on_another_disk_is_renamed_there_and_then_removed(root: Root, tmp_path: Path, name: str) -> None:
    with disk(tmp_path / "large", "size=4m") as large:
        Path(root.path).mkdir()
        (Path(root.path) / name).symlink_to(large)
        ended(root, "a")
        make_cache(root)
        make_old(root.path)
        make_old(large)
        called = Called(root, older_than_s=0)
        assert (called.jobs, called.found, called.value["remaining"]) == (["a"], {CACHE: 1}, [])
        assert [path.name for path in large.rglob("*")] == ([] if name == "jobs" else ["compile"])


def test_what_was_put_aside_beside_itself_is_no_job_and_goes_with_the_next_collection(root: Root) -> None:
    for folder in (root.jobs, root.data, root.envs, root.agents, root.cache, f"{root.cache}/compile"):
        (Path(folder) / ".gc-1-ab" / "code").mkdir(parents=True)
    make_old(root.path)
    assert root.all_jobs() == []
    assert Called(root).found == {"tmp": 6}
    assert list(Path(root.path).rglob(".gc-*")) == []


def test_a_disk_without_room_for_another_folder_is_collected(root: Root) -> None:
    with disk(root.path, "size=4m,nr_inodes=100") as full:
        make_cache(root)
        keep(root, {"code/a": b"1"})
        Called(root)  # there was a collection before
        Path(root.tmp).rmdir()
        make_old(full)
        with pytest.raises(OSError, match="No space left"):
            for n in range(100):
                (full / f"filler{n}").touch()
        called = Called(root)
        assert (called.found, called.value["remaining"]) == ({TREE: 1, BLOB: 1, CACHE: 1}, [])
        assert listed(f"{root.cache}/compile") == []


def test_what_cannot_be_removed_is_told_and_not_counted_and_keeps_nothing_else(root: Root) -> None:
    stuck, cache = make_cache(root, "torch-2.11.0_cudnn"), make_cache(root)
    Path(root.tmp).mkdir()
    with disk(stuck / "mounted", "size=1m,ro"):
        make_old(cache)
        aside = stuck
        for found in ({CACHE: 1}, {}):  # the next collection tries again
            os.utime(aside, (1, 1))
            called = Called(root)
            assert called.found == found
            [aside] = map(Path, called.value["remaining"])
            assert (aside / "mounted").is_mount()
        assert listed(str(cache.parent)) == []


def test_folders_that_their_owner_may_not_even_list_are_removed(tmp_path: Path) -> None:
    closed = tmp_path / "a" / "closed"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir(mode=0o750)
    closed.chmod(0)
    remove_folder(str(tmp_path / "a"))
    assert listed(str(tmp_path)) == ["other"] and (tmp_path / "other").stat().st_mode & 0o777 == 0o750


def test_an_environment_that_is_being_built_stays(root: Root) -> None:
    env = Path(root.envs) / ("0" * 20)
    env.mkdir(parents=True)
    make_old(root.path)
    with Path(f"{env}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Called(root).found == {}
    assert Called(root).found == {ENV: 1}


def test_what_is_not_named_as_torchferry_does_is_none_of_its_business(root: Root) -> None:
    """A root such as /workspace has folders of its user's beside ours, of the same names."""
    files = (
        "data/imdb/train.jsonl envs/mine/bin/python jobs/thesis/notes.txt agent/x.py tmp/y store/trees/z store/spare/w"
    )
    for name in files.split():
        path = Path(root.path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    make_old(root.path)
    called = Called(root, older_than_s=0, max_bytes=0)
    assert (called.found, called.jobs, called.kept) == ({}, [], {})
    assert all((Path(root.path) / name).exists() for name in files.split())


def test_the_spare_keeps_its_tree_for_a_week(root: Root) -> None:
    spare.make(root, keep(root, {"code/a": b"1"}))
    make_old(root.path, days=6)
    assert Called(root).found == {}
    make_old(root.path, days=8)
    assert Called(root).found == {TREE: 1, BLOB: 1, SPARE: 1}


def test_a_collection_that_was_killed_half_way_is_finished_by_the_next(root: Root) -> None:
    keep(root, {"code/a": b"1"})
    next(Path(root.trees).iterdir()).unlink()
    (Path(root.tmp) / "gc-1-ab" / "job").mkdir(parents=True)
    make_old(root.path)
    assert Called(root).found == {BLOB: 1, "tmp": 1}
    assert Called(root).found == {}


@pytest.mark.soak
def test_a_collection_killed_at_any_moment_harms_nothing_and_the_next_one_ends_it(root: Root, tmp_path: Path) -> None:
    moments = random.Random(3)
    needed = keep(root, {f"code/{n}": b"%d" % n for n in range(50)})
    ended(root, "kept", needed, days=1)
    for turn in range(40):
        ended(root, f"old{turn}", keep(root, {f"code/{n}": b"%d" % (n + turn) for n in range(200)}))
        make_old(Path(root.path) / "store")
        collecting = multiprocessing.get_context("fork").Process(target=Called, args=(root,), kwargs=OLD)
        collecting.start()
        collecting.join(moments.uniform(0, 0.6))
        collecting.kill()
        collecting.join()
        trees = [name for name in listed(root.trees) if Store(root).has_tree(name)]
        for number, name in enumerate(trees):  # what is said to be here is whole
            Store(root).materialise(name, str(tmp_path / f"{turn}-{number}"))
        assert needed in trees
    make_old(root.tmp)
    Called(root, **OLD)
    assert listed(root.jobs) == ["kept"]
    assert len(blobs_in(root)) == 50 and listed(root.tmp) == []


OLD = {"older_than_s": 30 * DAY_S}
