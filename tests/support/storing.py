"""What lies on a host, for tests of its store: trees, ended jobs, old files, small disks."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job, Root
from deployer.agent.host.machine import own_identity
from deployer.agent.job.status import SUCCEEDED, Status, utc, write_status
from deployer.agent.store.content import Store
from deployer.agent.store.tree import EXECUTABLE, FILE, Entry, content_hash, entry_of_link, root_hash
from tests.support.jobs import make_job, make_plan

DAY_S = 86400.0


def keep(root: Root, files: dict[str, bytes | str]) -> str:
    """A tree in the store: bytes are files (executable below bin/), text is a link's target."""
    entries = []
    for path, content in files.items():
        if isinstance(content, str):
            entries.append(entry_of_link(path, content))
            continue
        mode = EXECUTABLE if "/bin/" in path else FILE
        entries.append(Entry(path, mode, len(content), content_hash(content)))
        writer = Store(root).writer(content_hash(content), len(content))
        writer.write(content)
        writer.finish()
    Store(root).save_tree(entries)
    return root_hash(entries)


def make_old(folder: str | Path, *, days: float = 60) -> None:
    then = time.time() - days * DAY_S
    for path in [*Path(folder).rglob("*"), Path(folder)]:
        os.utime(path, (then, then), follow_symlinks=False)


def ended(root: Root, name: str, tree: str = "", *, days: float = 60, text: str = "", **status: Any) -> Job:
    """A job as it lies there after its end."""
    made = make_job(Path(root.path), name, make_plan(["true"], tree=tree))
    Path(made.config).write_text(text)
    then = utc(time.time() - days * DAY_S)
    plain = Status(SUCCEEDED, supervisor=own_identity()._replace(start_time=1), ended_at=then, attempt=1)
    write_status(made, plain._replace(**status))
    return made


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
