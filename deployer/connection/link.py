"""The client's half of the conversation with the agent on a host: one exec, then frames both ways.

`Link.open` sends one constant line for `/bin/sh` and one base64 word. The word carries the loader, a nonce, the agent's
hash and, for the usual case, the first request itself, so an unchanged launch needs one exec and waits for no answer.
If the host lacks the agent, it is sent over the same channel.
"""

from __future__ import annotations

import io
import json
import secrets
import signal
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deployer.agent.host.typed import InvalidData, from_json
from deployer.agent.wire import frames
from deployer.agent.wire.frames import Frame, ProtocolError
from deployer.connection.call import Call, error_of
from deployer.connection.command import MAX_WORD, agent_hash, agent_sources, build_command, build_word
from deployer.errors import FerryError, HostError, LostConnection, UsageError

if TYPE_CHECKING:
    from deployer.transport.protocol import Limits, Stream, Transport

LOGIN_ENDS_S = 600.0
"""Seconds after which a login that keeps printing without running our command is given up."""
LAST_WORDS_S = 5.0
"""Seconds to wait for what a host sent before it stopped reading."""
MAX_PAYLOAD = 8 << 20


class Link:
    """An open conversation with the agent of one host. Use `call`; close it when done."""

    def __init__(self, stream: Stream, *, host: str, limits: Limits) -> None:
        self.host = host
        self.limits = limits
        self.hello: dict[str, Any] = {}
        self._stream = stream
        self._calls: dict[int, Call] = {}
        self._lowest, self._issued = 1, 0  # the numbers that calls have got
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
        """What the login printed before the agent's first byte."""
        self.answered_s = 0.0
        """From the exec to the agent's first byte: login shell, Python, half a round trip each way."""
        self._asked, self._answered = 0, threading.Event()
        self._delivering = False  # what the host says waits for somebody here
        self._reader: threading.Thread | None = None

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
        asking: Callable[[], None] = lambda: None,
        **bounds: float,
    ) -> Link:
        """Connects, starts the agent and sends its first `request`, if there is one (its call is then `first`).

        `payload`: values that must not show in the host's process list (environment, secrets); they follow on stdin.
        `ahead`: frames (head, body) of the request's stream that follow at once, within its window.
        `agent_too`: send the agent without being asked, so that a host without it loses nothing that follows.
        `asking`: called just before the host can receive the request.
        `bounds`: limits that replace the transport's.
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
        asking()
        link = cls(
            transport.open(build_command(word)), host=transport.description, limits=transport.limits._replace(**bounds)
        )
        if request is not None:
            link._calls[0], link._lowest = Call(link, 0), 0
        link._payload = (_payload_frames(payload) if payload is not None else b"") + _stream_frames(ahead)
        link._agent_sent = agent_too
        # before the first bytes: a login that does not read them is given up too
        threading.Thread(target=link._keep_alive, name="link-keepalive", daemon=True).start()
        if first := (_agent_frames() if agent_too else b"") + link._payload:
            # all of it before the reader starts: see _send_agent. A host that stops reading reported why, or is gone
            with suppress(LostConnection):
                link._stream.write(first)
        link._reader = threading.Thread(target=link._read, args=(nonce,), name="link-reader", daemon=True)
        link._reader.start()
        return link

    @property
    def first(self) -> Call:
        """The call of the request that was given to `open`."""
        return self._calls[0]

    def wait_ready(self) -> None:
        """Waits until the agent answers, or the connection is lost."""
        self._ready.wait()

    def call(self, op: str, **params: Any) -> Call:
        """Sends a request once the agent is there; the returned call gives its events and its answer."""
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
        """Seconds until the agent answers an empty request. Raises LostConnection if it does not."""
        self._ready.wait()
        self._asked += 2  # not the number of a keep-alive
        self._answered.clear()
        begun = time.monotonic()
        self.send({"ping": self._asked})
        if not self._answered.wait(self.limits.dead_after_s):
            raise self._lost or LostConnection(f"{self.host} has not answered for {self.limits.dead_after_s:g} s")
        return time.monotonic() - begun

    @property
    def lost(self) -> bool:
        """Whether the connection broke before `close`."""
        return self._lost is not None and not self._closed

    @property
    def loss(self) -> FerryError | None:
        """Why no request is possible any more, after `close` too; None while it is."""
        return self._lost

    def close(self) -> None:
        """Ends the conversation and the agent; the jobs keep running."""
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
        try:
            with self._write_lock:
                self._stream.write(data)
        except LostConnection as error:
            # a host that stops reading may have reported why, and the reader will soon get to it
            if self._lost is None and self._reader is not None and self._reader is not threading.current_thread():
                self._reader.join(LAST_WORDS_S)
            raise self._lost or error from None

    def _read(self, nonce: str) -> None:
        try:
            first = self._find_nonce(nonce.encode("ascii"))
            self.answered_s = time.monotonic() - self.opened_at
            self._greeted.set()
            self._heard = time.monotonic()
            reader = io.BufferedReader(_Raw(self._stream, first), 1 << 16)
            while (frame := frames.read_frame(reader)) is not None:
                self._delivering = True
                self._dispatch(frame)
                self._heard, self._delivering = time.monotonic(), False
            self._fail(self._end())
        except frames.CutError as error:
            self._fail(LostConnection(f"{self.host} broke off: {error}"))
        except FerryError as error:
            self._fail(error)
        except Exception as error:  # whatever a host sends, who waits for an answer must hear of it
            self._fail(self.not_understood(error))

    def _end(self) -> FerryError:
        """Why the agent's output has ended in order, although this side did not close it."""
        if not self._closed and self._stream.exit_status(1.0) == 128 + signal.SIGVTALRM:
            hint = "a pattern without nested repetition: a+$ for (a+)+$"
            return UsageError(f"{self.host} gave up the search: this --grep takes it too long", hint=hint)
        return LostConnection(f"{self.host} closed the connection")

    def not_understood(self, error: Exception) -> HostError:
        """The error for bytes that our agent never sends; trying again would not help."""
        words = error if isinstance(error, (ProtocolError, InvalidData)) else repr(error)
        return HostError(f"{self.host} sent what is not understood: {words}")

    def _dispatch(self, frame: Frame) -> None:
        head, control = frame.head, frame.control
        if control.id is not None:
            with self._lock:
                call = self._calls.get(control.id)
                issued = self._issued
            if call is not None:
                call.deliver(frame)
            elif not self._lowest <= control.id <= issued:
                raise ProtocolError("an answer to what was not asked")
        elif "hello" in head:
            self.hello = from_json(head["hello"], dict[str, Any])
            self._ready.set()
        elif control.pong is not None:
            if control.pong == self._asked:
                self._answered.set()
        elif control.need == "agent":
            if self._agent_sent:
                return
            self._agent_sent = True
            # from here on the host reads only the agent; in a separate thread, because this one must keep reading
            threading.Thread(target=self._send_agent, daemon=True).start()
        elif "refused" in head:
            raise error_of(head["refused"])
        else:  # it may have been an answer, for which somebody would wait for ever
            raise ProtocolError(f"a frame says nothing: {str(head)[:60]}")

    def _send_agent(self) -> None:
        try:
            # what was sent before went to a host without an agent, which ignored it
            self._write(_agent_frames() + self._payload)
        except FerryError as error:
            self._fail(error)

    def _keep_alive(self) -> None:
        self._await_first_word()
        limits = self.limits
        while self._lost is None:
            time.sleep(limits.ping_every_s)
            if time.monotonic() - self._heard > limits.dead_after_s and not self._delivering:
                self._fail(LostConnection(f"{self.host} has not answered for {limits.dead_after_s:g} s"))
                self._stream.close()
                return
            # in a separate thread: with a dead network even a ping may block
            threading.Thread(target=self._ping, name="link-ping", daemon=True).start()

    def _await_first_word(self) -> None:
        """Gives up a login that prints nothing for too long. Nothing of ours runs there then: the agent sends its first
        byte before it does anything, and ends if it cannot."""
        limit_s, complained = self.limits.login_s, 0
        while not self._greeted.wait(max(0.0, self._heard + limit_s - time.monotonic())):
            said = self._stream.stderr_text()
            if len(said) > complained:
                self._heard, complained = time.monotonic(), len(said)
            if time.monotonic() < min(self._heard + limit_s, self.opened_at + LOGIN_ENDS_S):
                continue
            from deployer.transport.ssh.explain import explain_silent_login

            self._fail(explain_silent_login(said, self.noise, host=self.host, silent_s=limit_s))
            self._stream.close()

    def _find_nonce(self, nonce: bytes) -> bytes:
        """Reads up to the nonce, at most MAX_NOISE bytes. Returns what was read after it."""
        while nonce not in self.noise:
            data = self._stream.read(1 << 15)
            if not data:
                from deployer.transport.ssh.explain import explain_no_answer

                status = self._stream.exit_status(2.0)  # first: once it has ended, its last words are waited for
                raise explain_no_answer(self._stream.stderr_text(), self.noise, status)
            self.noise += data
            self._heard = time.monotonic()
            if len(self.noise) > frames.MAX_NOISE:
                raise HostError(
                    f"the host's login prints more than {frames.MAX_NOISE >> 10} KiB before it runs a command",
                    hint="make its shell start-up files silent for sessions without a terminal",
                )
        self.noise, _, rest = self.noise.partition(nonce)
        return rest

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


def _payload_frames(payload: dict[str, Any]) -> bytes:
    data = json.dumps(payload).encode("ascii")
    if len(data) > MAX_PAYLOAD:
        raise UsageError(f"the environment and arguments of the job are {len(data) >> 20} MB, at most 8 MB are allowed")
    return _stream_frames([({}, part) for part in _cut(data)])


def _stream_frames(parts: Sequence[tuple[dict[str, Any], bytes]]) -> bytes:
    """The frames of the first call's stream, with its end."""
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
    """A transport's stream as a raw file, so that io.BufferedReader can read it. `first`: bytes that were already read
    from it."""

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
