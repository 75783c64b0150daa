"""The client's half of the conversation with the agent on a host: one exec, then frames both ways.

`Link.open` sends one constant line for `/bin/sh` and one base64 word. The word carries the loader, a nonce, the agent's
hash and, for the usual case, the first request itself, so that an unchanged deployment costs one exec and no answer is
waited for. An agent that is missing on the host is sent down the same channel.
"""

from __future__ import annotations

import io
import json
import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deployer.agent import frames
from deployer.agent.frames import Frame, ProtocolError, Window
from deployer.command import MAX_WORD, agent_hash, agent_sources, build_command, build_word
from deployer.errors import FerryError, HostError, LostConnection, UnknownJob, UsageError
from deployer.inbox import Inbox

if TYPE_CHECKING:
    from deployer.transport import Stream, Transport

PING_EVERY_S = 10.0
DEAD_AFTER_S = 35.0
"""Silence of the host, although pinged, after which the connection counts as lost."""
ANSWER_TIMEOUT_S = 60.0
"""From the exec to the nonce: login scripts run in between."""
MAX_PAYLOAD = 8 << 20
MAX_EVENT = 4 << 20
"""Bytes of one event's value at most, unless its call expects more."""
ITEM_BYTES = 20
"""A value may have one item for so many of its bytes: in memory an item takes many times what it takes as text."""


class Link:
    """An open conversation with the agent of one host. Use `call`; close it when done."""

    def __init__(
        self, stream: Stream, *, host: str, ping_every_s: float = PING_EVERY_S, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        self.host = host
        self._ping_every_s, self._dead_after_s = ping_every_s, dead_after_s
        self.hello: dict[str, Any] = {}
        self._stream = stream
        self._calls: dict[int, Call] = {}
        self._issued = 0  # the highest number that a call has got
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._lost: FerryError | None = None
        self._closed = False
        self._payload = b""
        self._agent_sent = False
        self._greeted = threading.Event()  # the nonce has come
        self._ready = threading.Event()  # the agent has said hello: what is sent now is not lost on a loader
        self._heard = time.monotonic()
        self.opened_at = self._heard
        self.noise = b""
        """What the login printed before the agent spoke."""
        self.answered_s = 0.0
        """From the exec to the agent's first byte: login shell, Python, half a round trip each way."""
        self._asked, self._answered = 0, threading.Event()
        self._delivering = False  # what the host says waits for somebody here

    @classmethod
    def open(
        cls,
        transport: Transport,
        *,
        root: str,
        request: dict[str, Any] | None = None,
        payload: dict[str, Any] | None = None,
        ahead: Sequence[tuple[dict[str, Any], bytes]] = (),
        agent_too: bool = False,
        **bounds: float,
    ) -> Link:
        """Connects, starts the agent and, when given, its first `request` (its call is then `first`).

        What must not show in the host's process list (environment values, secrets) is `payload`: it follows on stdin.
        `ahead`: frames (head, body) of the request's stream that follow at once, within its window.
        `agent_too`: the agent is sent along unasked, so that nothing behind it is lost on a host that has none.
        `bounds`: ping_every_s and dead_after_s, other than PING_EVERY_S and DEAD_AFTER_S.
        """
        transport.connect()
        nonce = secrets.token_hex(16)
        message: dict[str, Any] = {"nonce": nonce, "agent": agent_hash(), "root": root}
        if request is not None:
            message["request"] = {**request, "id": 0, "payload": payload is not None}
        word = build_word(message)
        if request is not None and len(word) > MAX_WORD:
            message["request"] = {"op": request["op"], "id": 0, "payload": True}
            payload = {**request, **(payload or {})}
            word = build_word(message)
        link = cls(transport.open(build_command(word)), host=transport.description, **bounds)
        if request is not None:
            link._calls[0] = Call(link, 0)
        link._payload = (_payload_frames(payload) if payload is not None else b"") + _stream_frames(ahead)
        link._agent_sent = agent_too
        if first := (_agent_frames() if agent_too else b"") + link._payload:
            link._write(first)  # all of it before the reader starts: see _send_agent
        threading.Thread(target=link._read, args=(nonce,), name="link-reader", daemon=True).start()
        threading.Thread(target=link._keep_alive, name="link-keepalive", daemon=True).start()
        return link

    @property
    def first(self) -> Call:
        """The call of the request that was given to `open`."""
        return self._calls[0]

    def wait_ready(self) -> None:
        """Returns when the agent is there, or the connection is lost."""
        self._ready.wait()

    def call(self, op: str, **params: Any) -> Call:
        """Sends a request; its events and answer come from the returned call. Waits for the agent to be there first."""
        self.wait_ready()
        with self._lock:
            self._issued = number = self._issued + 1
        call = Call(self, number)
        try:
            data = frames.encode({"id": number, "op": op, **params})
        except ValueError as error:
            raise UsageError(f"the {op} request is too long: {error}") from None
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls[number] = call
        self._write(data)
        return call

    def round_trip_s(self) -> float:
        """Seconds that an empty question takes to be answered. LostConnection when it is not."""
        self._ready.wait()
        self._asked += 2  # not the number of a keep-alive
        self._answered.clear()
        begun = time.monotonic()
        self.send({"ping": self._asked})
        if not self._answered.wait(DEAD_AFTER_S):
            raise self._lost or LostConnection(f"{self.host} has not answered for {DEAD_AFTER_S:g} s")
        return time.monotonic() - begun

    @property
    def lost(self) -> bool:
        """Whether the connection broke before `close`."""
        return self._lost is not None and not self._closed

    def close(self) -> None:
        """Ends the conversation; the agent goes, the jobs stay."""
        self._closed = self._closed or self._lost is None
        self._fail(LostConnection(f"the connection to {self.host} was closed"))
        self._stream.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        self._write(frames.encode(head, body))

    # --- inside --------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        with self._write_lock:
            self._stream.write(data)

    def _read(self, nonce: str) -> None:
        try:
            self.noise, first = _find_nonce(self._stream, nonce.encode("ascii"))
            self.answered_s = time.monotonic() - self.opened_at
            self._greeted.set()
            self._heard = time.monotonic()
            reader = io.BufferedReader(_Raw(self._stream, first), 1 << 16)
            while (frame := frames.read_frame(reader)) is not None:
                self._delivering = True
                self._dispatch(frame)
                self._heard, self._delivering = time.monotonic(), False
            self._fail(LostConnection(f"{self.host} closed the connection"))
        except frames.CutError as error:
            self._fail(LostConnection(f"{self.host} broke off: {error}"))
        except FerryError as error:
            self._fail(error)
        except Exception as error:  # whatever a host sends, who waits for an answer must hear of it
            self._fail(self.not_understood(error))

    def not_understood(self, error: Exception) -> HostError:
        """The error for what no agent of ours would send; trying again would not help."""
        words = error if isinstance(error, ProtocolError) else repr(error)
        return HostError(f"{self.host} sent what is not understood: {words}")

    def _dispatch(self, frame: Frame) -> None:
        head = frame.head
        if "id" in head:
            with self._lock:
                call = self._calls.get(head["id"])
                issued = self._issued
            if call is not None:
                call.deliver(frame)
            elif type(head["id"]) is not int or not 0 <= head["id"] <= issued:
                raise ProtocolError("an answer to what was not asked")
        elif "hello" in head:
            self.hello = head["hello"]
            self._ready.set()
        elif head.get("pong") == self._asked:
            self._answered.set()
        elif head.get("need") == "agent" and not self._agent_sent:
            self._agent_sent = True
            # from here on the host takes nothing but the agent; a thread of its own, for this one must go on reading
            threading.Thread(target=self._send_agent, daemon=True).start()
        elif "refused" in head:
            raise error_of(head["refused"])

    def _send_agent(self) -> None:
        try:
            # what was sent before went to a host without an agent, which passed over it
            self._write(_agent_frames() + self._payload)
        except FerryError as error:
            self._fail(error)

    def _keep_alive(self) -> None:
        if not self._greeted.wait(ANSWER_TIMEOUT_S):
            self._fail(LostConnection(f"{self.host} gave no answer within {ANSWER_TIMEOUT_S:g} s"))
        while self._lost is None:
            time.sleep(self._ping_every_s)
            if time.monotonic() - self._heard > self._dead_after_s and not self._delivering:
                self._fail(LostConnection(f"{self.host} has not answered for {self._dead_after_s:g} s"))
                self._stream.close()
                return
            # in a thread of its own: with a dead network even a ping may block
            threading.Thread(target=self._ping, name="link-ping", daemon=True).start()

    def _ping(self) -> None:
        try:
            self.send({"ping": 1})
        except FerryError as error:
            self._fail(error)

    def _fail(self, error: FerryError) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = error
            calls = list(self._calls.values())
        self._greeted.set()
        self._ready.set()
        for call in calls:
            call.fail(self._lost)

    def forget(self, number: int) -> None:
        with self._lock:
            self._calls.pop(number, None)


class Call:
    """One request and its stream. Iterate `events` to the end, or take `result`."""

    def __init__(self, link: Link, number: int) -> None:
        self.id = number
        self.max_event = MAX_EVENT
        self.link = link
        self._inbox = Inbox()
        self._window = Window()
        self._json = bytearray()
        self._received = self._consumed = 0  # bytes; each counted by one thread alone
        self._refusal: FerryError | None = None

    def deliver(self, frame: Frame) -> None:
        if "grant" in frame.head:
            self._window.grant(int(frame.head["grant"]))
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
        """Nothing more is taken: who is sending ends at once and says why."""
        self._refusal = self._refusal or error
        self._window.close()

    def events(self) -> Iterator[tuple[str, Any, bytes]]:
        """(name, value, data) of every event up to the answer; `data` events carry bytes and their head as value.

        Raises the host's error as ours, LostConnection when the connection broke.
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
            except (KeyError, ValueError, RecursionError, ProtocolError) as error:
                raise self.link.not_understood(error) from error
            if event is not None:
                yield event
            if frame.body:
                self._consumed += len(frame.body)
                self.link.send({"id": self.id, "grant": len(frame.body)})

    def _event(self, frame: Frame) -> tuple[str, Any, bytes] | None:
        """None for a part of a value that is not complete yet."""
        head = frame.head
        if head.get("json"):
            self._json += frame.body
            if len(self._json) > self.max_event:
                raise ProtocolError(f"a value of more than {self.max_event >> 20} MiB")
            return None
        if "data" in head:
            return "data", head, frame.body
        if "value" in head:
            return head["event"], head["value"], b""
        text, self._json = self._json, bytearray()
        if sum(map(text.count, (b"[", b"{", b","))) > self.max_event // ITEM_BYTES:
            raise ProtocolError("a value of too many items")
        return head["event"], json.loads(text.decode("ascii")), b""

    def result(self, event: str | None = None) -> Any:
        """The answer, or the value of the one event of that name; other events are passed over."""
        found = None
        for name, value, _ in self.events():
            if name == (event or "ok"):
                found = value
        return found

    def send_data(self, data: bytes, **head: Any) -> None:
        """Sends bytes up this call's stream, as fast as the host takes them."""
        for start in range(0, len(data), frames.MAX_BODY) or (0,):
            part = data[start : start + frames.MAX_BODY]
            try:
                self._window.take(len(part), timeout_s=DEAD_AFTER_S)
            except ProtocolError as error:
                raise self._refusal or LostConnection(f"{self.link.host}: {error}") from None
            self.link.send({**head, "id": self.id}, part)

    def end_data(self) -> None:
        self.link.send({"id": self.id, "end": True})

    def pending(self) -> bool:
        """Whether a frame has come that `events` has not given out yet."""
        return len(self._inbox) > 0

    def cancel(self) -> None:
        """Tells the host that nobody waits for the answer any more."""
        self.link.send({"id": self.id, "cancel": True})


def error_of(data: Any) -> FerryError:
    """The host's error as one of ours, with its exit code."""
    if not isinstance(data, dict):
        return HostError(f"the host refused: {data}")
    kind = data.get("kind")
    cls: type[FerryError] = {"usage": UsageError, "unknown_job": UnknownJob, "lost": LostConnection}.get(
        str(kind), HostError
    )
    return cls(str(data.get("message", "the host gave no reason")), hint=str(data.get("hint", "")))


def _payload_frames(payload: dict[str, Any]) -> bytes:
    data = json.dumps(payload).encode("ascii")
    if len(data) > MAX_PAYLOAD:
        raise UsageError(f"the environment and arguments of the job are {len(data) >> 20} MB, at most 8 MB are allowed")
    return _stream_frames([({}, part) for part in _cut(data)])


def _stream_frames(parts: Sequence[tuple[dict[str, Any], bytes]]) -> bytes:
    """A stretch of the first call's stream, up to its end."""
    body = [frames.encode({**head, "id": 0}, part) for head, part in parts]
    return b"".join([*body, frames.encode({"id": 0, "end": True})]) if body else b""


def _agent_frames() -> bytes:
    data = zlib.compress(json.dumps(agent_sources()).encode("ascii"), 9)
    parts = [frames.encode({"agent": "part"}, part) for part in _cut(data)]
    return b"".join([*parts, frames.encode({"agent": "end"})])


def _cut(data: bytes) -> list[bytes]:
    return [data[start : start + frames.MAX_BODY] for start in range(0, len(data), frames.MAX_BODY)]


# --- bytes ------------------------------------------------------------------------------------------------------------


class _Raw(io.RawIOBase):
    """A transport's stream as a raw file, so that io.BufferedReader can read it; `first` was read from it already."""

    def __init__(self, stream: Stream, first: bytes) -> None:
        self._stream = stream
        self._first = first

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._first[: len(buffer)] or self._stream.read(len(buffer))
        self._first = self._first[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _find_nonce(stream: Stream, nonce: bytes) -> tuple[bytes, bytes]:
    """Reads up to the nonce: the noise before it, at most MAX_NOISE bytes, and what was read beyond it."""
    from deployer.transport.explain import explain_no_answer

    seen = b""
    while nonce not in seen:
        data = stream.read(1 << 15)
        if not data:
            raise explain_no_answer(stream.stderr_text(), seen, stream.exit_status(2.0))
        seen += data
        if len(seen) > frames.MAX_NOISE:
            raise HostError(
                f"the host's login prints more than {frames.MAX_NOISE >> 10} KiB before it runs a command",
                hint="make its shell start-up files silent for sessions without a terminal",
            )
    noise, _, rest = seen.partition(nonce)
    return noise, rest
