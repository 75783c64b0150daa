"""One host with its clients: what is there at the beginning, sessions, connections that break, clients' commands."""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from tests.world.linux import calls
from tests.world.linux.inodes import Inode, OpenFile, Pipe
from tests.world.linux.kernel import Kernel, Process, S
from tests.world.programs import HOME, SHIPPED
from tests.world.schedule import UIDS

MACHINE = "5f0c0ffee0ddba11"
sys.unraisablehook = lambda _: None  # what was killed cannot close its files


def home_of(uid: int) -> str:
    return "/root" if uid == 0 else f"/home/u{uid}"


def root_of(uid: int) -> str:
    """Where an account's jobs lie."""
    return f"{home_of(uid)}/.torchferry"


class Gpus:
    """The host's GPUs: `strangers` compute on them without a lease."""

    def __init__(self, count: int) -> None:
        self.uuids = [f"GPU-{number:08x}-0000" for number in range(count)]
        self.strangers: dict[int, int] = {}
        """Index -> pid."""
        self.since_ns: dict[int, int] = {}

    def table(self, fields: str) -> str:
        if fields.startswith("--query-gpu"):
            rows = [
                f"{n}, {uuid}, NVIDIA H100, 81559, {9000 if n in self.strangers else 4}"
                for n, uuid in enumerate(self.uuids)
            ]
        else:
            rows = [f"{self.uuids[n]}, {pid}, 9000" for n, pid in self.strangers.items()]
        return "".join(f"{row}\n" for row in rows)


class World:
    """A host at the beginning of a schedule."""

    def __init__(self, seed: int, *, gpus: int = 0) -> None:
        self.kernel = Kernel(seed)
        calls.Here.kernel = self.kernel
        self.kernel.gpus = self.gpus = Gpus(gpus)  # type: ignore[attr-defined]
        self.connections: list[Stream] = []
        self._furnish(gpus)

    def _furnish(self, gpus: int) -> None:
        for path, mode in (("/tmp", 0o1777), ("/root", 0o700), ("/etc", 0o755), ("/dev", 0o755), ("/usr/bin", 0o755)):
            self.folder(path, mode)
        for uid in UIDS[1:]:
            self.folder(home_of(uid), 0o700, uid)
        self.folder(f"{HOME}/deployer/agent", 0o755)
        self.file("/etc/machine-id", MACHINE.encode())
        self.file("/usr/bin/python3", b"", 0o755)
        if gpus:
            self.file("/usr/bin/nvidia-smi", b"", 0o755)
        for name in ("null", "full"):
            device = self.file(f"/dev/{name}", b"", 0o666)
            device.kind, device.device = stat.S_IFCHR, name
        self.kernel.disk.settle()

    def folder(self, path: str, mode: int = 0o700, uid: int = 0) -> Inode:
        disk = self.kernel.disk
        here = disk.root
        for part in path.strip("/").split("/"):
            if part not in here.names:
                disk.put(here, part, Inode(disk, stat.S_IFDIR, 0o755, 0))
            here = here.names[part]
        here.mode, here.uid = mode, uid
        return here

    def file(self, path: str, data: bytes, mode: int = 0o644, uid: int = 0) -> Inode:
        disk = self.kernel.disk
        above, _, name = path.rpartition("/")
        folder = disk.find(above) or self.folder(above, 0o755)
        inode = Inode(disk, stat.S_IFREG, mode, uid)
        inode.data = bytearray(data)
        disk.used += len(data)
        if name in folder.names:
            disk.drop(folder, name)
        disk.put(folder, name, inode)
        return inode

    def read(self, path: str) -> bytes | None:
        """A file's content, without a step."""
        inode = self.kernel.disk.find(path)
        return None if inode is None else bytes(inode.data)

    def processes(self) -> list[Process]:
        return [p for p in self.kernel.processes.values() if p.pid != 1 and not p.is_over]

    # --- whoever is there -------------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        body: Callable[[], None],
        *,
        uid: int = 0,
        host: str = "client",
        env: dict[str, str] | None = None,
    ) -> Process:
        """A process that nobody of the host has started: a client, a neighbour."""
        kernel = self.kernel
        process = Process(kernel, self._pid(), kernel.init, [name], env or {})
        process.uid, process.host = uid, host
        process.group = process.session = process.pid
        process.begin_python()
        kernel.processes[process.pid] = process
        kernel.init.children.append(process)
        for fd in (0, 1, 2):
            process.fds[fd] = OpenFile(kernel.disk, kernel.disk.find("/dev/null"), os.O_RDWR, "/dev/null")  # type: ignore[arg-type]
        kernel.start(process, body)
        return process

    def _pid(self) -> int:
        while self.kernel.next_pid in self.kernel.processes:
            self.kernel.next_pid += 1
        self.kernel.next_pid += 1
        return self.kernel.next_pid - 1

    def session(self, message: dict[str, Any], uid: int) -> tuple[Process, OpenFile, OpenFile, OpenFile]:
        """A login that runs the agent: (its process, our end of its stdin, of its stdout, of its stderr)."""
        kernel = self.kernel
        env = {"PATH": "/usr/bin:/bin", "HOME": home_of(uid), "LANG": "C.UTF-8"}
        process = Process(kernel, self._pid(), kernel.init, ["python3", "-c", "agent"], env)
        process.uid = uid
        process.group = process.session = process.pid
        process.begin_python()
        kernel.processes[process.pid] = process
        kernel.init.children.append(process)
        ours = []
        for fd in (0, 1, 2):
            reading, writing = calls.new_pipe(process)
            process.fds[fd] = reading if fd == 0 else writing
            ours.append(writing if fd == 0 else reading)

        def serve() -> None:
            from tests.world.linux.modules import MODULES

            MODULES["os"].umask(0o077)
            guard = SHIPPED.load("deployer.agent.guard")
            root = guard.find_root(message["root"])
            guard.secure_root(root)
            stdin = io.BufferedReader(MODULES["io"].FileIO(0, closefd=False), 1 << 16)
            SHIPPED.load("deployer.agent.serve").main({**message, "root": root}, stdin)

        kernel.start(process, serve)
        return process, ours[0], ours[1], ours[2]

    def end(self) -> None:
        self.kernel.end_all()


class Transport:
    """A way to the host that may break: `plan` says after how many bytes."""

    description = "host"

    def __init__(self, world: World, *, uid: int = 0, plan: Callable[[], Cut] | None = None) -> None:
        from deployer.transport.protocol import Limits

        self.world = world
        self.uid = uid
        self.plan = plan
        self.limits = Limits()

    def connect(self) -> None:
        if self.world.kernel.chance.random() < getattr(self.world, "unreachable", 0.0):
            raise SHIPPED.load("deployer.errors").ConnectError("the host cannot be reached")

    def open(self, command: str) -> Stream:
        message = json.loads(base64.b64decode(command))
        stream = Stream(self.world, message, self.uid, self.plan() if self.plan else Cut())
        self.world.connections.append(stream)
        return stream

    def close(self) -> None:
        pass


class Cut:
    """When a connection breaks: after so many bytes to the host, and from it; `silent`: nobody hears of it."""

    def __init__(self, sent: int | None = None, received: int | None = None, *, silent: bool = False) -> None:
        self.sent = sent
        self.received = received
        self.silent = silent


class Stream:
    """The client's end."""

    def __init__(self, world: World, message: dict[str, Any], uid: int, cut: Cut) -> None:
        self.world = world
        self.cut = cut
        self.is_cut = self.is_closed = False
        self.process, self._stdin, self._stdout, self._stderr = world.session(message, uid)
        current = world.kernel.current
        assert current is not None
        client = current.process

        def hear(what: str, about: Any) -> None:
            if what == "ended" and about is client:
                self.break_()

        world.kernel.seen.append(hear)

    def read(self, size: int) -> bytes:
        kernel = self.world.kernel
        kernel.step("receive")
        pipe = self._stdout.inode.pipe
        assert pipe is not None
        kernel.block(lambda: self._has_news(pipe), pipe.changed)
        if self.is_closed:
            return b""
        if self.is_cut:
            raise _lost("the connection broke")
        if self.cut.received is not None:
            size = min(size, self.cut.received)
        data = bytes(pipe.data[:size])
        del pipe.data[:size]
        pipe.changed.notify()
        if self.cut.received is not None:
            self.cut.received -= len(data)
            if self.cut.received <= 0:
                self.break_()
                if not data:
                    return self.read(size)
        return data

    def _has_news(self, pipe: Pipe) -> bool:
        if self.is_closed:
            return True
        return not self.cut.silent if self.is_cut else bool(pipe.data or not pipe.writers)

    def write(self, data: bytes) -> None:
        kernel = self.world.kernel
        pipe = self._stdin.inode.pipe
        assert pipe is not None
        rest = memoryview(data)
        deadline = kernel.now_ns + 60 * S
        while rest:
            kernel.step("send")
            if self.is_closed or (self.is_cut and not self.cut.silent):
                raise _lost("the connection broke")
            if self.is_cut:
                return
            room = (1 << 16) - len(pipe.data)
            if not pipe.readers:
                raise _lost("the host takes no more input")
            if room <= 0:
                if not kernel.block(
                    lambda: len(pipe.data) < 1 << 16 or not pipe.readers or self.is_cut,
                    pipe.changed,
                    deadline_ns=deadline,
                ):
                    raise _lost("the host took no input for 60 s")
                continue
            part = rest[:room]
            if self.cut.sent is not None:
                part = part[: self.cut.sent]
                self.cut.sent -= len(part)
            pipe.data += part
            pipe.changed.notify()
            rest = rest[len(part) :]
            if self.cut.sent == 0:
                self.cut.sent = None
                self.break_()

    def break_(self) -> None:
        """The connection is no more; the host hears of it now, or after its own while."""
        if self.is_cut or self.is_closed:
            return
        self.is_cut = True
        kernel = self.world.kernel
        if self.cut.silent:
            kernel.at(kernel.now_ns + kernel.chance.randrange(600) * S, self._let_go)
        else:
            self._let_go()

    def _let_go(self) -> None:
        for end in (self._stdin, self._stdout, self._stderr):
            if end.users:
                end.release()

    def close_write(self) -> None:
        if self._stdin.users:
            self._stdin.release()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if not self.is_cut:
                self._let_go()
            pipe = self._stdout.inode.pipe
            assert pipe is not None
            pipe.changed.notify()

    def stderr_text(self) -> str:
        pipe = self._stderr.inode.pipe
        assert pipe is not None
        return bytes(pipe.data).decode("utf-8", "replace")

    def exit_status(self, timeout_s: float) -> int | None:
        kernel = self.world.kernel
        kernel.block(lambda: self.process.is_over, deadline_ns=kernel.now_ns + int(timeout_s * S))
        status = self.process.status
        return None if not self.process.is_over else 128 + (status & 0x7F) if status & 0x7F else status >> 8


def _lost(text: str) -> Exception:
    error: Exception = SHIPPED.load("deployer.errors").LostConnection(text)
    return error
