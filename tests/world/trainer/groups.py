"""`torch.distributed` of the world: stores that ranks meet in, and groups whose collectives wait until all have called,
or one of them has ended."""

from __future__ import annotations

import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tests.world.linux.calls import kernel, this
from tests.world.linux.channel import Channel
from tests.world.linux.kernel import Kernel, Process, S

LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.{0}]:{1}"


class Net:
    """What a world's processes share: the stores that somebody serves, and the groups that have met."""

    def __init__(self) -> None:
        self.ports: dict[int, Served] = {}
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.changed = Channel()
        """A member of some group, or who serves a store, has ended."""

    @staticmethod
    def of(kernel: Kernel) -> Net:
        net: Net | None = getattr(kernel, "net", None)
        if net is None:
            net = kernel.net = Net()  # type: ignore[attr-defined]
            kernel.seen.append(net.hear)
        return net

    def hear(self, what: str, about: Any) -> None:
        if what == "ended":
            self.changed.notify()
            for meeting in self.meetings.values():
                meeting.changed.notify()
            for served in self.ports.values():
                served.changed.notify()


class Served:
    """The keys of a TCPStore, in the process that serves it."""

    def __init__(self, server: Process) -> None:
        self.server = server
        self.keys: dict[str, bytes] = {}
        self.changed = Channel()


def serve(port: int) -> None:
    """This process serves a store, as torchrun does for its ranks."""
    Net.of(kernel()).ports[port] = Served(this())


class DistStoreError(RuntimeError):
    """As torch's."""


class Store:
    """As torch.distributed.Store."""

    timeout = timedelta(seconds=300)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


class TCPStore(Store):
    def __init__(self, host: str, port: int, is_master: bool = False, timeout: timedelta = Store.timeout) -> None:
        self.host, self.port, self.timeout = host, port, timeout
        self._served = Net.of(kernel()).ports[port]
        self._ask()

    def _ask(self, *wanted: str) -> dict[str, bytes]:
        """The keys, once all the wanted are there, while the server answers."""
        kernel().step("store")
        served, server = self._served, self._served.server
        deadline = kernel().now_ns + int(self.timeout.total_seconds() * S)
        if server.state == "T" and not server.is_over:  # nobody hears of it when it goes on: look again and again
            while server.state == "T" and kernel().now_ns < deadline:
                kernel().block(lambda: server.is_over, served.changed, deadline_ns=min(deadline, kernel().now_ns + S))

        def is_settled() -> bool:
            return server.is_over or all(key in served.keys for key in wanted)

        has_come = server.state != "T" and kernel().block(is_settled, served.changed, deadline_ns=deadline)
        if server.is_over:
            raise DistStoreError("Failed to recv, got 0 bytes. Connection was likely closed: Connection reset by peer")
        if not has_come:
            raise DistStoreError(f"wait timeout after {self.timeout.total_seconds() * 1000:.0f}ms, keys: {wanted}")
        return served.keys

    def set(self, key: str, text: str | bytes) -> None:
        self._ask()[key] = text.encode() if isinstance(text, str) else text
        self._served.changed.notify()

    def get(self, key: str) -> bytes:
        return self._ask(key)[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        there = self._ask(*keys)
        return [there[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        there = self._ask()
        return all(key in there for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        there = self._ask()
        if there.get(key, b"") == expected.encode():
            there[key] = wanted.encode()
            self._served.changed.notify()
        return there.get(key, expected.encode())

    def clone(self) -> TCPStore:
        return TCPStore(self.host, self.port, timeout=self.timeout)


class FileStore(Store):
    """Nobody here meets in a file."""


class HashStore(Store):
    """Of a process that is alone."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def set(self, key: str, text: str | bytes) -> None:
        self._keys[key] = text.encode() if isinstance(text, str) else text

    def get(self, key: str) -> bytes:
        return self._keys[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._keys[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._keys for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        if self._keys.get(key, b"") == expected.encode():
            self._keys[key] = wanted.encode()
        return self._keys.get(key, expected.encode())


class PrefixStore(Store):
    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.underlying_store = prefix, store

    def set_timeout(self, timeout: timedelta) -> None:
        self.underlying_store.set_timeout(timeout)

    def set(self, key: str, text: str | bytes) -> None:
        self.underlying_store.set(f"{self.prefix}/{key}", text)

    def get(self, key: str) -> bytes:
        return bytes(self.underlying_store.get(f"{self.prefix}/{key}"))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self.underlying_store.multi_get([f"{self.prefix}/{key}" for key in keys]))

    def check(self, keys: list[str]) -> bool:
        return bool(self.underlying_store.check([f"{self.prefix}/{key}" for key in keys]))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return bytes(self.underlying_store.compare_set(f"{self.prefix}/{key}", expected, wanted))


# --- groups -----------------------------------------------------------------------------------------------------------


class Meeting:
    """The processes of a group, and what each has brought to which of its collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: dict[int, Process] = {}
        self.rounds: dict[int, dict[int, Any]] = {}
        self.changed = Channel()


class ProcessGroup:
    """One process's end of a group."""

    def __init__(self, key: tuple[Any, ...], rank: int, size: int, timeout: timedelta) -> None:
        self.key, self.rank, self.size, self.timeout = key, rank, size, timeout
        self._meeting = Net.of(kernel()).meetings.setdefault(key, Meeting(size))
        self._count = 0
        self._broken = ""
        self.made = 0
        """Further groups made of it."""
        self._join()

    def _join(self) -> None:
        meeting = self._meeting
        kernel().step("join")
        meeting.members[self.rank] = this()
        meeting.changed.notify()
        deadline = kernel().now_ns + int(self.timeout.total_seconds() * S)
        with at_collective():
            if not kernel().block(lambda: len(meeting.members) == self.size, meeting.changed, deadline_ns=deadline):
                raise DistStoreError(f"wait timeout after {self.timeout.total_seconds() * 1000:.0f}ms")

    def post(self, value: Any) -> Work:
        """Brings this rank's value to the group's next collective."""
        kernel().step("collective")
        number, self._count = self._count, self._count + 1
        self._meeting.rounds.setdefault(number, {})[self.rank] = value
        self._meeting.changed.notify()
        return Work(self, number)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's values by rank, once all have called."""
        return self.post(value).values()

    def await_round(self, number: int) -> list[Any]:
        meeting = self._meeting
        brought = meeting.rounds[number]

        def lost() -> list[int]:
            return [rank for rank, member in meeting.members.items() if rank not in brought and member.is_over]

        if self._broken:
            raise RuntimeError(self._broken)
        deadline = kernel().now_ns + int(self.timeout.total_seconds() * S)
        with at_collective():
            in_time = kernel().block(
                lambda: len(brought) == self.size or bool(lost()), meeting.changed, deadline_ns=deadline
            )
        if len(brought) < self.size:
            ms = self.timeout.total_seconds() * 1000
            waited = f"[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting {ms:.0f}ms for "
            self._broken = LOST.format(lost()[0], 30000 + lost()[0]) if in_time else f"{waited}recv operation"
            raise RuntimeError(self._broken)
        return [brought[rank] for rank in range(self.size)]


class Work:
    """A collective under way."""

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self._group, self._number = group, number
        self.into: Any = None

    def values(self) -> list[Any]:
        return self._group.await_round(self._number)

    def wait(self) -> None:
        columns = zip(*self.values(), strict=True)
        self.into.numbers[:] = [max(column) for column in columns]


class at_collective:
    """What the watchdog sees of the main thread: it waits for others."""

    def __enter__(self) -> None:
        current = kernel().current
        assert current is not None
        self._own = current.process.own if current is current.process.main else {}
        self._own["waits"] = True

    def __exit__(self, *exc: object) -> None:
        self._own["waits"] = False


# --- the module -------------------------------------------------------------------------------------------------------


def rendezvous(method: str, rank: int, size: int, timeout: timedelta) -> Iterator[tuple[TCPStore, int, int]]:
    yield TCPStore("localhost", int(this().env["MASTER_PORT"]), timeout=timeout), rank, size


def init_process_group(
    backend: str, *, store: Any, rank: int, world_size: int, timeout: timedelta = Store.timeout, device_id: Any = None
) -> None:
    if isinstance(store, HashStore):
        key: tuple[Any, ...] = ("alone", this().pid, kernel().now_ns)
    else:
        key = (store.underlying_store.port, store.prefix)
        store.underlying_store._ask()
    this().own["default group"] = ProcessGroup(key, rank, world_size, timeout)


def default_group() -> ProcessGroup:
    found: ProcessGroup = this().own["default group"]
    return found


def new_group(backend: str, timeout: timedelta) -> ProcessGroup:
    whole = default_group()
    whole.made += 1
    return ProcessGroup((*whole.key, whole.made), whole.rank, whole.size, timeout)


def destroy_process_group() -> None:
    this().own.pop("default group", None)


def all_gather_object(values: list[Any], value: Any, group: ProcessGroup) -> None:
    values[:] = group.exchange(value)


def barrier(group: ProcessGroup) -> None:
    group.exchange(None)


def all_reduce(values: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Work | None:
    assert op == "max" and async_op
    work = (group or default_group()).post(tuple(values.numbers))
    work.into = values
    return work  # type: ignore[no-any-return]


class _World:
    @property
    def WORLD(self) -> ProcessGroup:
        return default_group()


def make_distributed() -> types.ModuleType:
    made = types.ModuleType("torch.distributed")
    made.__dict__.update(
        Store=Store,
        TCPStore=TCPStore,
        FileStore=FileStore,
        HashStore=HashStore,
        PrefixStore=PrefixStore,
        ProcessGroup=ProcessGroup,
        Work=Work,
        rendezvous=rendezvous,
        init_process_group=init_process_group,
        new_group=new_group,
        destroy_process_group=destroy_process_group,
        is_initialized=lambda: "default group" in this().own,
        get_world_size=lambda group: group.size,
        all_gather_object=all_gather_object,
        barrier=barrier,
        all_reduce=all_reduce,
        ReduceOp=types.SimpleNamespace(MAX="max"),
        group=_World(),
    )
    return made
