"""Trying again where a server has too many connections at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from deployer.errors import ConnectError

T = TypeVar("T")

KEEP_TRYING_S = 20.0
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 4.0


class HandshakeCut(ConnectError):
    """The server hung up during the handshake: it may have too many connections just now."""


def retry_cuts(connect: Callable[[], T], *, keep_trying_s: float = KEEP_TRYING_S) -> T:
    """What `connect` returns, called again after a HandshakeCut for so long.

    A server at its MaxStartups drops connections at random; the waits double and are random, so that clients which
    were dropped together do not come back together.
    """
    deadline = time.monotonic() + keep_trying_s
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return connect()
        except HandshakeCut:
            if time.monotonic() + wait_s > deadline:
                raise
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
