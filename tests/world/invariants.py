"""What must always hold, looked at whenever it could have ceased to."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.world.attempts import Attempts
from tests.world.collected import Collected
from tests.world.leases import Ledger
from tests.world.linux.kernel import Endless, Process, S
from tests.world.programs import CHILDREN, JOBS

if TYPE_CHECKING:
    from tests.world.linux.inodes import Inode
    from tests.world.world import World

FINAL = ("succeeded", "failed", "stopped", "lost")
RUN_DIR, ATTEMPT, SUPERVISES = "TORCHFERRY_RUN_DIR", "TORCHFERRY_ATTEMPT", "TORCHFERRY_SUPERVISES"


WHOLE = ("status.json", "job.json", "stop.json")
"""Nobody may ever see a part of them."""


class Broken(AssertionError):
    """An invariant does not hold."""


def what_breaks(make_run: Callable[[], Any]) -> str | None:
    """Carries out the run of a schedule, of the host or of the trainer: what does not hold, None for nothing."""
    was = gc.isenabled()
    gc.disable()  # what is collected closes files, at a moment that no seed decides
    run = make_run()
    try:
        run.carry_out()
    except (Broken, Endless) as broken:
        return str(broken)
    finally:
        run.world.end()
        if was:
            gc.enable()
    return None


def role_of(process: Process) -> str:
    """One of ROLES; "" for others."""
    words = process.argv
    if words[-1] == "agent":
        return "agent"
    if words[0] == "client":
        return "client"
    if words[0] == "launcher":
        return "launcher"
    if words[0] in JOBS:
        return "program"
    if any(word.endswith("supervisor.start") for word in words):
        return "supervisor"
    return "rank" if any(word.endswith("/rank.py") for word in words) else ""


class Truth:
    """What really happened to the jobs' programs, as the kernel saw it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started: Counter[tuple[str, str, str]] = Counter()
        """(job folder, attempt, rank) -> programs."""
        self.codes: dict[tuple[str, str, str], int] = {}
        """How each ended; 128 + N for signal N."""
        self.ended_ns: dict[tuple[str, str, str], int] = {}
        self.stop_asked_ns: dict[str, int] = {}
        """When a client began to ask for a stop."""
        self.folders: Counter[str] = Counter()
        """Job folder -> how often a collection has taken it away."""
        self.attempts = Attempts(self)
        self.collected = Collected(self)
        self.neighbours: list[Process] = []
        """Processes that have nothing to do with any job."""
        self.damaged = False
        """Somebody has damaged files: what they say then is not ours."""
        self.hides_lease = False
        """Somebody has taken a lease's name or words away: until its supervisor gives it others nobody can see it."""
        world.kernel.seen.append(self.hear)
        self.ledger = Ledger(world, self.broken, self._is_stopping)

    def broken(self, what: str) -> None:
        """Ends the schedule, from wherever it was seen."""
        self.world.kernel.failure = self.world.kernel.failure or what

    def hear(self, what: str, about: Any) -> None:
        if what == "exec":
            self._begins(about)
        elif what == "ended":
            self._ends(about)
        elif what == "named" and not self.damaged:
            self._named(about)
        elif what == "written" and not self.damaged and about.places and about.places[0].name in WHOLE:
            self.broken(f"{about.path()} is written in place")

    def forget(self, folder: str) -> None:
        """A collection has taken the job away; its id may begin anew."""
        self.folders[folder] += 1
        for of in (self.started, self.codes, self.ended_ns):
            for key in [key for key in of if key[0] == folder]:
                del of[key]  # type: ignore[attr-defined]
        self.stop_asked_ns.pop(folder, None)
        self.attempts.forget(folder)

    def _is_stopping(self, folder: str) -> bool:
        """Somebody waits for its stop, or has left the request where its supervisor looks."""
        waits = any(ns > self.world.kernel.now_ns for ns in self.attempts.stops_ns[folder].values())
        return waits or self.world.kernel.disk.find(f"{folder}/control/stop.json") is not None

    def of(self, folder: str) -> list[Process]:
        """The processes that carry the job's marks, its supervisors apart."""
        return [
            p
            for p in self.world.processes()
            if p.env.get(RUN_DIR) == folder and SUPERVISES not in p.env and role_of(p) != "agent"
        ]

    def _key(self, process: Process) -> tuple[str, str, str]:
        return process.env.get(RUN_DIR, ""), process.env.get(ATTEMPT, ""), process.env.get("RANK", "0")

    def _begins(self, process: Process) -> None:
        if process.argv[0] in CHILDREN:
            return
        key = self._key(process)
        self.started[key] += 1
        if self.started[key] > 1:
            self.broken(f"{key} was started {self.started[key]} times")
        self.attempts.begins(*key[:2])
        self.collected.check_code(process, key[0])
        self._check_gpus(process)

    def _check_gpus(self, process: Process) -> None:
        if self.hides_lease:
            return
        mine = set(filter(None, process.env.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        for other in self.world.processes():
            if other.argv[0] in JOBS and other.env.get(RUN_DIR) != process.env.get(RUN_DIR):
                shared = mine & set(filter(None, other.env.get("CUDA_VISIBLE_DEVICES", "").split(",")))
                if shared:
                    self.broken(f"GPU {shared} is used by {other} and by {process}")

    def _ends(self, process: Process) -> None:
        if role_of(process) == "program" and process.argv[0] not in CHILDREN and process.env.get(RUN_DIR):
            status = process.status
            self.codes[self._key(process)] = 128 + (status & 0x7F) if status & 0x7F else status >> 8
            self.ended_ns[self._key(process)] = self.world.kernel.now_ns

    def _named(self, inode: Inode) -> None:
        if not inode.places or inode.places[0].name != "status.json":
            return
        path = inode.path()
        try:
            status = json.loads(bytes(inode.data))
        except ValueError:
            self.broken(f"{path} was given its name with {bytes(inode.data)[:40]!r} in it")
            return
        if status.get("state") in FINAL:
            self.check_ended(path.rpartition("/")[0], status)

    def check_whole(self) -> None:
        """After a power cut: whatever has its name is whole."""
        if self.damaged:
            return
        jobs = self.world.kernel.disk.find("/root/.torchferry/jobs")
        for job in list(jobs.names.values()) if jobs is not None else []:
            control = job.names.get("control")
            for folder in (job, control):
                for name, inode in folder.names.items() if folder is not None else ():
                    if name in WHOLE:
                        try:
                            json.loads(bytes(inode.data))
                        except ValueError:
                            self.broken(f"after a power cut {inode.path()} is {bytes(inode.data)[:60]!r}")

    def check_ended(self, folder: str, status: dict[str, Any]) -> None:
        """A job that is said to have ended has no process but those that are told to remain."""
        told = {left["pid"] for left in status.get("remaining") or ()}
        if told and not self.damaged:
            self.broken(f"{folder} is said to have left {told}, and each process of this world can be ended")
        left = [p for p in self.of(folder) if p.pid not in told]
        if left:
            self.broken(f"{folder} is said to be {status['state']} ({status.get('reason')}), and {left} run")

    # --- at the end -------------------------------------------------------------------------------------------------

    def check_code(self, folder: str, status: dict[str, Any], *, was_stopped: bool, ranks: int, is_blind: bool) -> None:
        """The state and code are those of what really happened. `is_blind`: whoever saw the ends may have been held."""
        attempt = str(status.get("attempt", 1))
        codes = {key[2]: code for key, code in self.codes.items() if key[:2] == (folder, attempt)}
        state, code = status["state"], status.get("code")
        words = f"{folder} is {state}, {code} ({status.get('reason')}), and its programs ended with {codes}"
        if state == "succeeded" and (len(codes) < ranks or any(codes.values())):
            self.broken(words)
        unseen = is_blind and f"before attempt {attempt} was seen to run" in str(status.get("reason"))
        if state == "failed" and status.get("first_failing_rank") is not None and not unseen:  # else of the former one
            true = codes.get(str(status["first_failing_rank"]))
            if true is not None and true != code:
                self.broken(words)
            if true == 0:
                self.broken(words)
        if state == "stopped" and not was_stopped:
            self.broken(f"{words}; nobody has stopped it")
        asked_ns = None if is_blind else self.stop_asked_ns.get(folder)
        ends = [self.ended_ns[(folder, attempt, rank)] for rank, code in codes.items() if code]
        if state == "stopped" and asked_ns is not None and ends and min(ends) + S < asked_ns:
            self.broken(f"{words}, {(asked_ns - min(ends)) / S:.1f} s before anybody asked for a stop")

    def check_whole_code(self, folder: str, status: dict[str, Any], ranks: int) -> None:
        """Nothing went wrong: the verdict is exactly that of the programs."""
        attempt = str(status.get("attempt", 1))
        codes = {key[2]: code for key, code in self.codes.items() if key[:2] == (folder, attempt)}
        failed = {rank: code for rank, code in codes.items() if code}
        words = f"{folder} is {status['state']}, {status.get('code')} ({status.get('reason')}); its programs: {codes}"
        if not codes and status["state"] == "failed":  # of what else could it fail?
            self.broken(words)
        if len(codes) == ranks and not failed and status["state"] != "succeeded":
            self.broken(words)
        if failed:
            first = min(failed, key=lambda rank: self.ended_ns[(folder, attempt, rank)])
            ends = self.ended_ns[(folder, attempt, first)]
            seen_ns = max(50_000_000, 500 * self.world.kernel.step_ns)  # a slow host sees them together
            close = [r for r in failed if self.ended_ns[(folder, attempt, r)] - ends < seen_ns]
            if status["state"] != "failed" or status.get("code") not in [failed[r] for r in close]:
                self.broken(words)
