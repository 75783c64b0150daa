"""One schedule carried out in a world, and what must hold at its end."""

from __future__ import annotations

import errno
import gc
import io
import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.world.invariants import FINAL, Broken, Truth, role_of
from tests.world.linux.inodes import OpenFile, refuse
from tests.world.linux.kernel import Endless, Process, S
from tests.world.programs import SHIPPED
from tests.world.schedule import Command, Fault, Job, Schedule
from tests.world.world import ROOT, Cut, Transport, World

LIMIT_S = 900.0
"""Virtual seconds after which everything must have come to rest."""
FREE_S = 120.0
"""A session whose client has gone without a word may hold on for so long."""
load = SHIPPED.load
CODE = b"print('hello')\n"


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
        self.steps: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.waiting = [f for f in schedule.faults if f.kind in ("kill", "halt", "error")]
        self.cuts = [f for f in schedule.faults if f.kind == "cut"]
        self.connections = 0
        self.stopped: set[str] = set()
        self.acknowledged: set[str] = set()
        self.views: list[tuple[str, bytes, Any]] = []
        self.rebooted = False
        self.ends_ns = self.kernel.now_ns
        self.kernel.before_call = self.before_call
        self.writes: Counter[str] = Counter()
        self.written: list[Write] = []
        self.prefixes = [f for f in schedule.faults if f.kind == "prefix"]
        self.kernel.ends_in_write = self.before_write
        tree = load("deployer.agent.store.tree")
        digest = tree.content_hash(CODE)
        self.entries = (tree.Entry("main.py", "f", len(CODE), digest),)
        self.tree = tree.root_hash(self.entries)
        self.shipment = load("deployer.project.manifest").Shipment({self.tree: self.entries}, {digest: "/src/main.py"})
        self.world.file("/src/main.py", CODE)

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
            action = getattr(self, f"_{fault.kind}", None)
            if action is not None:
                self.later(fault.at_s, lambda a=action, f=fault: a(f))

    def _clock(self, fault: Fault) -> None:
        self.kernel.wall_ns += int(fault.value * S)

    def _full(self, fault: Fault) -> None:
        disk = self.kernel.disk
        disk.size = disk.used + 700

        def room() -> None:
            disk.size = 1 << 40

        self.later(fault.value, room)

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
        self.truth.hides_lease |= fault.word == "lease gone"
        what, how = fault.word.split()
        disk = self.kernel.disk
        for job in self.schedule.jobs:
            paths = [f"{ROOT}/jobs/{job.name}/{what}"]
            if what == "ranks":
                paths = [f"{ROOT}/jobs/{job.name}/ranks/attempt_1/rank_0.json"]
            if what == "lease":
                folder = disk.find("/tmp/.torchferry-leases")
                paths = [f"/tmp/.torchferry-leases/{name}" for name in (folder.names if folder else {})]
            for path in paths:
                inode = disk.find(path)
                if inode is None:
                    continue
                if how == "gone":
                    disk.drop(inode.places[0].folder, inode.places[0].name)
                else:
                    data = bytes(inode.data)
                    new = {"cut": data[: len(data) // 2], "zeros": bytes(len(data)), "other": b'{"job": 7}'}
                    new["ended"] = re.sub(rb'"state": "\w+"', b'"state": "succeeded"', data)
                    inode.data = bytearray(new[how])

    # --- clients ----------------------------------------------------------------------------------------------------

    def cut(self) -> Cut:
        number, self.connections = self.connections, self.connections + 1
        for fault in self.cuts:
            if fault.count == number:
                self.note(700 if fault.word == "silent" else 0)
                sent = int(fault.value) if fault.word == "sent" else None
                return Cut(sent, None if sent else int(fault.value), silent=fault.word == "silent")
        return Cut()

    def connect(self, uid: int = 0) -> Callable[..., Any]:
        transport = Transport(self.world, uid=uid, plan=self.cut)
        link = load("deployer.connection.link").Link
        return lambda **words: link.open(transport, root="~/.torchferry", **words)

    def plan(self, job: Job) -> Any:
        module = load("deployer.agent.job.plan")
        devices = module.Devices("cuda", job.gpus) if job.gpus else module.Devices("cpu")
        env = {"CUDA_VISIBLE_DEVICES": (module.Slot("gpus"),)} if job.gpus else {}
        role = module.Role(
            "program",
            job.program,
            (module.Slot("job"), "/code"),
            env,
            (devices,),
            nproc=job.ranks,
            torchrun=job.ranks > 1,
            max_restarts=job.max_restarts,
        )
        python = load("deployer.agent.python.spec").PythonSpec(explicit="/usr/bin/python3")
        return module.Plan(
            job.name,
            job.name,
            "2027-01-01T00:00:00Z",
            (role,),
            python,
            self.tree,
            module.Request(command=job.program),
            policy=module.Policy(queue=job.queue),
        )

    def client(self, command: Command) -> None:
        """The body of a client's process."""
        errors = load("deployer.errors")
        try:
            getattr(self, command.kind)(self.jobs[command.job], command)
        except errors.FerryError:
            pass

    def launch(self, job: Job, command: Command, *, follows: bool = True) -> None:
        view = None
        if follows:
            view = load("deployer.launch.logview").LogView(io.BytesIO(), io.BytesIO(), terminal=False, bare=True)
        watcher = load("deployer.launch.follow").Watcher()
        watcher.started = lambda ack: self.acknowledged.add(job.name)
        final = None
        try:
            final = load("deployer.launch.start").launch_and_follow(
                self.connect(), self.plan(job), shipment=self.shipment, payload={}, git=None, view=view, watcher=watcher
            )
        finally:
            if view is not None:
                self.views.append((job.name, view.out.getvalue(), final))
        if final is not None:
            self.truth.check_ended(f"{ROOT}/jobs/{job.name}", load("deployer.agent.host.typed").to_json(final))

    def detach(self, job: Job, command: Command) -> None:
        self.launch(job, command, follows=False)

    again = launch

    def stop(self, job: Job, command: Command) -> None:
        self.stopped.add(job.name)
        self.truth.stop_asked_ns.setdefault(f"{ROOT}/jobs/{job.name}", self.kernel.now_ns)
        link = self.connect()(request={"op": "stop", "job": job.name, "grace_s": command.grace_s, "force": False})
        report = load("deployer.jobs.requests")._end_of(link.first, "host", lambda status: None)
        link.close()
        if isinstance(report, Exception):
            return
        told = load("deployer.agent.host.typed").to_json(report)
        told = told.get("status", told)
        self.truth.check_ended(f"{ROOT}/jobs/{job.name}", told)

    def ps(self, job: Job | None = None, command: Command | None = None) -> list[Any]:
        with self.connect()(request={"op": "ps"}) as link:
            row = load("deployer.agent.job.views").Row
            rows: list[Any] = link.first.result("jobs", list[row])  # type: ignore[valid-type]
            for row_ in rows:
                if row_.state in FINAL:
                    self.truth.check_ended(f"{ROOT}/jobs/{row_.id}", self.with_word(row_))
            self.kernel.sleep(2)  # whoever looks stays long enough for what the agent does beside it
            return rows

    def with_word(self, row: Any) -> dict[str, Any]:
        """A row with what its status.json says beside it, if that is one."""
        told = {k: v for k, v in load("deployer.agent.host.typed").to_json(row).items() if v is not None}
        try:
            return {**json.loads(self.world.read(f"{ROOT}/jobs/{row.id}/status.json") or b"{}"), **told}
        except ValueError:
            return told

    def logs(self, job: Job, command: Command) -> None:
        view = load("deployer.launch.logview").LogView(io.BytesIO(), io.BytesIO(), terminal=False, bare=True)
        final = load("deployer.launch.follow").follow_to_end(
            self.connect(), job.name, view=view, watcher=load("deployer.launch.follow").Watcher()
        )
        self.views.append((job.name, view.out.getvalue(), final))

    # --- all of it --------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Broken when something does not hold."""
        self.begin_faults()
        clients: list[Process] = []

        def begin(command: Command) -> None:
            clients.append(self.world.start("client", lambda: self.client(command)))

        for command in self.schedule.commands:
            self.later(command.at_s, lambda c=command: begin(c))
        self.go_on(lambda: self._is_over(clients), LIMIT_S)
        self.waiting, self.cuts = [], []
        rows = self._heal()
        self._check(rows)
        self.go_on(lambda: True, 0)

    def go_on(self, until: Callable[[], bool], for_s: float) -> None:
        self.kernel.run(until=until, for_s=for_s)
        if self.kernel.failure:
            raise Broken(self.kernel.failure)

    def _is_over(self, clients: list[Process]) -> bool:
        done = len(clients) == len(self.schedule.commands) and all(client.is_over for client in clients)
        return done and self.kernel.now_ns >= self.ends_ns

    def _heal(self) -> dict[str, Any]:
        """Somebody looks from time to time, as people do, until every job has ended."""
        looks: list[dict[str, Any]] = []

        def look() -> None:
            while not looks or any(row.state not in FINAL for row in looks[-1].values()):
                self.kernel.sleep(10 if looks else 0)
                looks.append({row.id: row for row in self.ps()})

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
        for name, row in rows.items():
            job, folder = self.jobs.get(name), f"{ROOT}/jobs/{name}"
            if job is None:
                raise Broken(f"{name} is no job of ours")
            status = self.with_word(row)
            self.truth.check_ended(folder, status)
            if "damage" not in kinds:
                self.truth.check_code(
                    folder,
                    status,
                    was_stopped=name in self.stopped,
                    ranks=job.ranks,
                    is_blind=bool(kinds & {"halt", "kill"}),
                )
            if not kinds - {"clock", "cut", "stranger", "pids"} and name not in self.stopped:
                self.truth.check_whole_code(folder, status, job.ranks)
        lost = self.acknowledged - set(rows)
        if lost:
            raise Broken(f"{lost} was acknowledged, and the host knows no such job")
        launched = {command.job for command in self.schedule.commands if command.kind in ("launch", "detach")}
        for name in launched - set(rows):
            if not kinds - {"clock", "pids"} and not self.jobs[name].gpus:
                raise Broken(f"{name} was launched, and nobody knows it")
        self.go_on(lambda: not self._held(), FREE_S)
        if self._held():
            raise Broken(f"all jobs have ended, and {self._held()} is held: {self.world.processes()}")
        self._check_logs(kinds)
        killed = [neighbour for neighbour in self.truth.neighbours if neighbour.status and not self.rebooted]
        if killed:
            raise Broken(f"{killed} had nothing to do with it, and ended with {[n.status for n in killed]}")

    def _held(self) -> list[str]:
        folder = self.kernel.disk.find("/tmp/.torchferry-leases")
        return [name for name, inode in (folder.names.items() if folder else ()) if inode.locks]

    def _check_logs(self, kinds: set[str]) -> None:
        if kinds & {"damage", "reboot", "full", "error", "prefix"}:
            return
        for name, shown, final in self.views:
            job = self.jobs[name]
            if job.ranks > 1 or job.max_restarts:
                continue
            log = self.world.read(f"{ROOT}/jobs/{name}/logs/attempt_1/rank_0.log") or b""
            whole = log + (b"\n" if log and not log.endswith(b"\n") else b"")
            if final is not None and shown != whole:
                raise Broken(f"{name} was followed to its end with {shown!r}, and its log is {log!r}")
            if not whole.startswith(shown):
                raise Broken(f"of {name} was shown {shown!r}, and its log is {log!r}")


def carry_out(schedule: Schedule, run: Run | None = None) -> str | None:
    """What does not hold, None for nothing."""
    was = gc.isenabled()
    gc.disable()  # what is collected closes files, at a moment that no seed decides
    run = run or Run(schedule)
    try:
        run.carry_out()
    except (Broken, Endless) as broken:
        return str(broken)
    finally:
        run.world.end()
        load("deployer.agent.supervisor.mains")._started.clear()
        if was:
            gc.enable()
    return None
