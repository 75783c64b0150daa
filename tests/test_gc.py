"""What `gc` removes, and that it never takes what a job, a launch or a process still needs."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import pty
import random
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer.agent import gc, spare, state
from deployer.agent.errors import AgentError
from deployer.agent.frames import Frame
from deployer.agent.garbage import (
    AGENT,
    BLOB,
    CACHE,
    DATA,
    ENV,
    MIN_AGE_S,
    PACK,
    SPARE,
    TREE,
    Inventory,
    JobItem,
    Policy,
    Removals,
    Thing,
    choose,
)
from deployer.agent.layout import Job, Root
from deployer.agent.listing import all_jobs
from deployer.agent.packs import PackWriter
from deployer.agent.removal import remove_folder
from deployer.agent.start import launch
from deployer.agent.store import Store
from deployer.agent.storelock import hold_agent, is_held, store_alone, store_in_use
from deployer.agent.tree import FILE, Entry, content_hash, dump_entries, root_hash
from tests.ferry import Ferry
from tests.jobs import end_of, make_job, make_plan, python, said, start, wait_for
from tests.limits import HANG_S
from tests.storing import keep

DAY_S = 86400.0


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


def job(name: str, *, ended_s: float | None = 10 * DAY_S, size: int = 10, names: Any = (), **more: Any) -> JobItem:
    values = {"foreign": False, "settled": True, "known": True, **more}
    return JobItem(name, size, ended_s, names=frozenset(names), **values)


def inventory(*jobs: JobItem, things: Any = (), blobs_of: Any = None, names_of: Any = None) -> Inventory:
    return Inventory(jobs, tuple(things), blobs_of or {}, {}, names_of or {}, None)


def gone(inventory: Inventory, **limits: Any) -> list[str]:
    return sorted(job.id for job in choose(inventory, Policy(**limits)).jobs)


# --- which jobs -------------------------------------------------------------------------------------------------------

FIVE = inventory(*(job(f"j{n}", ended_s=n * DAY_S) for n in range(1, 6)))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, []),
        ({"older_than_s": 3.5 * DAY_S}, ["j4", "j5"]),
        ({"keep_jobs": 2}, ["j3", "j4", "j5"]),
        ({"keep_jobs": 0}, ["j1", "j2", "j3", "j4", "j5"]),
        ({"max_bytes": 25}, ["j3", "j4", "j5"]),
        ({"max_bytes": 25, "keep_jobs": 4}, ["j5"]),
        ({"older_than_s": 0, "keep_jobs": 3}, ["j4", "j5"]),
        ({"older_than_s": 4.5 * DAY_S, "max_bytes": 35}, ["j4", "j5"]),
        ({"keep_jobs": 0, "only": frozenset({"j1", "j9"})}, ["j1"]),
    ],
)
def test_ended_jobs_go_by_age_number_and_size(limits: dict[str, Any], expected: list[str]) -> None:
    assert gone(FIVE, **limits) == expected


@pytest.mark.parametrize("other", [{"ended_s": None}, {"foreign": True}])
def test_a_job_that_runs_or_is_another_machine_s_never_goes(other: dict[str, Any]) -> None:
    assert gone(inventory(job("a", **other)), older_than_s=0, max_bytes=0) == []


def test_a_job_from_which_a_kept_one_began_stays_and_goes_with_it() -> None:
    began = job("b", ended_s=DAY_S, names={"a"})
    assert gone(inventory(job("a"), began), older_than_s=2 * DAY_S) == []
    assert gone(inventory(job("a"), began), older_than_s=0) == ["a", "b"]


def test_a_job_into_which_the_code_of_a_kept_one_links_stays() -> None:
    linking = job("b", ended_s=DAY_S, names={"tree"})
    assert gone(inventory(job("a"), linking, names_of={"tree": frozenset({"a"})}), older_than_s=2 * DAY_S) == []


# --- what jobs share --------------------------------------------------------------------------------------------------


def test_what_no_job_needs_goes_with_the_last_one_that_needed_it() -> None:
    things = [Thing(kind, f"{kind}{n}", 1, 9 * DAY_S) for kind in (TREE, BLOB, DATA, ENV, AGENT) for n in (1, 2)]
    found = inventory(
        job("a", names={"tree1", "data1", "env1", "agent1"}),
        job("b", ended_s=None, names={"tree2", "data2", "env2", "agent2"}),
        things=things,
        blobs_of={"tree1": frozenset({"blob1"}), "tree2": frozenset({"blob2"})},
    )
    assert [thing.name for thing in choose(found, Policy()).things] == ["agent1"]  # an ended job runs no agent
    assert {t.name for t in choose(found, Policy(keep_jobs=0)).things} == {"tree1", "blob1", "data1", "env1", "agent1"}


def test_what_is_young_or_held_by_a_process_stays() -> None:
    young = [Thing(kind, kind, 1, age_s - 1) for kind, age_s in MIN_AGE_S.items()]
    held = [Thing(kind, kind + "2", 1, 99 * DAY_S, in_use=True) for kind in MIN_AGE_S]
    assert choose(inventory(things=young + held), Policy()).things == ()
    old = [thing._replace(age_s=MIN_AGE_S[thing.kind]) for thing in young]
    assert len(choose(inventory(things=old), Policy()).things) == len(MIN_AGE_S)


@pytest.mark.parametrize(
    ("age_days", "limits", "running", "goes"),
    [
        (29, {}, False, False),
        (30, {}, False, True),
        (99, {}, True, False),  # a job that runs may be about to read it
        (1, {"max_bytes": 14}, False, True),
        (1, {"max_bytes": 14}, True, False),
        (1, {"max_bytes": 15}, False, False),
    ],
)
def test_caches_go_by_age_and_before_jobs_by_size(
    age_days: int, limits: dict[str, Any], running: bool, goes: bool
) -> None:
    things = [Thing(CACHE, "compile/torch-2", 5, age_days * DAY_S)]
    found = inventory(job("a", ended_s=None if running else DAY_S), things=things)
    chosen = choose(found, Policy(**limits))
    assert (bool(chosen.things), chosen.jobs) == (goes, ())


@pytest.mark.parametrize(
    ("state", "stay"),
    [({"known": False}, {TREE, BLOB, PACK, DATA, ENV, AGENT}), ({"settled": False}, {ENV, AGENT})],
)
def test_while_a_job_s_needs_are_unknown_nothing_goes_that_it_might_need(state: dict[str, Any], stay: set[str]) -> None:
    things = [Thing(kind, kind, 1, 99 * DAY_S) for kind in (TREE, BLOB, PACK, DATA, ENV, AGENT, SPARE)]
    found = inventory(job("a", ended_s=None, **state), things=things)
    assert {thing.kind for thing in things} - {t.kind for t in choose(found, Policy()).things} == stay


NAMES = [f"{kind}{n}" for kind in (TREE, DATA, ENV, AGENT) for n in range(4)]
IDS = [f"job{n}" for n in range(6)]
BLOBS = [f"blob{n}" for n in range(6)]
PACKS = ["pack0", "pack1"]
CACHES = ["cache0", "cache1"]
AGES = st.sampled_from([0.0, 3599.0, 3601.0, 2 * DAY_S, 40 * DAY_S])


@st.composite
def inventories(draw: Any) -> Inventory:
    words = st.frozensets(st.sampled_from(NAMES + IDS), max_size=6)
    jobs = tuple(
        JobItem(
            name,
            draw(st.integers(0, 100)),
            draw(st.none() | AGES),
            draw(st.booleans()),
            draw(words) - {name},
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for name in draw(st.sets(st.sampled_from(IDS)))
    )
    names = [*NAMES, *BLOBS, *PACKS, *CACHES, "spare0"]
    things = tuple(Thing(name[:-1], name, 5, draw(AGES), draw(st.booleans())) for name in names)
    trees = [name for name in NAMES if name.startswith(TREE)]
    blobs = {tree: draw(st.frozensets(st.sampled_from(BLOBS))) for tree in trees}
    links = {tree: draw(st.frozensets(st.sampled_from(IDS), max_size=1)) for tree in trees}
    packed = {pack: draw(st.frozensets(st.sampled_from(BLOBS))) for pack in PACKS}
    return Inventory(jobs, things, blobs, packed, links, draw(st.none() | st.sampled_from(trees)))


POLICIES = st.builds(
    Policy, st.none() | AGES, st.none() | st.integers(0, 300), st.none() | st.integers(0, 4), st.none()
)


@settings(max_examples=150)
@given(inventories(), POLICIES)
def test_nothing_goes_that_a_kept_job_needs(found: Inventory, policy: Policy) -> None:
    removed = choose(found, policy)
    ids, names = {j.id for j in removed.jobs}, {t.name for t in removed.things}
    assert all(j.ended_s is not None and not j.foreign for j in removed.jobs)
    for kept in (j for j in found.jobs if j.id not in ids):
        trees = {name for name in kept.names if name.startswith(TREE)}
        linked = {name for tree in trees for name in found.names_of[tree]}
        blobs = {blob for tree in trees for blob in found.blobs_of[tree]}
        agents = {name for name in kept.names if name.startswith(AGENT)} if kept.ended_s is not None else set()
        assert not (kept.names | linked) - {kept.id} & ids
        assert not ((kept.names | blobs) - agents) & names
    if any(job.ended_s is None for job in found.jobs):
        assert not names.intersection(CACHES)
    left = {t.name for t in found.things if t.kind == TREE} - names
    whole = {blob for tree in left for blob in found.blobs_of[tree]}
    assert not whole & names  # a tree that is left is whole
    assert not any(found.packed[pack] & whole for pack in names.intersection(PACKS))
    assert choose(_without(found, removed), policy).things == ()  # and once more finds nothing


def _without(found: Inventory, removed: Removals) -> Inventory:
    return found._replace(
        jobs=tuple(j for j in found.jobs if j not in removed.jobs),
        things=tuple(t for t in found.things if t not in removed.things),
    )


# --- on the disk ------------------------------------------------------------------------------------------------------


class Called:
    """The call of a `gc` request; `found` is its answer."""

    def __init__(self, root: Root, **head: Any) -> None:
        self.head, self.found = head, {}  # type: dict[str, Any], dict[str, Any]
        gc.gc(root, self)  # type: ignore[arg-type]

    def send_event(self, name: str, value: Any) -> None:
        self.found = {kind: row["count"] for kind, row in ((row["kind"], row) for row in value["rest"])}
        self.jobs = [row["id"] for row in value["jobs"]]
        self.kept = {row["what"]: row["count"] for row in value["kept_jobs"]}
        self.value = value


def make_old(folder: str | Path, *, days: float = 60) -> None:
    then = time.time() - days * DAY_S
    for path in [*Path(folder).rglob("*"), Path(folder)]:
        os.utime(path, (then, then), follow_symlinks=False)


def ended(root: Root, name: str, tree: str = "", *, days: float = 60, text: str = "", **status: Any) -> Job:
    """A job as it lies there after its end."""
    made = make_job(Path(root.path), name, make_plan(["true"], tree=tree))
    Path(made.config).write_text(text)
    then = state.utc(time.time() - days * DAY_S)
    supervisor = state.own_identity()._replace(start_time=1)._asdict()
    state.write_status(made, {"state": "succeeded", "ended_at": then, "supervisor": supervisor, **status})
    return made


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


def test_a_job_whose_checkpoint_another_one_began_from_stays(root: Root) -> None:
    source = ended(root, "source")
    ended(root, "follower", days=1, text=f"train:\n  resume: {source.path}/checkpoints/step_000010\n")
    assert Called(root, older_than_s=30 * DAY_S).jobs == []
    assert Called(root, older_than_s=0).jobs == ["follower", "source"]


def test_a_job_of_another_machine_stays(root: Root) -> None:
    elsewhere = state.own_identity()._replace(machine_id="other/box", hostname="box")._asdict()
    ended(root, "theirs", supervisor=elsewhere)
    called = Called(root, older_than_s=0)
    assert (called.jobs, called.kept) == ([], {"of other machines": 1})


def test_a_cache_stays_while_a_job_of_another_machine_runs(root: Root) -> None:
    elsewhere = state.own_identity()._replace(machine_id="other/box", hostname="box")._asdict()
    cache, theirs = make_cache(root), ended(root, "theirs", state="running", supervisor=elsewhere)
    make_old(root.path)
    assert Called(root, max_bytes=0).found == {} and cache.exists()
    state.write_status(theirs, {"state": "stopped", "supervisor": elsewhere})
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
        state.request_stop(running, 0)
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
    ended(root, "a", used, slots=slots)
    make_old(root.path)
    held = hold_agent(f"{root.agents}/{other_agent}")
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


@contextmanager
def disk(folder: str | Path, options: str) -> Iterator[Path]:
    """A small file system of its own."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    held = os.open(folder, os.O_RDONLY)  # gc moves it
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", Path(f"/proc/self/fd/{held}").readlink()], check=True)
        os.close(held)


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
    assert all_jobs(root) == []
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


# --- the command ------------------------------------------------------------------------------------------------------


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

    def __init__(self, root: Root, plan: dict[str, Any], content: bytes, entry: Entry) -> None:
        self.root, self.plan, self.content, self.entry = root, plan, content, entry
        self.cancelled, self.revoked, self.head = threading.Event(), False, {}
        self.free_at: dict[str, bool] = {}

    def request(self) -> dict[str, Any]:
        return {"plan": self.plan}

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
    assert end_of(root.job("a"))["state"] == "succeeded"


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
    agent = multiprocessing.get_context("fork").Process(target=hold_agent, args=(str(tmp_path),))
    agent.start()
    agent.join(HANG_S)
    assert not is_held(str(tmp_path))
    held = hold_agent(str(tmp_path))
    assert held is not None and is_held(str(tmp_path))
