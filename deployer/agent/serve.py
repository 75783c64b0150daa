"""The agent: one handler for each request of a client.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import sys
import threading
from typing import Any, BinaryIO, Callable, Dict, Mapping, Optional

from .host.layout import AGENT_DIR, Root
from .host.locks import hold
from .wire import frames
from .wire.conversation import Conversation, Handler, Sender

BYTECODE_ROOM_BYTES = 64 << 20
ADOPT_AFTER_S = 1.0
"""Seconds to wait before adopting jobs: a short request of the client has its answer by then."""
ADOPTION_S = 15.0
"""Maximum seconds for other jobs after the client is gone."""


HANDLERS = {
    "launch": "requests.launch:launch",
    "slots": "requests.launch:slots",
    "plan": "requests.resume:show_plan",
    "original": "requests.repeat:original",
    "resume": "requests.resume:resume",
    "follow": "requests.follow:follow",
    "ps": "requests.jobs:ps",
    "status": "requests.jobs:status",
    "glance": "requests.glance:glance",
    "stop": "requests.stop:stop",
    "files": "requests.files.fetch:files",
    "fetch": "requests.files.fetch:fetch",
    "fetched": "requests.files.fetched:fetched",
    "push": "requests.files.push:push",
    "last_lines": "requests.follow:last_lines",
    "exec": "requests.execute:execute",
    "enter": "requests.beside:enter",
    "relay": "requests.relay:relay",
    "doctor": "doctor.run:doctor",
    "gc": "gc.collect:gc",
    "gpus": "gpus.claim:report",
}
"""Request -> module below this package and function."""


def main(first: Dict[str, Any], stdin: BinaryIO) -> None:
    """Sends the nonce, then serves requests from `stdin` on file descriptor 1 until the client is gone."""
    root = Root(first["root"])
    hold(os.path.dirname(AGENT_DIR))  # modules are imported when first needed
    sender = Sender(_take_stdout())
    hello = {"hello": {"python": "%d.%d.%d" % sys.version_info[:3], "root": root.path, "pid": os.getpid()}}
    sender.write(first["nonce"].encode("ascii") + frames.encode(hello))
    conversation = Conversation(stdin, sender, handlers(root))
    adoption = _adopt_soon(root, conversation.ended)
    conversation.run(first.get("request"))
    adoption.join(ADOPTION_S)
    os._exit(0)  # threads may still wait for a client that is gone


def _adopt_soon(root: Root, client_gone: threading.Event) -> threading.Thread:
    """Adopts jobs whose supervisor was killed, at the same time as the client's requests."""

    def look_after() -> None:
        client_gone.wait(ADOPT_AFTER_S)
        from .requests.jobs import adopt_all

        adopt_all(root, within_s=ADOPTION_S)

    thread = threading.Thread(target=look_after, name="adopting", daemon=True)
    thread.start()
    return thread


def _take_stdout() -> int:
    # other output to 1 or 2 must not get between the frames
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    return out


def _write_bytecode_where_there_is_room(root: Root) -> None:
    """Turns bytecode off if the disk is nearly full: Python would write a part of a module's bytecode and use it from
    then on, so the agent would not work any more, not even to free space."""
    try:
        disk = os.statvfs(root.path)
    except OSError:
        return
    sys.dont_write_bytecode = disk.f_bavail * disk.f_frsize < BYTECODE_ROOM_BYTES


def handlers(root: Root) -> Dict[str, Handler]:
    """Request name -> handler. A module is imported when a request needs it, so that the usual path starts at once."""

    def ask(place: str) -> Handler:
        def handler(call: Any) -> Optional[Mapping[str, Any]]:
            _write_bytecode_where_there_is_room(root)
            try:
                return load_handler(place)(root, call)
            except OSError as error:
                from .host.disk import fail, is_full  # seldom needed

                if is_full(error):
                    fail(error.filename or root.path, error)
                raise

        return handler

    return {name: ask(place) for name, place in HANDLERS.items()}


def load_handler(place: str) -> Callable[[Root, Any], Optional[Mapping[str, Any]]]:
    """Imports a function named in HANDLERS."""
    from importlib import import_module

    module, name = place.split(":")
    return getattr(import_module("." + module, __package__), name)  # type: ignore[no-any-return]
