"""The attempts of jobs: one at a time, under the right number, and what the earlier ones left stays."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.world.invariants import Truth
    from tests.world.linux.inodes import Inode
    from tests.world.schedule import Command

ATTEMPT = "TORCHFERRY_ATTEMPT"


class Attempts:
    """What was asked for, what began, and what lay there of the earlier ones when the next began."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.disk = truth.world.kernel.disk
        self.asked: dict[str, dict[int, int]] = defaultdict(dict)
        """Job folder -> attempts that some client has asked to resume it with -> when it was first asked."""
        self.stops_ns: dict[str, dict[Command, int]] = defaultdict(dict)
        """Job folder -> when each client that asked for a stop had its answer, or lost hope of one."""
        self.restarts: dict[str, int] = {}
        """Job folder -> how often its supervisor may begin it again."""
        self.left: dict[tuple[str, int], dict[str, bytes]] = {}
        """(job folder, attempt) -> its logs and records when a later one began."""

    def ask(self, folder: str, attempt: int) -> None:
        self.asked[folder].setdefault(attempt, self.truth.world.kernel.now_ns)

    def forget(self, folder: str) -> None:
        for key in [key for key in self.left if key[0] == folder]:
            del self.left[key]

    def begins(self, folder: str, attempt: str) -> None:
        """A program of it."""
        others = [p for p in self.truth.of(folder) if p.env.get(ATTEMPT) != attempt]
        if others:
            self.truth.broken(f"attempt {attempt} of {folder} begins, and {others} of another one run")
        number = int(attempt)
        begun = {1, *self.asked[folder]}
        if not self._may_be(folder, number, begun):
            self.truth.broken(f"attempt {attempt} of {folder} begins; asked for were {sorted(begun)}")
        for earlier in range(1, number):
            self.left.setdefault((folder, earlier), self._files(folder, earlier))

    def _may_be(self, folder: str, attempt: int, begun: set[int]) -> bool:
        return any(first <= attempt <= first + self.restarts.get(folder, 0) for first in begun)

    def _files(self, folder: str, attempt: int) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for kind in ("logs", "ranks"):
            top = self.disk.find(f"{folder}/{kind}/attempt_{attempt}")
            self._read(top, found)
        return found

    def _read(self, inode: Inode | None, found: dict[str, bytes]) -> None:
        for below in inode.names.values() if inode is not None else ():
            if below.is_folder:
                self._read(below, found)
            elif not below.path().endswith(".tmp"):
                found[below.path()] = bytes(below.data)

    def check_refused(self, folder: str, attempt: int, why: str) -> None:
        """One client alone has asked for this attempt, and was told that it cannot be: then it is not."""
        is_its_own = not self._may_be(folder, attempt, {1, *self.asked[folder]} - {attempt})
        if is_its_own and any(key[:2] == (folder, str(attempt)) for key in self.truth.started):
            self.truth.broken(f"attempt {attempt} of {folder} runs, and who asked for it was refused: {why}")

    def check_earlier(self) -> None:
        """At the end: what the earlier attempts left is as it was."""
        for (folder, attempt), before in self.left.items():
            now = self._files(folder, attempt)
            for path in before.keys() | now.keys():
                if before.get(path) != now.get(path):
                    self.truth.broken(
                        f"{path} was {before.get(path)!r} when a later attempt began, and is {now.get(path)!r}"
                    )

    def check_reports(self, folder: str, status: dict[str, Any], *, is_whole: bool) -> None:
        """The status tells of the attempts in their order, each with its own end. `is_whole`: of each one."""
        told = [report["attempt"] for report in status.get("attempts", ())]
        if told != sorted(set(told)) or (told and told[-1] > status["attempt"]):
            self.truth.broken(f"{folder} is at attempt {status['attempt']}, and tells of {told}")
        begun = {int(key[1]) for key in self.truth.started if key[0] == folder}
        if is_whole and begun - set(told):
            self.truth.broken(f"{folder} tells of the attempts {told}, and {sorted(begun)} have begun")
        since_ns = 0 if self.restarts.get(folder) else self.asked[folder].get(status["attempt"], 0)  # begun by itself?
        if status["state"] == "stopped" and max(self.stops_ns[folder].values(), default=0) < since_ns:
            self.truth.broken(f"attempt {status['attempt']} of {folder} is stopped, and a former one was to be")
        for report in status.get("attempts", ()):
            true = self.truth.codes.get((folder, str(report["attempt"]), str(report.get("first_failing_rank"))))
            if report.get("state", "failed") == "failed" and true is not None and true != report.get("code"):
                self.truth.broken(f"{folder} tells of {report}, and that rank ended with {true}")
