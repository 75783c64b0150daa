"""An answer that could not be sent ends its conversation: nobody waits for it, and no frame follows half of one."""

from __future__ import annotations

import os
import threading
import time

import pytest

from deployer.agent.wire.conversation import Call, Conversation, Sender
from deployer.agent.wire.frames import ProtocolError, encode
from tests.support.limits import HANG_S


def test_frame_that_broke_off_is_the_last_one() -> None:
    reading, writing = os.pipe()
    sender = Sender(writing)
    sender.send({"id": 0, "event": "whole"})
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        sender.send({"id": 0, "event": "lost"})
    with pytest.raises(ProtocolError, match="the connection broke off before"):
        sender.send({"id": 0, "event": "later"})
    os.close(writing)


def test_conversation_ends_with_the_answer_that_nobody_takes() -> None:
    reading, writing = os.pipe()
    requests, ask = os.pipe()  # the client sends nothing more, and keeps its end open
    os.close(reading)
    called = threading.Event()

    def answer(call: Call) -> dict[str, bool]:
        called.set()
        return {"done": True}

    with os.fdopen(requests, "rb") as stdin:
        conversation = Conversation(stdin, Sender(writing), {"it": answer})
        began = time.monotonic()
        os.write(ask, encode({"id": 1, "op": "it"}))
        thread = threading.Thread(target=conversation.run, args=(None,), daemon=True)
        thread.start()
        thread.join(HANG_S)
        assert called.is_set() and conversation.ended.is_set() and not thread.is_alive()
        assert time.monotonic() - began < 40, "sooner than a silent client is given up"
        os.close(ask)
    os.close(writing)
