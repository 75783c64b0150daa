"""One request to the agent on a host, and the stream that answers it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from deployer.agent.host.layout import JOB_ID
from deployer.agent.host.typed import InvalidData, from_json, load_json
from deployer.agent.wire import frames
from deployer.agent.wire.frames import Frame, ProtocolError, Window
from deployer.errors import FerryError, HostError, LostConnection, UnknownJob, UsageError

if TYPE_CHECKING:
    from deployer.connection.link import Link

T = TypeVar("T")

MAX_EVENT = 4 << 20
"""Maximum bytes of one event's value, unless its call expects more."""
ITEM_BYTES = 20
"""A value may have at most one item per this many bytes: in memory an item takes many times the space of its text."""
MAX_WAITING = 32
"""Frames of one call that wait. If its caller is slower, the link's reader waits, and therefore the host."""


class Call:
    """One request and its stream. Iterate `events` to the end, or take `result`."""

    def __init__(self, link: Link, number: int) -> None:
        self.id = number
        self.max_event = MAX_EVENT
        self.link = link
        self._inbox = _Inbox()
        self._window = Window()
        self._json = bytearray()
        self._received = self._consumed = 0  # bytes; each counted by one thread alone
        self._refusal: FerryError | None = None

    def deliver(self, frame: Frame) -> None:
        if frame.control.grant is not None:
            self._window.grant(frame.control.grant)
            return
        self._received += len(frame.body)
        if self._received - self._consumed > frames.WINDOW:
            raise ProtocolError("more data than was asked for")
        if "error" in frame.head:
            self._refuse(error_of(frame.head["error"]))
        self._inbox.put(frame)

    def fail(self, error: FerryError) -> None:
        self._refuse(error)
        self._inbox.end(error)

    def _refuse(self, error: FerryError) -> None:
        """Refuses further data: a thread that sends stops at once and raises the error."""
        self._refusal = self._refusal or error
        self._window.close()

    def events(self) -> Iterator[tuple[str, Any, bytes]]:
        """(name, value, data) of every event up to the answer; `data` events carry bytes and their head as value.

        Raises the host's error as one of ours, and LostConnection if the connection broke.
        """
        while True:
            frame = self._inbox.get()
            head = frame.head
            if "error" in head:
                self.link.forget(self.id)
                raise error_of(head["error"])
            if "ok" in head:
                self.link.forget(self.id)
                yield "ok", head["ok"], b""
                return
            try:
                event = self._event(frame)
            except (InvalidData, ProtocolError) as error:
                raise self.link.not_understood(error) from error
            if event is not None:
                yield event
            if frame.body:
                self._consumed += len(frame.body)
                with suppress(LostConnection):  # a host that has gone may have answered before: the inbox says the end
                    self.link.send({"id": self.id, "grant": len(frame.body)})

    def _event(self, frame: Frame) -> tuple[str, Any, bytes] | None:
        """The event of a frame; None for a part of a value that is not complete yet."""
        head, control = frame.head, frame.control
        if control.json:
            self._json += frame.body
            if len(self._json) > self.max_event:
                raise ProtocolError(f"a value of more than {self.max_event >> 20} MiB")
            return None
        if control.data:
            return "data", head, frame.body
        if control.event is None:
            raise InvalidData("a frame says nothing")
        if "value" in head:
            return control.event, head["value"], b""
        text, self._json = self._json, bytearray()
        if sum(map(text.count, (b"[", b"{", b","))) > self.max_event // ITEM_BYTES:
            raise ProtocolError("a value of too many items")
        return control.event, load_json(bytes(text), most=self.max_event), b""

    @overload
    def result(self, event: str = "ok") -> Any: ...

    @overload
    def result(self, event: str, kind: type[T]) -> T: ...

    def result(self, event: str = "ok", kind: Any = Any) -> Any:
        """The value of the last event of this name (`ok`: the answer); ignores other events."""
        found = None
        for name, value, _ in self.events():
            if name == event:
                found = value
        return self.read(found, kind, event)

    def read(self, value: Any, kind: type[T], what: str) -> T:
        """A received value, checked against its type. Raises HostError if it does not have this type."""
        try:
            return from_json(value, kind)
        except InvalidData as damage:
            raise self.link.not_understood(damage.within(what)) from None

    def check_job_id(self, job_id: str, what: str) -> None:
        """Raises HostError if this is not a job ID: people copy commands that contain it, and it becomes part of a
        path."""
        if not JOB_ID.match(job_id):
            raise self.link.not_understood(InvalidData(f"is {job_id[:60]!r}", place=what))

    def send_data(self, data: bytes, *, hurried: bool = True, **head: Any) -> None:
        """Sends bytes up this call's stream, as fast as the host takes them. `hurried`: a host that takes none for some
        time counts as lost; otherwise this waits."""
        for start in range(0, len(data), frames.MAX_BODY) or (0,):
            part = data[start : start + frames.MAX_BODY]
            try:
                self._window.take(len(part), timeout_s=self.link.limits.dead_after_s if hurried else None)
            except ProtocolError as error:
                raise self._refusal or LostConnection(f"{self.link.host}: {error}") from None
            self.link.send({**head, "id": self.id}, part)

    def end_data(self) -> None:
        self.link.send({"id": self.id, "end": True})

    def let_wait(self, most: int) -> None:
        """Sets how many frames may wait here before they delay the link's other calls."""
        self._inbox.most = most

    def pending(self) -> bool:
        """Whether a frame has arrived that `events` has not returned yet."""
        return len(self._inbox) > 0

    def cancel(self) -> None:
        """Reports to the host that the caller does not wait for the answer any more."""
        self.link.send({"id": self.id, "cancel": True})


class _Inbox:
    """A short queue from the thread that reads a link to the thread that takes a call's events.

    It holds few frames, so a host cannot fill this machine's memory.
    """

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._error: FerryError | None = None
        self._changed = threading.Condition()
        self.most = MAX_WAITING

    def put(self, frame: Frame) -> None:
        """Adds a frame; waits for room. Drops the frame if the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) < self.most or self._error is not None)
            if self._error is None:
                self._frames.append(frame)
            self._changed.notify_all()

    def end(self, error: FerryError) -> None:
        """Ends the queue: `get` raises this error after the frames that are still in it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def get(self) -> Frame:
        """Waits for the next frame. Raises the error that ended the link."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._error is not None)
            if not self._frames:
                assert self._error is not None
                raise self._error
            self._changed.notify_all()
            return self._frames.popleft()

    def __len__(self) -> int:
        return len(self._frames)


class _Refusal(NamedTuple):
    kind: str = ""
    message: str = "the host gave no reason"
    hint: str = ""


_ERRORS: dict[str, type[FerryError]] = {"usage": UsageError, "unknown_job": UnknownJob, "lost": LostConnection}


def error_of(data: Any) -> FerryError:
    """The host's error as one of ours, with its exit code."""
    try:
        refusal = from_json(data, _Refusal)
    except InvalidData as damage:
        return HostError(f"the host refused, and why is not understood: {damage}")
    message, *more = refusal.message.split("\n")
    kind = _ERRORS.get(refusal.kind, HostError)
    return kind(message, where=[f"host: {line}" for line in more[-30:]], hint=refusal.hint)
