"""Time allowed for what needs no person."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ask(Protocol):
    """Runs a question in the thread that may talk to the person, and returns the answer."""

    def __call__(self, question: Callable[[], T], /) -> T: ...


class Deadline:
    """So many seconds from now, not counting those in which a person is asked something."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; not less than 0."""
        return max(0.0, self._end - time.monotonic())

    def pausing(self, ask: Ask) -> Ask:
        """`ask`, with the clock stopped meanwhile."""

        def asked(question: Callable[[], T], /) -> T:
            begun = time.monotonic()
            try:
                return ask(question)
            finally:
                self._end += time.monotonic() - begun

        return asked
