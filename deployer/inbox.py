"""Frames that wait for the one who asked for them: few at a time, so that no host fills this machine's memory."""

from __future__ import annotations

import threading
from collections import deque

from deployer.agent.frames import Frame
from deployer.errors import FerryError

MAX_WAITING = 32
"""Frames of one call; a caller that is slower keeps the link's reader waiting, and the host by that."""


class Inbox:
    """A short queue from the thread that reads a link to the one that takes a call's events."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._error: FerryError | None = None
        self._changed = threading.Condition()

    def put(self, frame: Frame) -> None:
        """Waits for room. What comes after the end is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) < MAX_WAITING or self._error is not None)
            if self._error is None:
                self._frames.append(frame)
            self._changed.notify_all()

    def end(self, error: FerryError) -> None:
        """Nothing more will come; who takes hears of the error after the frames that are there."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def get(self) -> Frame:
        """The next frame; waits for it. Raises the error that ended the link."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._error is not None)
            if not self._frames:
                assert self._error is not None
                raise self._error
            self._changed.notify_all()
            return self._frames.popleft()

    def __len__(self) -> int:
        return len(self._frames)
