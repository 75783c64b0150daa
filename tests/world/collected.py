"""What `gc` takes: only jobs that have ended and that somebody gave up, and nothing that another job needs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.world.linux.kernel import Process

if TYPE_CHECKING:
    from tests.world.invariants import Truth
    from tests.world.linux.inodes import Inode

FINAL = ("succeeded", "failed", "stopped", "lost")
SUPERVISES = "TORCHFERRY_SUPERVISES"
CODE, DATA = b"print('hello')\n", b"1 2 3\n"
"""What each job is sent with: its main.py, and the file rows in the folder code/data that some include."""
_JOB = re.compile(r"/(root|home/u\d+)/\.torchferry/jobs/[a-z0-9-]+\Z")
_ASIDE = re.compile(r"/(tmp/gc-|jobs/\.gc-)[0-9]+-[0-9a-f]+\Z")


class Collected:
    """Which job folders were taken away, and when."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.kernel = truth.world.kernel
        self.jobs: dict[int, str] = {}
        """Inode -> the job's folder."""
        self.given_up: set[str] = set()
        """Roots of which some client has given up the ended jobs."""
        self.includes: set[str] = set()
        """Folders of jobs that include data."""
        self.promised: set[tuple[str, int]] = set()
        """The folders, and which of the same name, of which a client was told that the job has started."""
        self.asked = 0
        self.kernel.seen.append(self.hear)

    def hear(self, what: str, about: Any) -> None:
        if what != "named" or not about.is_folder:
            return
        path = about.path()
        if _JOB.match(path):
            self.jobs[about.ino] = path
        elif about.ino in self.jobs and _ASIDE.search(path):
            self._taken(self.jobs.pop(about.ino), about)

    def _taken(self, folder: str, inode: Inode) -> None:
        if folder.partition("/jobs/")[0] not in self.given_up:
            self.truth.broken(f"{folder} was collected, and nobody has given it up")
        try:
            status = json.loads(bytes(inode.names["status.json"].data))
        except (KeyError, ValueError):
            status = {"state": "unknown"}
        is_broken_off = "status.json" not in inode.names and (folder, self.truth.folders[folder]) not in self.promised
        told = {left["pid"] for left in status.get("remaining") or ()}
        runs = [p for p in self._of(folder) if p.pid not in told]
        unwritten = self.kernel.disk.room() < 1 << 20  # how it ended could be told, and not written
        if not self.truth.damaged and (not (is_broken_off or unwritten or status["state"] in FINAL) or runs):
            self.truth.broken(f"{folder} was collected while it was {status['state']}, and {runs} ran")
        self.truth.forget(folder)

    def _of(self, folder: str) -> list[Process]:
        return [*self.truth.of(folder), *(p for p in self.truth.world.processes() if p.env.get(SUPERVISES) == folder)]

    def check_code(self, process: Process, folder: str) -> None:
        """A program begins: what it was sent with is there."""
        wanted = {f"{folder}/main.py": CODE}
        if folder in self.includes:
            wanted[f"{folder}/code/data/rows"] = DATA
        for path, data in wanted.items():
            try:
                inode = self.kernel.disk.lookup(process, path).inode
            except OSError:
                inode = None
            if inode is None or inode.data != data:
                self.truth.broken(f"{process} begins, and {path} is {inode and bytes(inode.data)!r}")

    def check_report(self, root: str, report: Any, before: dict[str, int]) -> None:
        """What a collection says of itself. `before`: how often each folder had been taken when it began."""
        for job in report.jobs:
            folder = f"{root}/jobs/{job.id}"
            if self.truth.folders[folder] == before.get(folder, 0):
                self.truth.broken(f"gc says that {job.id} is gone, and it is there")
        tmp = self.kernel.disk.find(f"{root}/tmp")
        left = {f"{root}/tmp/{name}" for name in (tmp.names if tmp is not None else ()) if name.startswith("gc-")}
        if self.asked == 1 and left - set(report.remaining):
            self.truth.broken(f"gc says that {report.remaining} could not be removed, and {left} is there")
