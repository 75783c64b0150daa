"""One schedule carried out in a world, and what must hold at its end."""

from __future__ import annotations

import errno
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.world.clients import Clients, View
from tests.world.invariants import FINAL, Broken, Truth, role_of, what_breaks
from tests.world.leases import names_of_claims
from tests.world.linux.inodes import OpenFile, refuse
from tests.world.linux.kernel import Process, S
from tests.world.programs import SHIPPED
from tests.world.schedule import Command, Fault, Job, Schedule
from tests.world.world import World

LIMIT_S = 900.0
"""Virtual seconds after which everything must have come to rest."""
FREE_S = 120.0
"""A session whose client has gone without a word may hold on for so long."""
load = SHIPPED.load


class Write(NamedTuple):
    """A write into a file: whose, its number among that role's, and how much."""

    role: str
    number: int
    size: int
    path: str


class Run:
    """A schedule under way."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world = World(schedule.seed, gpus=schedule.gpus)
        self.kernel = self.world.kernel
        self.began_ns = self.kernel.now_ns
        self.truth = Truth(self.world)
        self.jobs = {job.name: job for job in schedule.jobs}
        self.clients = Clients(self.world, self.jobs, self.truth, self.note)
        self.uids = sorted({0, *(job.uid for job in schedule.jobs)})
        for job in schedule.jobs:
            self.truth.attempts.restarts[self.clients.folder(job)] = job.max_restarts
            if job.includes:
                self.truth.collected.includes.add(self.clients.folder(job))
        self.steps: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.waiting: list[Fault] = []
        self.rebooted = False
        self.ends_ns = self.kernel.now_ns
        self.kernel.before_call = self.before_call
        self.writes: Counter[str] = Counter()
        self.written: list[Write] = []
        self.prefixes = [f for f in schedule.faults if f.kind == "prefix"]
        self.kernel.ends_in_write = self.before_write

    # --- faults -----------------------------------------------------------------------------------------------------

    def before_call(self, process: Process, name: str, what: str) -> None:
        if not self.waiting:
            return
        role = process.own.get("role")
        if role is None:  # another program forgets it
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
                    raise refuse(getattr(errno, number), what)
            elif self.steps[role] >= fault.count:
                self.waiting.remove(fault)
                self.note()
                if fault.kind == "kill":
                    self.kernel.signal(process, signal.SIGKILL)
                else:
                    self.kernel.signal(process, signal.SIGSTOP)
                    self.later(fault.value, lambda p=process: self.kernel.signal(p, signal.SIGCONT))

    def before_write(self, process: Process, file: OpenFile, data: bytes) -> int | None:
        role = role_of(process)
        self.writes[role] += 1
        self.written.append(Write(role, self.writes[role], len(data), file.where()))
        for fault in self.prefixes:
            if (fault.role, fault.count) == (role, self.writes[role]):
                self.note()
                if fault.word == "power":
                    self.kernel.crash = lambda process, fault=fault: self._reboot(fault)  # type: ignore[misc]
                return int(fault.value)
        return None

    def note(self, lasts_s: float = 0.0) -> None:
        self.ends_ns = max(self.ends_ns, self.kernel.now_ns + int(lasts_s * S))

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        self.note(after_s)
        self.kernel.at(self.kernel.now_ns + int(after_s * S), action)

    def begin_faults(self) -> None:
        for fault in self.schedule.faults:
            action = getattr(self, f"_{fault.kind}", self._counted)
            if action != self._counted or fault.at_s:
                self.later(fault.at_s, lambda a=action, f=fault: a(f))
            else:
                action(fault)

    def _counted(self, fault: Fault) -> None:
        """One that comes at a call of a role, or for a connection: counted from now on."""
        if fault.kind == "cut":
            self.clients.cuts.append(fault._replace(count=fault.count + self.clients.connections))
        elif fault.kind in ("kill", "halt", "error"):
            before = self.calls[fault.role, fault.word.split()[0]] if fault.kind == "error" else self.steps[fault.role]
            self.waiting.append(fault._replace(count=fault.count + before))

    def _clock(self, fault: Fault) -> None:
        self.kernel.wall_ns += int(fault.value * S)

    def _full(self, fault: Fault) -> None:
        disk = self.kernel.disk
        disk.size = disk.used + 700

        def room() -> None:
            disk.size = 1 << 40

        self.later(fault.value, room)

    def _slow(self, fault: Fault) -> None:
        disk = self.kernel.disk
        disk.sync_s = fault.count / 1000

        def quick() -> None:
            disk.sync_s = 0.0

        self.later(fault.value, quick)

    def _reboot(self, fault: Fault) -> None:
        self.rebooted = True
        self.kernel.reboot()
        self.truth.check_whole()
        for stream in self.world.connections:
            stream.break_()

    def _pids(self, fault: Fault) -> None:
        """Numbers that were given back are given away again, to processes that are nobody's business."""
        self.kernel.next_pid = 100
        for _ in range(6):
            neighbour = self.world.start("neighbour", lambda: self.kernel.sleep(30), host="host")
            self.truth.neighbours.append(neighbour)

    def _stranger(self, fault: Fault) -> None:
        gpus = self.world.gpus
        gpus.strangers[fault.count] = 99
        gpus.since_ns[fault.count] = self.kernel.now_ns

        def leave() -> None:
            gpus.strangers.pop(fault.count, None)

        self.later(fault.value, leave)

    def _damage(self, fault: Fault) -> None:
        self.truth.damaged = self.truth.ledger.damaged = True
        what, how = fault.word.split()
        # what makes no sense keeps the same account out, and root's all; that of another account means nothing
        of_others = what == "lease" and len({job.uid for job in self.schedule.jobs}) > 1
        self.truth.hides_lease |= fault.word == "lease gone" or of_others
        disk = self.kernel.disk
        for job in self.schedule.jobs:
            paths = [f"{self.clients.folder(job)}/{what}"]
            if what == "ranks":
                paths = [f"{self.clients.folder(job)}/ranks/attempt_1/rank_0.json"]
            if what == "lease":
                paths = [path for path, _ in names_of_claims(self.world)]
            for path in paths:
                inode = disk.find(path)
                if inode is None:
                    continue
                if how == "gone":
                    disk.damage_name(inode.places[0].folder, inode.places[0].name)
                else:
                    data = bytes(inode.data)
                    new = {"cut": data[: len(data) // 2], "zeros": bytes(len(data)), "other": b'{"job": 7}'}
                    new["ended"] = re.sub(rb'"state": "\w+"', b'"state": "succeeded"', data)
                    disk.damage(inode, new[how])

    # --- all of it --------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Broken when something does not hold."""
        self.begin_faults()
        for command in self.schedule.commands:
            self.later(command.at_s, lambda c=command: self.clients.begin(c))
        latest_s = max((command.at_s for command in self.schedule.commands), default=0.0)
        self.go_on(self._is_over, latest_s + LIMIT_S)
        if not all(client.is_over for client in self.clients.processes):
            raise Broken(f"{LIMIT_S:g} s after the last command there are {self.world.processes()}")
        self.waiting, self.clients.cuts = [], []
        rows = self._heal()
        self._check(rows)
        if any(command.kind == "gc" for command in self.schedule.commands):
            self._launch_once_more()
        self.go_on(lambda: True, 0)

    def go_on(self, until: Callable[[], bool], for_s: float) -> None:
        self.kernel.run(until=until, for_s=for_s)
        if self.kernel.failure:
            raise Broken(self.kernel.failure)

    def _launch_once_more(self) -> None:
        """Whatever was collected, and wherever a collection broke off: what is launched now runs."""
        last = Job("job-last", ("exit", "0"), includes=True, uid=self.uids[-1])
        self.jobs[last.name] = last
        self.truth.collected.includes.add(self.clients.folder(last))

        def launch() -> None:
            for _ in range(3 if self.rebooted else 1):  # what a power cut has damaged is told once, and sent again then
                try:
                    self.clients.launch(last, Command(0.0, "launch", last.name))
                    return
                except load("deployer.errors").HostError:
                    continue

        client = self.world.start("client", launch)
        self.go_on(lambda: client.is_over, LIMIT_S)
        final = self.clients.views[-1].final if self.clients.views else None
        if not client.is_over or final is None or final.state != "succeeded":
            raise Broken(f"after it all {last} came to {final}")

    def _is_over(self) -> bool:
        clients = self.clients.processes
        done = len(clients) == len(self.schedule.commands) and all(client.is_over for client in clients)
        return done and self.kernel.now_ns >= self.ends_ns

    def _heal(self) -> dict[str, Any]:
        """Somebody looks from time to time, as people do, until every job has ended. A collection whose client has gone
        goes on: what it took while somebody looked is no job any more."""
        looks: list[dict[str, Any]] = []
        taken = Counter(self.truth.folders)

        def look() -> None:
            nonlocal taken
            while not looks or taken != self.truth.folders or any(row.state not in FINAL for row in looks[-1].values()):
                self.kernel.sleep(10 if looks else 0)
                taken = Counter(self.truth.folders)
                looks.append({row.id: row for uid in self.uids for row in self.clients.ps(uid=uid)})

        somebody = self.world.start("somebody", look)
        self.go_on(lambda: somebody.is_over, LIMIT_S)
        rows = looks[-1] if looks else {}
        if somebody.status or not somebody.is_over:
            states = {name: (row.state, row.reason) for name, row in rows.items()}
            raise Broken(
                f"{LIMIT_S:g} s after the last fault not every job has ended: {states}; {self.world.processes()}"
            )
        return rows

    def _check(self, rows: dict[str, Any]) -> None:
        kinds = {fault.kind for fault in self.schedule.faults}
        clients = self.clients
        for name, row in rows.items():
            job = self.jobs.get(name)
            if job is None:
                raise Broken(f"{name} is no job of ours")
            folder, status = clients.folder(job), clients.with_word(row, job.uid)
            self.truth.check_ended(folder, status)
            begun = any(key[0] == folder for key in self.truth.started)
            is_back = self.rebooted and self.truth.folders[folder] and not begun  # gc took it; the power cut undid that
            if "damage" not in kinds and not is_back:
                is_blind = bool(kinds & {"halt", "kill", "full", "error"})  # or nobody could write how they ended
                was_stopped = name in clients.stopped
                self.truth.check_code(folder, status, was_stopped=was_stopped, ranks=job.ranks, is_blind=is_blind)
                is_whole = not kinds - {"clock", "cut", "slow", "stranger", "pids"}
                self.truth.attempts.check_reports(folder, status, is_whole=is_whole)
            if not kinds - {"clock", "cut", "slow", "stranger", "pids"}:
                if row.state == "lost":
                    raise Broken(f"{name} is lost ({row.reason}), and nothing has gone wrong")
                if name not in clients.stopped:
                    self.truth.check_whole_code(folder, status, job.ranks)
            known = clients.acknowledged.get((name, self.truth.folders[folder]), 0)
            has_run = any(key[:2] == (folder, str(known)) for key in self.truth.started)
            if "damage" not in kinds and row.attempt < known and (has_run or not self.rebooted):
                raise Broken(f"attempt {known} of {name} was acknowledged, and it is at {row.attempt}")
        known_jobs = [name for name, number in clients.acknowledged if number == self.folder_number(name)]
        lost = set(known_jobs) - set(rows)
        if lost:
            raise Broken(f"{lost} was acknowledged, and the host knows no such job")
        launched = {command.job for command in self.schedule.commands if command.kind in ("launch", "detach")}
        for name in launched - set(rows):
            if not kinds - {"clock", "pids", "slow"} and not self.jobs[name].gpus and not self.folder_number(name):
                raise Broken(f"{name} was launched, and nobody knows it")
        self.go_on(lambda: not self._held(), FREE_S)
        if self._held():
            raise Broken(f"all jobs have ended, and {self._held()} is held: {self.world.processes()}")
        if not kinds & {"damage", "reboot", "full", "error", "prefix"}:
            for view in clients.views:
                if view.job in rows and view.folder == self.folder_number(view.job):
                    self._check_log(view, rows[view.job])
            self.truth.attempts.check_earlier()
        killed = [neighbour for neighbour in self.truth.neighbours if neighbour.status and not self.rebooted]
        if killed:
            raise Broken(f"{killed} had nothing to do with it, and ended with {[n.status for n in killed]}")

    def folder_number(self, name: str) -> int:
        """Which of the job's folders is there, or was the last one."""
        return self.truth.folders[self.clients.folder(self.jobs[name])]

    def _held(self) -> list[str]:
        return [path for path, inode in names_of_claims(self.world) if inode.locks]

    def _check_log(self, view: View, row: Any) -> None:
        """What was shown is the beginning of the log, and all of it once the job was followed to its end."""
        job = self.jobs[view.job]
        if job.ranks > 1:
            return
        latest = view.final.attempt if view.final is not None else row.attempt
        logs = [self._log(job, attempt) for attempt in range(1, latest + 1)]
        firsts = [view.first] if view.first else range(1, latest + 1)
        wholes = [b"".join(logs[first - 1 : latest]) for first in firsts] or [b""]
        if view.final is not None and view.shown not in wholes:
            raise Broken(
                f"{job.name} was followed to the end of attempt {latest} with {view.shown!r}; its logs: {logs}"
            )
        if not any(whole.startswith(view.shown) for whole in wholes):
            raise Broken(f"of {job.name} was shown {view.shown!r}, and its logs are {logs}")

    def _log(self, job: Job, attempt: int) -> bytes:
        log = self.world.read(f"{self.clients.folder(job)}/logs/attempt_{attempt}/rank_0.log") or b""
        return log + (b"\n" if log and not log.endswith(b"\n") else b"")


def carry_out(schedule: Schedule, run: Run | None = None) -> str | None:
    """What does not hold, None for nothing."""
    try:
        return what_breaks(lambda: run or Run(schedule))
    finally:
        load("deployer.agent.supervisor.mains")._started.clear()
