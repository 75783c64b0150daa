"""The spare copy of a tree: what a launch takes from it is what the store would have written."""

import json
import os
from pathlib import Path

import pytest

from deployer.agent.host.layout import Root
from deployer.agent.store import spare
from deployer.agent.store.content import Store
from tests.support.storing import keep


def read(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = (path.read_bytes(), os.access(path, os.X_OK))
    return found


OLD: dict[str, bytes | str] = {"code/a": b"1", "code/gone/b": b"2", "code/bin/x": b"3", "code/l": "a", "lib/t": b"5"}
NEW: dict[str, bytes | str] = {
    "code/a": b"1",
    "code/gone": b"file",
    "code/bin/x": b"4",
    "code/l": "bin/x",
    "code/n/m": b"",
}


@pytest.mark.parametrize("wanted", [OLD, NEW, {"code/only": b"9"}], ids=["same", "changed", "other"])
def test_launch_with_a_spare_gets_the_same_files_as_without(tmp_path, wanted):
    root = Root(str(tmp_path / "root"))
    spare.make(root, keep(root, OLD))
    name = keep(root, wanted)
    Store(root).materialise(name, str(tmp_path / "plain"))
    (tmp_path / "job").mkdir()
    spare.materialise(root, name, str(tmp_path / "job"))
    assert read(tmp_path / "job") == read(tmp_path / "plain")
    assert not (tmp_path / "root" / "store" / "spare").exists() and not list(Path(root.tmp).iterdir())


def test_file_of_the_spare_that_somebody_touched_is_written_anew(tmp_path):
    root = Root(str(tmp_path / "root"))
    name = keep(root, OLD)
    spare.make(root, name)
    file = tmp_path / "root" / "store" / "spare" / "tree" / "code" / "a"
    times = file.stat()
    file.write_bytes(b"X")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "job").mkdir()
    spare.materialise(root, name, str(tmp_path / "job"))
    assert (tmp_path / "job" / "code" / "a").read_bytes() == b"1"


def test_spare_serves_one_launch_and_a_damaged_record_none(tmp_path):
    root = Root(str(tmp_path / "root"))
    name = keep(root, OLD)
    spare.make(root, name)
    (tmp_path / "root" / "store" / "spare" / "record.json").write_text("{")
    for job in ("one", "two"):
        (tmp_path / job).mkdir()
        spare.materialise(root, name, str(tmp_path / job))
    assert read(tmp_path / "one") == read(tmp_path / "two") != {}


def test_spare_of_a_former_boot_is_not_used(tmp_path):
    root = Root(str(tmp_path / "root"))
    name = keep(root, OLD)
    spare.make(root, name)
    folder = tmp_path / "root" / "store" / "spare"
    file, record = folder / "tree/code/a", json.loads((folder / "record.json").read_text())
    file.write_bytes(b"\0")  # as a power cut may leave it, with all that was noted of it
    found = file.lstat()
    record["marks"]["code/a"] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    (folder / "record.json").write_text(json.dumps({**record, "boot": "another"}))
    (tmp_path / "job").mkdir()
    spare.materialise(root, name, str(tmp_path / "job"))
    assert (tmp_path / "job/code/a").read_bytes() == b"1"
    assert not folder.exists() and not list(Path(root.tmp).iterdir())


def test_process_that_makes_it_later_leaves_a_whole_spare(tmp_path):
    from tests.support.jobs import wait_for

    root = Root(str(tmp_path / "root"))
    spare.make_later(root, keep(root, OLD))
    assert wait_for(lambda: (tmp_path / "root" / "store" / "spare" / "record.json").exists())
