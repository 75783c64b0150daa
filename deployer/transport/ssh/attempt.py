"""One attempt to connect: its deadline, its questions to a person, and retries if a server was too busy."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from deployer.errors import ConnectError

T = TypeVar("T")

KEEP_TRYING_S = 20.0
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 4.0

AT_TERMINAL = threading.Lock()
"""Held while a person is asked, so that two hosts do not ask at the same time."""

_unasked = 0  # number of connections being made without asking the person
_unasked_lock = threading.Lock()


@contextmanager
def nobody_to_ask() -> Iterator[None]:
    """Asks no questions inside this context: for connections that are optional."""
    global _unasked
    with _unasked_lock:
        _unasked += 1
    try:
        yield
    finally:
        with _unasked_lock:
            _unasked -= 1


def has_terminal() -> bool:
    """Whether a person can be asked: stdin and stderr are terminals."""
    return not _unasked and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


class Questions:
    """Lets a background thread ask questions through the thread that waits for it. So no prompt appears in the middle
    of other output, and Ctrl-C at a prompt ends the program as usual."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()

    def ask(self, question: Callable[[], T]) -> T:
        """For the background thread: runs `question` in the waiting thread and returns its result or raises its
        error."""
        done = threading.Event()
        answer: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                answer.append(question())
            except BaseException as error:
                failure.append(error)
                raise
            finally:
                done.set()

        self._queue.put(run)
        done.wait()
        if failure:
            raise failure[0]
        return answer[0]

    def finish(self) -> None:
        """For the background thread: announces that there are no more questions."""
        self._queue.put(None)

    def answer_until_finished(self) -> None:
        """For the waiting thread: answers questions until the background thread has finished."""
        while (question := self._queue.get()) is not None:
            with AT_TERMINAL:
                question()


class Attempt:
    """Work in the background that may ask the person. `finish` raises its error."""

    def __init__(self, run: Callable[[Questions], Any]) -> None:
        self._questions = Questions()
        self._failure: BaseException | None = None
        self._run = run
        threading.Thread(target=self._work, name="ssh-connect", daemon=True).start()

    def finish(self) -> None:
        """Waits, answers questions at the terminal, and raises the error of the background work."""
        self._questions.answer_until_finished()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._run(self._questions)
        except BaseException as error:
            self._failure = error
        finally:
            self._questions.finish()


# --- time allowed -----------------------------------------------------------------------------------------------------


class Ask(Protocol):
    """Runs a question in the thread that may ask the person, and returns the answer."""

    def __call__(self, question: Callable[[], T], /) -> T: ...


class Deadline:
    """A time limit from now for work that needs no person; the time for questions to a person does not count."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; not less than 0."""
        return max(0.0, self._end - time.monotonic())

    def pausing(self, ask: Ask) -> Ask:
        """`ask`, with the clock stopped during each question."""

        def asked(question: Callable[[], T], /) -> T:
            begun = time.monotonic()
            try:
                return ask(question)
            finally:
                self._end += time.monotonic() - begun

        return asked


# --- another attempt --------------------------------------------------------------------------------------------------


class HandshakeCut(ConnectError):
    """The server hung up during the handshake; it may have too many connections at the moment."""


def retry_cuts(connect: Callable[[], T], *, keep_trying_s: float = KEEP_TRYING_S) -> T:
    """The result of `connect`; calls it again after a HandshakeCut, for up to `keep_trying_s`.

    A server at its MaxStartups drops connections at random. The waits double and are random, so that clients which were
    dropped together do not return together.
    """
    deadline = time.monotonic() + keep_trying_s
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return connect()
        except HandshakeCut:
            if time.monotonic() + wait_s > deadline:
                raise
            from random import uniform  # few connections need it

            time.sleep(wait_s * uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
