"""One schedule of the trainer carried out in a world, and what must hold at its end."""

from __future__ import annotations

import errno
import signal
from collections import Counter
from collections.abc import Callable

from tests.world.invariants import Broken, what_breaks
from tests.world.linux.disk import Disk
from tests.world.linux.inodes import Inode, OpenFile, refuse
from tests.world.linux.kernel import Killed, Process, S
from tests.world.schedule import Fault
from tests.world.trainer.groups import Net
from tests.world.trainer.invariants import CHECKPOINTS, Truth, role_of
from tests.world.trainer.programs import RUN_DIR, SHIPPED, START, train
from tests.world.trainer.schedule import Schedule, Start
from tests.world.trainer.stdlib import Log
from tests.world.world import World

LIMIT_S = 500.0
"""Virtual seconds after the last fault in which every start must have ended: longer than any time-out in force."""
CONTROL_TIMEOUT_S = 40
MOST_STARTS = 4
"""After the last fault, until the run has ended."""
FATES = ("kill", "killall", "halt", "slow", "power", "error")


class Run:
    """A schedule under way."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world = World(schedule.seed)
        self.kernel = self.world.kernel
        self.kernel.plan = schedule  # type: ignore[attr-defined]
        Net.of(self.kernel)
        self.began_ns = self.ends_ns = self.kernel.now_ns
        self.world.folder(RUN_DIR)
        self.kernel.disk.settle()
        self.truth = Truth(self.world, schedule)
        self.steps: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.writes: Counter[str] = Counter()
        self.waiting = [f for f in schedule.faults if f.kind in FATES and f.count]
        self.prefixes = [f for f in schedule.faults if f.kind == "prefix"]
        self.begun: list[Process] = []
        self.lost: list[str] = []
        """Ranks that were killed in their steps."""
        self.rebooted = False
        self.kernel.before_call = self.before_call
        self.kernel.ends_in_write = self.before_write
        if any(fault.kind == "late" for fault in schedule.faults):
            self.kernel.hidden = self.hidden  # type: ignore[attr-defined]
        self._end = self.kernel.end
        self.kernel.end = self.end  # type: ignore[method-assign]

    # --- faults at a call -------------------------------------------------------------------------------------------

    def before_call(self, process: Process, name: str, what: str) -> None:
        if "dies" in process.own and self.kernel.current is not process.own["in disk"]:
            raise Killed  # the other threads of who was killed
        if not self.waiting:
            return
        role = process.own.get("role")
        if role is None:
            role = process.own["role"] = role_of(process)
        if not role:
            return
        self.steps[role] += 1
        self.calls[role, name] += 1
        for fault in [f for f in self.waiting if f.role == role]:
            if fault.kind == "error":
                word, number = fault.word.split()
                if word == name and self.calls[role, name] == fault.count:
                    self.waiting.remove(fault)
                    self._excuse(process)
                    raise refuse(getattr(errno, number), what)
            elif self.steps[role] >= fault.count and fault in self.waiting:
                self.waiting.remove(fault)
                self.note()
                getattr(self, f"_at_{fault.kind}")(process, fault)

    def _excuse(self, process: Process) -> None:
        """A call of it has failed: what it could not read, it could not go on from."""
        self.truth.excused.add(process.env[START])

    def _at_kill(self, process: Process, fault: Fault) -> None:
        self._lose(process)
        self.kernel.signal(process, signal.SIGKILL)

    def _lose(self, process: Process) -> None:
        env, progress = process.env, process.own.get("progress")
        others = self.truth.resumed.get(env[START], {})
        is_in_steps = progress and progress.phase in ("data", "forward", "backward", "optimizer")
        if "RANK" in env and is_in_steps and len(others) == int(env["WORLD_SIZE"]):
            self.lost.append(env["RANK"])

    def _at_killall(self, process: Process, fault: Fault) -> None:
        self.kill_start(process.env[START])

    def kill_start(self, start: str) -> None:
        for other in self.world.processes():
            if other.env.get(START) == start:
                self.kernel.signal(other, signal.SIGKILL)

    def _at_halt(self, process: Process, fault: Fault) -> None:
        self._lose(process)
        self.kernel.signal(process, signal.SIGSTOP)
        self.later(fault.value, lambda: self.kernel.signal(process, signal.SIGCONT))

    def _at_power(self, process: Process, fault: Fault) -> None:
        self._power(fault)

    def _at_slow(self, process: Process, fault: Fault) -> None:
        """The call takes long, in the disk: nothing ends its process before it is through, not even SIGKILL."""
        self.note(fault.value)
        process.own["in disk"] = self.kernel.current
        if fault.word == "kill":
            self.kill_start(process.env[START])
            self.later(0.05, lambda: self.start(self.schedule.starts[0]))  # as a supervisor does
        blocked, process.blocked = process.blocked, set(range(1, 65))
        self.kernel.sleep(fault.value)
        process.blocked = blocked
        process.own["in disk"] = None
        if "dies" in process.own:
            self.kernel.at(
                self.kernel.now_ns + self.kernel.step_ns + 1, lambda: self.kernel.end(process, process.own["dies"])
            )

    def end(self, process: Process, status: int) -> None:
        """In the place of Kernel.end: who is in the disk ends later."""
        if process.own.get("in disk") and not process.is_over:
            process.own["dies"] = int(status)
        else:
            self._end(process, status)

    def before_write(self, process: Process, file: OpenFile, data: bytes) -> int | None:
        if not self.prefixes or isinstance(file, Log):
            return None
        role = role_of(process)
        self.writes[role] += 1
        for fault in self.prefixes:
            if (fault.role, fault.count) == (role, self.writes[role]):
                self.prefixes.remove(fault)
                self.note()
                self.kernel.crash = lambda process, fault=fault: self._crash(process, fault)  # type: ignore[misc]
                return int(fault.value)
        return None

    def _crash(self, process: Process, fault: Fault) -> None:
        if fault.word == "power":
            self._power(fault)
        else:
            self.kill_start(process.env[START])

    def hidden(self, process: Process) -> set[str]:
        """Ranks of other nodes see the newest checkpoint late, as on a network file system."""
        there = self.truth.complete()
        return {f"step_{max(there):06d}"} if there and process.env.get("RANK", "0") != "0" else set()

    # --- faults at a time -------------------------------------------------------------------------------------------

    def note(self, lasts_s: float = 0.0) -> None:
        self.ends_ns = max(self.ends_ns, self.kernel.now_ns + int(lasts_s * S))

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        self.note(after_s)
        self.kernel.at(self.kernel.now_ns + int(after_s * S), action)

    def begin_faults(self) -> None:
        for fault in self.schedule.faults:
            action = getattr(self, f"_{fault.kind}", None)
            if fault.kind == "damage" or (action is not None and not fault.count):
                self.later(fault.at_s, lambda a=action, f=fault: a(f))  # type: ignore[misc]

    def _full(self, fault: Fault) -> None:
        disk = self.kernel.disk
        disk.size = disk.used + 700

        def room() -> None:
            disk.size = 1 << 40

        for process in self.world.processes():
            self._excuse(process)
        self.later(fault.value, room)

    def _power(self, fault: Fault) -> None:
        self.rebooted = True
        for process in self.world.processes():
            process.own["in disk"] = None
        self.kernel.reboot()
        self.truth.owner = ""
        self.truth.check_files_whole()
        self.truth.check_all_whole("after a power cut")

    def _stop(self, fault: Fault) -> None:
        for process in self.begun[-1:]:
            if not process.is_over:
                self.truth.stop_asked.add(process.env[START])
                self.kernel.signal(process, signal.SIGTERM)

    def _damage(self, fault: Fault) -> None:
        """Of the newest complete checkpoint (count 1: of the one before) a file."""
        if self.truth.is_one_resuming():  # it may have verified the file and not loaded it: nobody sees that
            self.later(0.05, lambda: self._damage(fault))
            return
        there = list(self.truth.complete().values())
        if len(there) <= fault.count:
            return
        folder = there[-1 - fault.count]
        kind, how = fault.word.split()
        ends = {
            "shard": ".distcp",
            "metadata": ".metadata",
            "state": "state.json",
            "marker": "COMPLETE",
            "random": ".pt",
        }
        name = next((name for name in sorted(folder.names) if name.endswith(ends[kind])), None)
        if name is None:  # an earlier damage took it
            return
        inode = folder.names[name]
        self.truth.damaged.add(folder.ino)
        for process in self.world.processes():
            if process.env.get(START) not in self.truth.resumed:
                self._excuse(process)  # it may be choosing now
        if how == "gone":
            self.kernel.disk.damage_name(folder, name)
        else:
            _spoil(self.kernel.disk, inode, how)

    # --- starts -----------------------------------------------------------------------------------------------------

    def start(self, start: Start) -> None:
        number = str(len(self.begun) + 1)
        env = {START: number, "TORCHFERRY_CONTROL_TIMEOUT_S": str(CONTROL_TIMEOUT_S), "HOME": "/root"}
        process = self.world.start("launcher", lambda: train(start.ranks), host="host", env=env)
        log = Log(lambda line: self.truth.heard(number, line))
        for fd in (1, 2):
            process.fds[fd].release()
            process.fds[fd] = log
        log.users = 2
        self.begun.append(process)

    # --- all of it --------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Broken when something does not hold."""
        self.begin_faults()
        for start in self.schedule.starts:
            self.later(start.at_s, lambda s=start: self.start(s))  # type: ignore[misc]
        self.rest("the last fault")
        self.waiting, self.prefixes = [], []
        self._check_lost_rank()
        self._check_lost_saver()
        self.truth.check_all_whole("after the last fault")
        for number in range(MOST_STARTS):
            if self._is_done() and (number or not self.truth.damaged):
                break
            self.truth.excused.discard(str(len(self.begun) + 1))
            self._clear()
            self.start(Start(0.0, self.schedule.starts[0].ranks))
            self.rest(f"start {number + 1} after the last fault")
        self.truth.check_all_whole("at the end")
        if not self._is_done():
            raise Broken(f"{MOST_STARTS} starts after the last fault the run has not ended: {self.truth.outcome()}")

    def _check_lost_rank(self) -> None:
        """Where one rank was killed or stopped in its steps, and nothing else went wrong, that is what is told."""
        kinds = [(fault.kind, fault.role, fault.value) for fault in self.schedule.faults]
        if kinds not in ([("kill", "rank", 0.0)], [("halt", "rank", 90.0)]) or len(self.begun) > 1 or not self.lost:
            return
        told = self.truth.outcome().get("error") or "; ".join(self.truth.lines[-2:])
        is_told = f"rank {self.lost[0]} (pid " in told and "ended without a word" in told
        is_told = is_told or f"rank {self.lost[0]} was ended by SIGKILL" in told
        if kinds[0][0] == "halt":
            is_told = f"rank {self.lost[0]} is late" in told
        if not is_told:
            raise Broken(f"rank {self.lost[0]} met a {kinds[0][0]}, and what is told is: {told}")

    def _check_lost_saver(self) -> None:
        """The training goes on without its savers."""
        faults = self.schedule.faults
        is_only_that = len(self.begun) == 1 and all(f.role == "saver" and f.kind in ("kill", "error") for f in faults)
        last = f"cannot write the checkpoint {CHECKPOINTS}/step_{self.schedule.steps:06d}"
        told = str(self.truth.outcome().get("error"))
        if any(fault.kind == "error" for fault in faults) and last in told:
            return  # what a call that failed has cost is the last save, which does end a run
        if is_only_that and (self.begun[0].status or not self._is_done()):
            raise Broken(f"only savers met faults, and the run ended with {self.truth.outcome()}")

    def rest(self, since: str) -> None:
        """Until nobody runs any more."""
        wanted = len(self.begun) if self.begun else len(self.schedule.starts)

        def is_over() -> bool:
            return len(self.begun) >= wanted and self.kernel.now_ns >= self.ends_ns and not self._running()

        ends_ns = self.kernel.now_ns + int(LIMIT_S * S)
        while not is_over() and self.kernel.now_ns < max(ends_ns, self.ends_ns + int(LIMIT_S * S)):
            self.kernel.run(until=is_over, for_s=10)
            if self.kernel.failure:
                raise Broken(self.kernel.failure)
        if not is_over():
            raise Broken(f"{LIMIT_S:g} s after {since} there are {self.world.processes()}")

    def _running(self) -> list[Process]:
        return [process for process in self.world.processes() if START in process.env]

    def _is_done(self) -> bool:
        return self.truth.outcome().get("state") == "succeeded"

    def _clear(self) -> None:
        """What a person does who is told that no checkpoint can be read: moves away what is damaged."""
        complete = self.truth.complete()
        if not complete or self.truth.whole() or not self.truth.damaged:
            return
        here = self.kernel.disk.find(CHECKPOINTS)
        assert here is not None
        for name in [name for name, inode in here.names.items() if inode in complete.values()]:
            self.kernel.disk.drop(here, name)
        self.truth.told.clear()


def _spoil(disk: Disk, inode: Inode, how: str) -> None:
    data = bytes(inode.data)
    new = {"cut": data[: len(data) // 2], "zeros": bytes(len(data)), "longer": data + b"\n"}
    middle = min(len(data) // 2 + 20, len(data) - 3)  # of a shard in a tensor's content, not in how it is framed
    new["other"] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    disk.damage(inode, new[how])


def carry_out(schedule: Schedule, run: Run | None = None) -> str | None:
    """What does not hold, None for nothing."""
    return what_breaks(lambda: run or Run(schedule))


__all__ = ["SHIPPED", "Run", "carry_out"]
