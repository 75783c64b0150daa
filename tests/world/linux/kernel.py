"""The simulated Linux: virtual time, processes, threads and signals, all in one thread of this program.

A thread of the world is a greenlet. Whatever it asks of the world (a call, see posix.py) is one step, and between two
steps any other thread may run: `chance` decides, so a seed is a schedule. A process that is killed never comes back
from its call.
"""

from __future__ import annotations

import heapq
import random
import signal
from collections.abc import Callable
from typing import Any

import greenlet

from tests.world.linux.channel import Channel
from tests.world.linux.disk import Disk
from tests.world.linux.inodes import OpenFile

S = 1_000_000_000
STEPS_NS = (20_000, 200_000, 1_000_000)
"""What a call takes, on a quick host or a slow one."""
MOST_STEPS = 400_000
TICKS = 100
"""A second, in /proc/PID/stat."""
IGNORED = {signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, *range(signal.SIGTSTP, signal.SIGTTOU + 1)}
"""By default; those of a terminal by who has none, and nobody here has one."""


class Killed(BaseException):
    """The process of whoever sees this is no more."""


class Endless(Exception):
    """The world does not come to rest."""


class Thread:
    """One thread of a process."""

    def __init__(self, process: Process, body: Callable[[], None], shown: Any = None, *, daemon: bool = False) -> None:
        self.process = process
        self.shown = shown
        """As `threading` has it; None for the main one."""
        self.is_daemon = daemon
        self.token = 0
        self.is_runnable = False
        self.is_over = False
        self.ended = Channel()
        self.body = body
        self.greenlet = greenlet.greenlet(self._run, process.kernel.hub)

    def _run(self) -> None:
        kernel = self.process.kernel
        try:
            status = self._do_body()
            if self.shown is None:
                self._wait_for_others()
        except Killed:
            return
        if self.process.is_over:
            return
        self.is_over = True
        self.is_runnable = False
        if self.shown is None:
            kernel.end(self.process, status)
        else:
            self.ended.notify()

    def _do_body(self) -> int:
        """As a program of Python: the status of who leaves so."""
        try:
            self.body()
        except Killed:
            raise
        except SystemExit as left:
            return exit_code(left, self.process) << 8
        except BaseException as failed:
            if self.process.is_over:
                raise Killed from None
            import traceback

            if isinstance(failed, NotImplementedError):
                kernel = self.process.kernel
                kernel.failure = kernel.failure or f"{self.process}: {traceback.format_exc()}"
            self.process.complain(traceback.format_exc())
            return int(signal.SIGINT) if isinstance(failed, KeyboardInterrupt) else 1 << 8
        return 0

    def _wait_for_others(self) -> None:
        """Python ends with the last thread that is no daemon."""
        for thread in self.process.threads[1:]:
            if not thread.is_daemon:
                self.process.kernel.block(lambda thread=thread: thread.is_over, thread.ended)  # type: ignore[misc]

    def wake(self) -> None:
        self.token += 1
        if not self.is_over and not self.is_runnable:
            self.is_runnable = True
            self.process.kernel.ready.append(self)


def exit_code(left: SystemExit, process: Process) -> int:
    if left.code is None:
        return 0
    if isinstance(left.code, int):
        return left.code & 0xFF
    process.complain(f"{left.code}\n")
    return 1


class Process:
    """One process of the world."""

    def __init__(self, kernel: Kernel, pid: int, parent: Process | None, argv: list[str], env: dict[str, str]) -> None:
        self.kernel = kernel
        self.pid = pid
        self.parent = parent
        self.argv = argv
        self.env = env
        self.first_env = dict(env)
        """As its program was started with it: what /proc tells."""
        self.uid = parent.uid if parent else 0
        self.group = parent.group if parent else pid
        self.session = parent.session if parent else pid
        self.cwd = parent.cwd if parent else "/"
        self.umask = parent.umask if parent else 0o022
        self.start = kernel.boot_ns() * TICKS // S
        self.host = parent.host if parent else "host"
        self.fds: dict[int, OpenFile] = {}
        self.inheritable: set[int] = set()
        self.threads: list[Thread] = []
        self.children: list[Process] = []
        self.state = "R"
        self.status = 0
        self.is_over = False
        self.is_subreaper = False
        self.dies_with_parent = 0
        self.has_execed = False
        """Since its parent made it."""
        self.handlers: dict[int, Any] = {}
        self.blocked: set[int] = set()
        self.pending: list[int] = []
        self.signals = Channel()
        self.child_ended = Channel()
        self.own: dict[str, Any] = {}
        """What a module keeps for its process alone."""

    @property
    def main(self) -> Thread:
        return self.threads[0]

    def start_thread(self, body: Callable[[], None], shown: Any = None, daemon: bool = False) -> Thread:
        thread = Thread(self, body, shown, daemon=daemon)
        self.threads.append(thread)
        if self.state == "T":
            thread.is_runnable = False
            self.own.setdefault("halted", []).append(thread)
        else:
            thread.wake()
        return thread

    def state_now(self) -> str:
        """As /proc has it."""
        waits = self.state == "R" and not any(
            thread.is_runnable or thread is self.kernel.current for thread in self.threads
        )
        return "S" if waits else self.state

    def begin_python(self) -> None:
        """What Python's interpreter does with signals when it starts."""
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            self.handlers[number] = signal.SIG_IGN
        self.handlers.setdefault(signal.SIGINT, signal.default_int_handler)

    def complain(self, text: str) -> None:
        file = self.fds.get(2)
        if file is not None:
            try:
                file.write(text.encode("utf-8", "surrogateescape"))
            except OSError:
                pass

    def __repr__(self) -> str:
        return f"{self.pid} {' '.join(self.argv[-2:])[:60]}"


class Kernel:
    """The machine. `chance` decides what is not decided by anybody: whose turn it is, random bytes, delays."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"kernel {seed}")
        self.bytes = random.Random(f"bytes {seed}")
        self.now_ns = 1_000 * S
        self.booted_ns = 0
        self.wall_ns = 1_800_000_000 * S
        """Unix time at now_ns = 0: a jump of the clock changes it."""
        self.boot_id = "boot-1"
        self.disk = Disk(self)
        self.processes: dict[int, Process] = {}
        self.next_pid = 100
        self.pids_to_use: list[int] = []
        self.ready: list[Thread] = []
        self.timers: list[tuple[int, int, Thread, int]] = []
        self.sequence = 0
        self.steps = 0
        self.current: Thread | None = None
        self.graves: list[Process] = []
        self.before_call: Callable[[Process, str, str], None] | None = None
        """Where faults come from: may raise OSError, and may end processes."""
        self.ends_in_write: Callable[[Process, OpenFile, bytes], int | None] = lambda process, file, data: None
        """Whether a write into a file is its process's last: then how much of it is written, before `crash`."""
        self.crash: Callable[[Process], None] = lambda process: self.signal(process, signal.SIGKILL)
        self.seen: list[Callable[[str, Any], None]] = []
        """Whoever wants to hear what happens: ended, locked, written ..."""
        self.failure = ""
        """What was found not to hold, by somebody who cannot say so: whoever is asked to look runs inside a process."""
        self.hub = greenlet.getcurrent()
        self.step_ns = self.chance.choice(STEPS_NS)
        self.is_aside = False
        """Whether calls are no steps just now."""
        self.stay = 0.7
        """How probable it is that a thread goes on after a call."""
        self.init = Process(self, 1, None, ["init"], {})
        self.processes[1] = self.init

    # --- time -------------------------------------------------------------------------------------------------------

    def boot_ns(self) -> int:
        """The monotonic clock of whoever asks: clients are on machines that go on."""
        away = self.current is not None and self.current.process.host == "client"
        return self.now_ns if away else self.now_ns - self.booted_ns

    def unix_ns(self) -> int:
        return self.wall_ns + self.now_ns

    # --- threads ----------------------------------------------------------------------------------------------------

    def step(self, name: str, what: str = "") -> Process:
        """At the beginning of each call: the process that makes it."""
        thread = self.current
        assert thread is not None
        process = thread.process
        if process.is_over:
            raise Killed
        if self.is_aside:
            return process
        self.steps += 1
        self.now_ns += self.step_ns
        if self.before_call is not None:
            self.before_call(process, name, what)
            if process.is_over:
                raise Killed
        if self.timers and self.timers[0][0] <= self.now_ns:
            self._fire()
            if process.is_over:  # the power went
                raise Killed
        if process.state == "T" or (self.ready and self.chance.random() > self.stay):
            self.give_way()
        if process.pending:
            self.handle_signals(process)
        return process

    def give_way(self) -> None:
        """Lets others run; this thread is runnable all the time."""
        thread = self.current
        assert thread is not None
        if thread.process.state == "T":
            thread.process.own.setdefault("halted", []).append(thread)
            thread.is_runnable = False
        else:
            thread.is_runnable = True
            self.ready.append(thread)
        self._park(thread)

    def _park(self, thread: Thread) -> None:
        self.hub.switch()
        self.current = thread
        if thread.process.is_over:
            raise Killed

    def block(self, until: Callable[[], bool], *channels: Channel, deadline_ns: int | None = None) -> bool:
        """Waits; False when the time is over before `until` holds. Signals are handled meanwhile."""
        thread = self.current
        assert thread is not None
        process = thread.process
        while not until():
            if deadline_ns is not None and self.now_ns >= deadline_ns:
                return False
            thread.is_runnable = False
            for channel in (*channels, process.signals):
                channel.waiters.append((thread, thread.token))
            if deadline_ns is not None:
                self.sequence += 1
                heapq.heappush(self.timers, (deadline_ns, self.sequence, thread, thread.token))
            self._park(thread)
            if process.pending:
                self.handle_signals(process)
        return True

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, deadline_ns=self.now_ns + max(0, int(seconds * S)))

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        """Something that happens by itself."""
        self.sequence += 1
        heapq.heappush(self.timers, (when_ns, self.sequence, action, -1))  # type: ignore[arg-type]

    def _fire(self) -> None:
        while self.timers and self.timers[0][0] <= self.now_ns:
            _, _, thread, token = heapq.heappop(self.timers)
            if token == -1:
                thread()  # type: ignore[operator]
            elif thread.token == token and not thread.is_over and not thread.process.is_over:
                thread.wake()

    def run(self, *, until: Callable[[], bool] = lambda: False, for_s: float = 1e6) -> bool:
        """Lets the world go on until `until` holds or its time is over; False when nothing will ever happen."""
        ends_ns = self.now_ns + int(for_s * S)
        while not self.failure and not until():
            if self.now_ns >= ends_ns:
                return True
            if not self.ready:
                if not self.timers:
                    return False
                self.now_ns = max(self.now_ns, min(self.timers[0][0], ends_ns))
                self._fire()
                continue
            if self.steps > MOST_STEPS:
                raise Endless(f"{self.steps} calls, and no end: {sorted(map(repr, self.processes.values()))}")
            thread = self.ready.pop(self.chance.randrange(len(self.ready)) if len(self.ready) > 1 else 0)
            thread.is_runnable = False
            if thread.process.is_over or thread.is_over:
                continue
            if thread.process.state == "T":
                thread.process.own.setdefault("halted", []).append(thread)
                continue
            self.current = thread
            thread.greenlet.switch()
            self.current = None
        return True

    # --- processes --------------------------------------------------------------------------------------------------

    def new_process(self, parent: Process, argv: list[str], env: dict[str, str]) -> Process:
        while self.next_pid in self.processes:
            self.next_pid += 1
        pid = (
            self.pids_to_use.pop(0) if self.pids_to_use and self.pids_to_use[0] not in self.processes else self.next_pid
        )
        self.next_pid += pid == self.next_pid
        process = Process(self, pid, parent, argv, env)
        process.handlers = {s: h for s, h in parent.handlers.items() if h == signal.SIG_IGN}
        process.blocked = set(parent.blocked)
        parent.children.append(process)
        self.processes[pid] = process
        return process

    def start(self, process: Process, body: Callable[[], None]) -> None:
        process.start_thread(body)

    def end(self, process: Process, status: int) -> None:
        """It is no more; what it left is its parent's to collect."""
        if process.is_over:
            return
        process.is_over = True
        process.state = "Z"
        process.status = int(status)
        self.graves.append(process)
        for file in list(process.fds.values()):
            file.release()
        process.fds.clear()
        heir = self._heir(process)
        for child in process.children:
            child.parent = heir
            heir.children.append(child)
            if child.dies_with_parent and not child.is_over:
                self.signal(child, child.dies_with_parent)
            if child.is_over:
                self._tell_parent(child)
        process.children = []
        self.say("ended", process)
        self._tell_parent(process)

    def _heir(self, process: Process) -> Process:
        above = process.parent
        while above is not None and (above.is_over or not above.is_subreaper):
            above = above.parent
        return above or self.init

    def _tell_parent(self, process: Process) -> None:
        parent = process.parent
        if parent is None or parent is self.init or parent.is_over:
            self.reap(process)
            return
        if parent.handlers.get(signal.SIGCHLD) == signal.SIG_IGN:
            self.reap(process)
        self.signal(parent, signal.SIGCHLD)
        parent.child_ended.notify()

    def reap(self, process: Process) -> None:
        self.processes.pop(process.pid, None)
        if process.parent is not None and process in process.parent.children:
            process.parent.children.remove(process)

    def say(self, what: str, about: Any) -> None:
        for hear in self.seen:
            hear(what, about)

    # --- signals ----------------------------------------------------------------------------------------------------

    def signal(self, process: Process, number: int) -> None:
        if process.is_over or process is self.init:
            return
        if number == signal.SIGKILL:
            self.end(process, number)
        elif number == signal.SIGSTOP:
            process.state = "T"
        elif number == signal.SIGCONT and process.state == "T":
            process.state = "R"
            for thread in process.own.pop("halted", []):
                if not thread.is_over and not thread.is_runnable:
                    thread.is_runnable = True
                    self.ready.append(thread)
            self._deliver(process, number)
        else:
            self._deliver(process, number)

    def _deliver(self, process: Process, number: int) -> None:
        if number in process.blocked:
            if number not in process.pending:
                process.pending.append(number)
            process.signals.notify()
            return
        handler = process.handlers.get(number, signal.SIG_DFL)
        if handler == signal.SIG_IGN or (handler == signal.SIG_DFL and number in IGNORED):
            return
        if handler == signal.SIG_DFL and (process.state != "T"):
            self.end(process, number)
            return
        if number not in process.pending:
            process.pending.append(number)
        process.signals.notify()

    def handle_signals(self, process: Process) -> None:
        """What waits and is not blocked; Python's own handlers run in the main thread."""
        for number in [n for n in process.pending if n not in process.blocked]:
            if number not in process.pending:
                continue  # the handler of another one made a call, and met it there
            handler = process.handlers.get(number, signal.SIG_DFL)
            if handler == signal.SIG_DFL:
                process.pending.remove(number)
                if number not in IGNORED:
                    self.end(process, number)
                    raise Killed
            elif handler == signal.SIG_IGN:
                process.pending.remove(number)
            elif self.current is process.main:
                process.pending.remove(number)
                handler(number, None)

    def end_all(self) -> None:
        """Nothing is ever done again: what was not finished goes, with all that it holds."""
        for process in [*self.processes.values(), *self.graves]:
            process.is_over = True
            for thread in process.threads:
                while thread.greenlet and not thread.greenlet.dead:  # a clean-up may wait for another thread
                    self.current = thread
                    thread.greenlet.throw(Killed)
        self.current = None
        self.graves.clear()

    # --- the machine ------------------------------------------------------------------------------------------------

    def reboot(self, *, cleanly: bool = False) -> None:
        """Everything on the host ends; of its disk is left what was synced, and perhaps more."""
        if not cleanly:
            self.disk.lose_power(self.chance)
        for process in list(self.processes.values()):
            if process.host == "client":
                continue
            if process is not self.init:
                process.is_over = True
                process.state = "Z"
                self.graves.append(process)
                for file in list(process.fds.values()):
                    file.release()
                process.fds.clear()
                self.say("ended", process)
        self.processes = {p.pid: p for p in self.processes.values() if p.host == "client" or p is self.init}
        self.init.children = [p for p in self.init.children if p.host == "client"]
        self.now_ns += 30 * S
        self.booted_ns = self.now_ns
        self.boot_id = f"boot-{int(self.boot_id.split('-')[1]) + 1}"
        self.next_pid = 100
