"""The agent's side of one conversation over a pair of byte streams: reads frames in a separate thread and starts the
requests.

A request opens a stream named by its `id`; frames with this ID then flow both ways until the final `ok` or `error`.
Bodies count against the stream's window, and each side grants what it has consumed, so no stream can fill the pipe.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
import os
import queue
import select
import threading
import time
from typing import Any, BinaryIO, Callable, Dict, Iterator, Mapping, Optional, Tuple, Type, TypeVar

from ..host.errors import AgentError
from ..host.typed import InvalidData, from_json, load_json
from . import frames
from .frames import Control, Frame, ProtocolError, Window

IDLE_S = 50.0
"""Seconds after the client's last frame until the agent ends (the client pings every few seconds). With END_S below, a
client that disappeared has left nothing behind after a minute."""
SEND_TIMEOUT_S = 60.0
MAX_CALLS = 32
END_S = 5.0
"""Seconds for requests to undo what they had begun, once the client is gone."""

MAX_PAYLOAD = 64 << 20
T = TypeVar("T")

Handler = Callable[["Call"], Optional[Mapping[str, Any]]]
"""Answers a request: with events and data, and at its end with its return value."""


class Sender:
    """Writes whole frames to a file descriptor, one at a time, each with a deadline."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)  # a blocking write could outlast every deadline
        self._fd = fd
        self._lock = threading.Lock()
        self._is_cut = False

    def send(self, head: Dict[str, Any], body: bytes = b"") -> None:
        self.write(frames.encode(head, body))

    def write(self, data: bytes) -> None:
        """Writes data. Raises ProtocolError or OSError if that fails, and each time after that: a part of it may have
        been written."""
        deadline = time.monotonic() + SEND_TIMEOUT_S
        with self._lock:
            if self._is_cut:
                raise ProtocolError("the connection broke off before")
            self._is_cut = True
            self._write(memoryview(data), deadline)
            self._is_cut = False

    def _write(self, view: memoryview, deadline: float) -> None:
        while view:
            if not select.select([], [self._fd], [], max(0.0, deadline - time.monotonic()))[1]:
                raise ProtocolError("the client took no data for %g s" % SEND_TIMEOUT_S)
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                pass  # less room than select promised: wait again


class Call:
    """One request of the client and its stream. The final answer must be small; use `send_event` for a large one."""

    def __init__(self, head: Dict[str, Any], sender: Sender) -> None:
        self.id, self.op, self._has_payload = _control(head)
        self._head = head
        self.cancelled = threading.Event()  # nobody waits for the answer any more
        self.revoked = False  # the client itself said so; it is not just gone
        self._sender = sender
        self._inbox = queue.Queue()  # type: queue.Queue[Optional[Frame]]  # bounded by the window that we grant
        self._window = Window()

    # --- from the client -----------------------------------------------------------------------------------------

    def deliver(self, frame: Frame) -> None:
        if frame.control.grant is not None:
            self._window.grant(frame.control.grant)
        elif frame.control.cancel:
            self.revoked = True
            self.close()
        else:
            self._inbox.put(frame)

    def close(self) -> None:
        self.cancelled.set()
        self._window.close()
        self._inbox.put(None)

    def receive(self) -> Iterator[Frame]:
        """Frames of this stream up to the client's `end`; grants each body when the caller takes the next frame."""
        while True:
            frame = self._inbox.get()
            if frame is None:
                raise ProtocolError("the client cancelled the request")
            if frame.control.end:
                return
            yield frame
            if frame.body:
                self._sender.send({"id": self.id, "grant": len(frame.body)})

    def read(self, kind: Type[T]) -> T:
        """The request's parameters, including those that follow as payload (environment values, secrets). Raises
        AgentError if the parameters do not have this type."""
        try:
            asked = self._head
            if self._has_payload:
                payload = load_json(b"".join(frame.body for frame in self.receive()), most=MAX_PAYLOAD)
                asked = dict(asked, **from_json(payload, Dict[str, Any]))
            return from_json(asked, kind)
        except InvalidData as damage:
            raise AgentError("usage", "the request is not understood: %s" % damage) from None

    # --- to the client -------------------------------------------------------------------------------------------

    def send_data(self, data: bytes, *, within_s: Optional[float] = SEND_TIMEOUT_S, **head: Any) -> None:
        """Sends any number of bytes, in frames that the window allows. `within_s`: a client that takes nothing for this
        long counts as gone; None: wait as long as it is connected."""
        for start in range(0, len(data), frames.MAX_BODY):
            part = data[start : start + frames.MAX_BODY]
            at = {"offset": head["offset"] + start} if "offset" in head else {}
            self._window.take(len(part), timeout_s=within_s)
            self._sender.send({**head, **at, "id": self.id, "data": True}, part)

    def send_event(self, name: str, payload: Any = None) -> None:
        """Sends an event with a JSON value of any size: its bytes as data frames tagged `json`, then the name."""
        text = json.dumps(payload, separators=(",", ":")).encode("ascii")
        if len(text) < 8192:
            self._sender.send({"id": self.id, "event": name, "value": payload})
            return
        self.send_data(text, json=True)
        self._sender.send({"id": self.id, "event": name})


def _control(head: Dict[str, Any]) -> Tuple[int, str, bool]:
    """A request's stream, its name, and whether parameters follow. Raises ProtocolError."""
    try:
        control = from_json(head, Control)
    except InvalidData as damage:
        raise ProtocolError("a request is not understood: %s" % damage) from None
    return control.id or 0, control.op or "", control.payload


class Conversation:
    """Reads requests until the client is gone, and handles each in a separate thread."""

    def __init__(self, stdin: BinaryIO, sender: Sender, handlers: Dict[str, Handler]) -> None:
        self._stdin = stdin
        self._sender = sender
        self._handlers = handlers
        self._calls = {}  # type: Dict[int, Call]
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self.ended = threading.Event()  # the client is gone

    def run(self, first: Optional[Dict[str, Any]]) -> None:
        """Returns when the client has closed its end, or has sent nothing for IDLE_S."""
        if first is not None:
            self._start(first)  # before the reader: what it reads may belong to this call
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        while not self.ended.wait(1.0) and time.monotonic() - self._last < IDLE_S:
            pass
        self.ended.set()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.close()
        deadline = time.monotonic() + END_S
        while self._calls and time.monotonic() < deadline:
            time.sleep(0.01)

    def _read(self) -> None:
        try:
            while True:
                frame = frames.read_frame(self._stdin)
                if frame is None:
                    break
                self._last = time.monotonic()
                self._dispatch(frame)
        except (ProtocolError, OSError, ValueError):
            pass  # a client that cannot be understood is a client that is gone
        self.ended.set()

    def _dispatch(self, frame: Frame) -> None:
        control = frame.control
        if control.ping is not None:
            self._sender.send({"pong": control.ping})
            return
        if control.op is not None:
            self._start(frame.head)
            return
        with self._lock:
            call = self._calls.get(-1 if control.id is None else control.id)
        if call is not None:
            call.deliver(frame)

    def _start(self, head: Dict[str, Any]) -> None:
        call = Call(head, self._sender)
        with self._lock:
            if len(self._calls) >= MAX_CALLS:
                self._sender.send({"id": call.id, "error": _error("host", "too many requests at once", "")})
                return
            self._calls[call.id] = call
        threading.Thread(target=self._handle, args=(call,), daemon=True).start()

    def _handle(self, call: Call) -> None:
        try:
            reply = {"ok": self._answer(call)}
        except AgentError as error:
            reply = {"error": _error(error.kind, error.message, error.hint)}
        except ProtocolError as error:
            reply = {"error": _error("lost", str(error), "")}
        except OSError as error:
            reply = {"error": _error("host", _os_error_text(error), "")}
        except Exception:
            import traceback  # a launch starts sooner without it

            reply = {"error": _error("bug", "the agent failed:\n" + traceback.format_exc(), "")}
        with self._lock:
            self._calls.pop(call.id, None)
        try:
            self._sender.send(dict(reply, id=call.id))
        except (ProtocolError, OSError):
            self.ended.set()  # who waits for the answer asks again in another connection

    def _answer(self, call: Call) -> Mapping[str, Any]:
        handler = self._handlers.get(call.op)
        if handler is None:
            raise AgentError("bug", "unknown request %.60r" % call.op)
        return handler(call) or {}


def _error(kind: str, message: str, hint: str) -> Dict[str, str]:
    # it must fit into a frame, at up to 12 bytes a character; of a long trace the end is most useful
    return {"kind": kind, "message": message[-4000:], "hint": hint[:500]}


def _os_error_text(error: OSError) -> str:
    where = " %s" % error.filename if error.filename else ""
    return "%s%s" % (error.strerror or error, where)
