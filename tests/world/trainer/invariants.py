"""What must always hold of a run folder, looked at whenever it could have ceased to."""

from __future__ import annotations

import fcntl
import json
import pickle
import re
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tests.world.linux.kernel import Process
from tests.world.trainer.programs import RUN_DIR, START, TENSORS, content, loss_of, random_of

if TYPE_CHECKING:
    from tests.world.linux.inodes import Inode, OpenFile
    from tests.world.trainer.schedule import Schedule
    from tests.world.world import World

CHECKPOINTS = f"{RUN_DIR}/checkpoints"
STEP = re.compile(r"step_(\d{6})")
BAD = re.compile(r"\.bad_step_(\d{6})(_\d+)?")
REPLACED = re.compile(r"\.tmp_step_(\d{6})_replaced")
REMOVED = re.compile(r"\.tmp_step_(\d{6})_removed")
SAVED = re.compile(rf"saved {CHECKPOINTS}/step_(\d{{6}}) \(")
WHOLE = ("outcome.json", "failure.json", "config.yaml")


def role_of(process: Process) -> str:
    """One of ROLES; "" for others."""
    if "trainer.saver.main" in process.argv:
        return "saver"
    return process.argv[0] if process.argv[0] in ("rank", "launcher") else ""


class Truth:
    """What the run folder holds, and what was said of it."""

    def __init__(self, world: World, schedule: Schedule) -> None:
        self.world, self.schedule = world, schedule
        self.owner = ""
        """The start whose rank has taken the run folder last."""
        self.damaged: set[int] = set()
        """Folders of checkpoints that the schedule has damaged, by number of the inode."""
        self.told: dict[int, int] = {}
        """Steps that were told as saved -> the folder's inode."""
        self.aside: dict[int, tuple[Inode, dict[str, bytes]]] = {}
        self.found: dict[str, dict[int, Inode]] = {}
        """Start -> what had the name of a checkpoint when it began to choose."""
        self.resumed: dict[str, dict[int, int]] = {}
        """Start -> rank -> the step it went on from."""
        self.excused: set[str] = set()
        """Starts that met an error of a call while they chose."""
        self.committed = -1
        """The step of the checkpoint that was given its name last."""
        self.lines: list[str] = []
        self.stop_asked: set[str] = set()
        world.kernel.seen.append(self.hear)

    def broken(self, what: str) -> None:
        """Ends the schedule, from wherever it was seen."""
        self.world.kernel.failure = self.world.kernel.failure or what

    # --- what happens -----------------------------------------------------------------------------------------------

    def hear(self, what: str, about: Any) -> None:
        if what == "named":
            self._named(about)
        elif what == "written":
            self._written(about)
        elif what == "locked":
            self._locked(about)
        elif what == "choosing":
            self._choosing(about)
        elif what == "resumed":
            self._resumed(*about)

    def heard(self, start: str, line: str) -> None:
        """A line that a start has told."""
        self.lines.append(f"{start}: {line}")
        match = SAVED.search(line)
        if match:
            self._saved(int(match[1]))
        if "Traceback" in line:
            self.broken(f"start {start} tells a stack trace: {line}")

    def is_excused(self) -> bool:
        """Whether the start that acts has met an error of a call: what it could not read, it could not go on from."""
        process = self._actor()
        return process is None or process.env.get(START) in self.excused

    def _actor(self) -> Process | None:
        current = self.world.kernel.current
        return current.process if current is not None else None

    def _locked(self, file: OpenFile) -> None:
        process, path = self._actor(), file.inode.path()
        # the last of the two that a start takes for itself alone
        is_taken = path.endswith("ranks.lock") and file.inode.locks[file] == fcntl.LOCK_EX
        if is_taken and process is not None and role_of(process) == "rank":
            self.owner = process.env[START]

    def _check_owner(self, path: str) -> None:
        process = self._actor()
        if process is not None and role_of(process) in ("rank", "saver") and process.env[START] != self.owner:
            self.broken(f"{process} of start {process.env[START]} changes {path}, which start {self.owner} has taken")

    def _written(self, inode: Inode) -> None:
        if not inode.places:
            return
        path = inode.path()
        if not path.startswith(RUN_DIR):
            return
        name = inode.places[0].name
        if name in WHOLE:
            self.broken(f"{path} is written in place")
        if path.startswith(CHECKPOINTS):
            self._check_owner(path)
            if STEP.fullmatch(path.split("/")[4]):
                self.broken(f"{path} is written, and its folder has its final name")

    def _named(self, inode: Inode) -> None:
        place = inode.place
        if place is None or not (path := inode.path()).startswith(RUN_DIR):
            return
        if place.name == "outcome.json":
            self._check_outcome(bytes(inode.data))
        if not path.startswith(f"{CHECKPOINTS}/"):
            return
        self._check_owner(path)
        if inode.is_folder and path.count("/") == CHECKPOINTS.count("/") + 1:
            self._folder_named(inode, place.name)

    def _folder_named(self, folder: Inode, name: str) -> None:
        if match := STEP.fullmatch(name):
            why = self.why_not_whole(folder, int(match[1]))
            if why:
                self.broken(f"{name} has its name, and {why}")
            self.committed = int(match[1])
        elif match := BAD.fullmatch(name):
            self.aside[folder.ino] = folder, {n: bytes(i.data) for n, i in folder.names.items()}
            if self.is_whole(folder, int(match[1])) and not self.is_excused():
                self.broken(f"{name} was set aside, and it was whole")
        elif match := REMOVED.fullmatch(name):
            self._removed(int(match[1]), folder)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def folders(self) -> dict[int, Inode]:
        """What has the name of a checkpoint, by step."""
        here = self.world.kernel.disk.find(CHECKPOINTS)
        names = here.names if here is not None else {}
        return {int(match[1]): inode for name, inode in sorted(names.items()) if (match := STEP.fullmatch(name))}

    def complete(self) -> dict[int, Inode]:
        return {s: f for s, f in self.folders().items() if "COMPLETE" in f.names and ".metadata" in f.names}

    def replaced(self) -> dict[int, Inode]:
        """What the next start has to give its name back: whole, and the save that replaced it broke off."""
        here, there = self.world.kernel.disk.find(CHECKPOINTS), self.folders()
        names = here.names if here is not None else {}
        found = {int(match[1]): inode for name, inode in names.items() if (match := REPLACED.fullmatch(name))}
        return {step: inode for step, inode in found.items() if step not in there and self.is_whole(inode, step)}

    def is_whole(self, folder: Inode, step: int) -> bool:
        return not self.why_not_whole(folder, step)

    def whole(self) -> list[int]:
        return [step for step, folder in self.complete().items() if self.is_whole(folder, step)]

    def why_not_whole(self, folder: Inode, step: int) -> str:
        """What keeps a folder from being the state of all ranks after that step; "" for nothing."""
        files = {name: bytes(inode.data) for name, inode in folder.names.items()}
        for name in ("COMPLETE", ".metadata", "state.json"):
            if name not in files:
                return f"it has no {name}"
        state = files["state.json"]
        try:
            if json.loads(files["COMPLETE"]) != {"state.json": [len(state), zlib.crc32(state)]}:
                return "its marker is of another state.json"
            info = json.loads(state)
            manifest, ranks = info["files"], info["world_size"]
        except (ValueError, KeyError, TypeError):
            return f"its state.json is {state[:40]!r}"
        if info["step"] != step:
            return f"it is of step {info['step']}"
        for name, (size, crc) in manifest.items():
            if name not in files or [len(files[name]), zlib.crc32(files[name])] != [size, crc]:
                return f"{name} is not what was written"
        if {name for name in files if name.endswith((".distcp", ".pt"))} - set(manifest):
            return "it has files of another save"
        return self._why_other_state(files, step, ranks)

    def _why_other_state(self, files: dict[str, bytes], step: int, ranks: int) -> str:
        seed = self.schedule.seed
        places = pickle.loads(files[".metadata"])
        for number in range(TENSORS):
            for key, name in ((f"model.w{number}", f"w{number}"), (f"optimizer.w{number}.exp_avg", f"w{number} avg")):
                if key not in places:
                    return f"{key} is missing"
                file, offset, size = places[key]
                if pickle.loads(files[file][offset : offset + size]) != content(seed, name, step):
                    return f"{key} is not that of step {step}"
        for rank in range(ranks):
            found = pickle.loads(files.get(f"random_{rank}.pt", pickle.dumps({})))
            if found != {"torch": random_of(seed, rank, step)}:
                return f"the random state of rank {rank} is {found}"
        return ""

    def check_all_whole(self, when: str) -> None:
        """What is complete is whole, and what was told as saved is there, or a later one is."""
        for step, folder in self.complete().items():
            why = "" if folder.ino in self.damaged else self.why_not_whole(folder, step)
            if why:
                self.broken(f"{when} step {step} is complete, and {why}")
        self._check_told(when)
        self._check_aside(when)

    def _check_told(self, when: str) -> None:
        latest = max((there for there, folder in self.folders().items() if folder.ino in self.damaged), default=-1)
        for step, ino in self.told.items():
            # what may not be set aside is looked at when it is
            is_excused = latest >= step or ino in self.damaged or ino in self.aside
            if not is_excused and not any(there >= step for there in (*self.whole(), *self.replaced())):
                self.broken(f"{when} step {step} was told as saved, and there are {self.whole()} to resume from")

    def _check_aside(self, when: str) -> None:
        here = self.world.kernel.disk.find(CHECKPOINTS)
        there = {inode.ino for inode in here.names.values()} if here is not None else set()
        for folder, files in self.aside.values():
            left = {name: bytes(inode.data) for name, inode in folder.names.items()}
            if folder.ino not in there or left != files:
                self.broken(f"{when} {folder.path()} was set aside, and is gone or changed")

    # --- saving -----------------------------------------------------------------------------------------------------

    def _saved(self, step: int) -> None:
        if not self._is_there(step):
            self.broken(f"step {step} is told as saved, and is not there")
            return
        self.told = {step: self.folders()[step].ino}  # a run that went back has given up the later ones
        kept = self.complete()
        # whether a damaged one was read before or after it was damaged, nobody sees
        wanted = self.wanted(kept, step) | self.wanted(kept, step, unread=self.damaged)
        if not set(kept) <= wanted and not self.excused and not self._is_next_under_way(step):
            self.broken(f"after the save of step {step} there are {sorted(kept)}: retention has forgotten some")

    def _is_next_under_way(self, step: int) -> bool:
        """Whether a later save may have ended by now."""
        return self.schedule.beside and max(self.complete()) > step

    def wanted(self, folders: dict[int, Inode], newest: int, unread: Collection[int] = ()) -> set[int]:
        """Which of these the schedule's retention keeps, `newest` having been saved last. `unread`: inodes of folders
        whose held-out loss is not known."""
        plan = self.schedule
        own = sorted(step for step in folders if step <= newest)
        if not plan.keep_last:
            return set(own)
        read = [step for step in own if folders[step].ino not in unread]
        judged = [step for step in read if b'"eval_loss":' in folders[step].names["state.json"].data]
        best = sorted(judged, key=lambda step: (loss_of(plan.seed, step), -step))[: plan.keep_best]
        every = [step for step in own if plan.keep_every and step % plan.keep_every == 0]
        return {newest, *own[-plan.keep_last :], *best, *every}

    def _removed(self, step: int, folder: Inode) -> None:
        """A checkpoint is given up: its retention must not want it, and what it is given up for must be there."""
        there, newest = self.complete(), self.committed
        words = f"step {step} is deleted after the save of step {newest}, beside {sorted(there)}"
        committed = self.folders().get(newest)
        if newest not in there and (committed is None or committed.ino not in self.damaged):
            self.broken(f"{words}, and step {newest} is not complete")
        if folder.ino in self.damaged:
            return
        if step > newest and self.is_whole(folder, step):
            self.broken(f"{words}: a later one that is whole")
        if step in self.wanted({**there, step: folder}, newest) and not self.damaged:
            self.broken(f"{words}, and retention keeps it")

    # --- resuming ---------------------------------------------------------------------------------------------------

    def _choosing(self, process: Process) -> None:
        start = process.env[START]
        if start not in self.found:
            self.found[start] = {**self.replaced(), **self.folders()}
            self.check_all_whole(f"when start {start} chooses")

    def is_one_resuming(self) -> bool:
        """Whether a rank has begun to choose a checkpoint and has not loaded it."""
        ranks = [process for process in self.world.processes() if role_of(process) == "rank"]
        return any(
            process.env[START] in self.found
            and int(process.env.get("RANK", 0)) not in self.resumed.get(process.env[START], {})
            for process in ranks
        )

    def _resumed(self, process: Process, dist: Any, resumed: Any, module: Any, optimizer: Any) -> None:
        start, seed, rank = process.env[START], self.schedule.seed, dist.rank
        step = resumed.step if resumed is not None else 0
        steps = self.resumed.setdefault(start, {})
        steps[rank] = step
        if len(set(steps.values())) > 1:
            self.broken(f"the ranks of start {start} go on from different steps: {steps}")
        for other, folder in self.found[start].items():
            if other > step and folder.ino not in self.aside:
                self.broken(f"start {start} goes on from step {step}, and passes over step {other} in silence")
        for name, tensor in module.tensors.items():
            if tensor.content != content(seed, name, step):
                self.broken(f"rank {rank} of start {start} goes on from step {step} with another {name}")
        for name, tensor in optimizer.tensors.items():
            if tensor.content != content(seed, f"{name} avg", step):
                self.broken(
                    f"rank {rank} of start {start} goes on from step {step} with another {name} of the optimizer"
                )
        same = resumed is not None and resumed.world_size == dist.world_size
        if process.own["random"] != random_of(seed, rank, step if same else 0):
            self.broken(f"rank {rank} of start {start} goes on with the random state {process.own['random']}")

    # --- the outcome ------------------------------------------------------------------------------------------------

    def _check_outcome(self, data: bytes) -> None:
        try:
            outcome = json.loads(data)
        except ValueError:
            self.broken(f"outcome.json was given its name with {data[:40]!r} in it")
            return
        process = self._actor()
        start = process.env[START] if process is not None else ""
        if outcome["state"] == "succeeded" and outcome.get("steps") != self.schedule.steps:
            self.broken(f"outcome.json says {outcome}, of {self.schedule.steps} steps")
        if outcome["state"] in ("succeeded", "stopped") and not self._is_there(outcome["steps"]):
            self.broken(f"outcome.json says {outcome}, and there are {self.whole()}")
        if outcome["state"] == "failed" and process is not None:
            self._check_worth(process, start, outcome["error"])
        if outcome["state"] == "stopped" and start not in self.stop_asked:
            self.broken(f"outcome.json says {outcome}, and nobody has stopped start {start}")

    def _check_worth(self, process: Process, start: str, error: str) -> None:
        """The training is worth more than a save of it: only the last one, or that of a stop, may end it."""
        progress, asked = process.own.get("progress"), start in self.stop_asked
        failed = "cannot write the checkpoint" in error or "no room for a checkpoint" in error
        if failed and progress is not None and progress.step < self.schedule.steps and not asked:
            self.broken(f"after step {progress.step} a save has ended start {start}: {error}")

    def _is_there(self, step: int) -> bool:
        folder = self.folders().get(step)
        return folder is not None and (folder.ino in self.damaged or self.is_whole(folder, step))

    def check_files_whole(self) -> None:
        """After a power cut: what has its name is whole."""
        data = self.world.read(f"{RUN_DIR}/outcome.json")
        try:
            json.loads(b"{}" if data is None else data)
        except ValueError:
            self.broken(f"after a power cut outcome.json is {(data or b'')[:40]!r}")

    def outcome(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.world.read(f"{RUN_DIR}/outcome.json") or b"{}")
        except ValueError:
            return {}
        return found
