"""What threads of the world wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.world.linux.kernel import Thread


class Channel:
    """What threads wait for."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[tuple[Thread, int]] = []

    def notify(self) -> None:
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for thread, token in waiters:
                if thread.token == token:
                    thread.wake()
