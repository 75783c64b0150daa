"""What the clients of a schedule do: each command of it is a process that speaks the real client protocol."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.world.collected import CODE, DATA
from tests.world.invariants import FINAL
from tests.world.programs import SHIPPED
from tests.world.schedule import Command, Fault, Job
from tests.world.world import Cut, Transport, World, root_of

if TYPE_CHECKING:
    from tests.world.linux.kernel import Process

load = SHIPPED.load
NEVER_NS = 1 << 62
"""Of what has not happened yet."""
ASKS_AGAIN = 4
"""How often whoever resumes a job asks while it still runs, and waits a moment."""


class View(NamedTuple):
    """What a client has shown of a job's log."""

    job: str
    first: int
    """The attempt that it began with."""
    shown: bytes
    final: Any
    """The last word that it was told; None where it was not followed to its end."""
    folder: int
    """Which of the job's folders: a collection may take one away, and another launch make the next."""


class Clients:
    """Those of a schedule, and what they have been told."""

    def __init__(self, world: World, jobs: dict[str, Job], truth: Any, note: Callable[[float], None]) -> None:
        self.world = world
        self.kernel = world.kernel
        self.jobs = jobs
        self.truth = truth
        self.note = note
        self.cuts: list[Fault] = []
        self.connections = 0
        self.processes: list[Process] = []
        self.stopped: set[str] = set()
        self.acknowledged: dict[tuple[str, int], int] = {}
        """(job, which of its folders) -> the highest attempt."""
        self.asked: Counter[tuple[str, int]] = Counter()
        """(job, attempt) -> clients that asked for it."""
        self.views: list[View] = []
        tree = load("deployer.agent.store.tree")
        self.trees = {}
        sources = {}
        for name, data in (("main.py", CODE), ("rows", DATA)):
            digest = tree.content_hash(data)
            entries = (tree.Entry(name, "f", len(data), digest),)
            self.trees[tree.root_hash(entries)] = entries
            sources[digest] = f"/src/{name}"
            world.file(f"/src/{name}", data)
        world.kernel.disk.settle()  # clients have disks of their own, which no power cut of the host reaches
        self.tree, self.data_tree = self.trees
        self.shipment = load("deployer.project.manifest").Shipment(self.trees, sources)

    def folder(self, job: Job) -> str:
        return f"{root_of(job.uid)}/jobs/{job.name}"

    def begin(self, command: Command) -> None:
        self.processes.append(self.world.start("client", lambda: self._carry_out(command)))

    def _carry_out(self, command: Command) -> None:
        try:
            getattr(self, command.kind)(self.jobs[command.job], command)
        except load("deployer.errors").FerryError:
            pass

    # --- connections ------------------------------------------------------------------------------------------------

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
            includes=(module.Include("data", self.data_tree, False),) if job.includes else (),
            policy=module.Policy(queue=job.queue),
        )

    # --- launch, resume ---------------------------------------------------------------------------------------------

    def launch(self, job: Job, command: Command, *, follows: bool = True) -> None:
        def start(view: Any, watcher: Any) -> Any:
            return load("deployer.launch.start").launch_and_follow(
                self.connect(job.uid),
                self.plan(job),
                shipment=self.shipment,
                payload={},
                git=None,
                view=view,
                watcher=watcher,
            )

        self._follow(job, 1, start, follows=follows)

    def detach(self, job: Job, command: Command) -> None:
        self.launch(job, command, follows=False)

    again = launch

    def resume(self, job: Job, command: Command) -> None:
        """The next attempt. `blind`: the second one, without a look at the job; `apart`: and not followed."""
        if command.word == "blind":
            self._resume(job, self.plan(job), 2, follows=True)
            return
        for _ in range(ASKS_AGAIN):
            try:
                with self.connect(job.uid)(request={"op": "plan", "job": job.name}) as link:
                    found = link.first.result("plan", load("deployer.agent.job.views").PlanView)
            except load("deployer.errors").HostError:
                self.kernel.sleep(1)  # it still runs
                continue
            plan = load("deployer.agent.job.plan").parse_plan(found.plan)
            self._resume(job, plan, found.attempt + 1, follows=command.word != "apart")
            return

    def _resume(self, job: Job, plan: Any, attempt: int, *, follows: bool) -> None:
        self.asked[job.name, attempt] += 1
        self.truth.attempts.ask(self.folder(job), attempt)

        def start(view: Any, watcher: Any) -> Any:
            return load("deployer.launch.start").resume_and_follow(
                self.connect(job.uid), plan, attempt=attempt, payload={}, view=view, watcher=watcher
            )

        try:
            self._follow(job, attempt, start, follows=follows)
        except load("deployer.errors").UsageError as refused:
            if self.asked[job.name, attempt] == 1:
                self.truth.attempts.check_refused(self.folder(job), attempt, str(refused))
            raise

    def _follow(self, job: Job, attempt: int, start: Callable[[Any, Any], Any], *, follows: bool) -> None:
        folder, view = self.truth.folders[self.folder(job)], None
        if follows:
            view = load("deployer.launch.logview").LogView(io.BytesIO(), io.BytesIO(), terminal=False, bare=True)
        watcher = load("deployer.launch.follow").Watcher()

        def started(ack: Any) -> None:
            if (ack.attempt or 1) != attempt:
                self.truth.broken(f"attempt {attempt} of {job.name} was asked for, and {ack.attempt} acknowledged")
            key = job.name, folder
            self.acknowledged[key] = max(attempt, self.acknowledged.get(key, 0))
            self.truth.collected.promised.add((self.folder(job), folder))

        watcher.started = started
        final = None
        try:
            final = start(view, watcher)
        finally:
            if view is not None:
                self.views.append(View(job.name, attempt, view.out.getvalue(), final, folder))
        if final is not None:
            self.truth.check_ended(self.folder(job), load("deployer.agent.host.typed").to_json(final))

    # --- what else is asked -----------------------------------------------------------------------------------------

    def stop(self, job: Job, command: Command) -> None:
        self.stopped.add(job.name)
        self.truth.stop_asked_ns.setdefault(self.folder(job), self.kernel.now_ns)
        stops_ns = self.truth.attempts.stops_ns[self.folder(job)]
        stops_ns[command] = NEVER_NS
        request = {"op": "stop", "job": job.name, "grace_s": command.grace_s, "force": False}
        try:
            with self.connect(job.uid)(request=request) as link:
                report = load("deployer.jobs.requests")._end_of(link.first, "host", lambda status: None)
        finally:
            stops_ns[command] = self.kernel.now_ns
        if isinstance(report, Exception):
            return
        told = load("deployer.agent.host.typed").to_json(report)
        told = told.get("status", told)
        self.truth.check_ended(self.folder(job), told)

    def ps(self, job: Job | None = None, command: Command | None = None, *, uid: int = 0) -> list[Any]:
        uid = job.uid if job is not None else uid
        with self.connect(uid)(request={"op": "ps"}) as link:
            row = load("deployer.agent.job.views").Row
            rows: list[Any] = link.first.result("jobs", list[row])  # type: ignore[valid-type]
            for row_ in rows:
                if row_.state in FINAL:
                    self.truth.check_ended(f"{root_of(uid)}/jobs/{row_.id}", self.with_word(row_, uid))
            self.kernel.sleep(2)  # whoever looks stays long enough for what the agent does beside it
            return rows

    def with_word(self, row: Any, uid: int = 0) -> dict[str, Any]:
        """A row with what its status.json says beside it, if that is one."""
        told = {k: v for k, v in load("deployer.agent.host.typed").to_json(row).items() if v is not None}
        try:
            return {**json.loads(self.world.read(f"{root_of(uid)}/jobs/{row.id}/status.json") or b"{}"), **told}
        except ValueError:
            return told

    def logs(self, job: Job, command: Command) -> None:
        view = load("deployer.launch.logview").LogView(io.BytesIO(), io.BytesIO(), terminal=False, bare=True)
        folder = self.truth.folders[self.folder(job)]
        final = load("deployer.launch.follow").follow_to_end(
            self.connect(job.uid), job.name, view=view, watcher=load("deployer.launch.follow").Watcher()
        )
        self.views.append(View(job.name, 0, view.out.getvalue(), final, folder))

    def gc(self, job: Job, command: Command) -> None:
        """Of the job's account. `jobs`: all ended ones go; `old`: those of yesterday; `dry`: it only looks."""
        limits = {"jobs": {"keep_jobs": 0}, "old": {"older_than_s": 86400.0}}.get(command.word, {})
        collected, root = self.truth.collected, root_of(job.uid)
        collected.asked += 1
        if limits:
            collected.given_up.add(root)
        before = dict(self.truth.folders)
        is_dry = command.word == "dry"
        with self.connect(job.uid)(request={"op": "gc", "dry_run": is_dry, **limits}) as link:
            report = link.first.result("gc", load("deployer.agent.gc.view").GcReport)
        if not is_dry:
            collected.check_report(root, report, before)
