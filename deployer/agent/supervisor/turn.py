"""A supervisor's turns of waiting, whatever it does meanwhile: prepare, watch, wait for GPUs or for the next attempt.

Stdlib only, Python 3.8, Linux.
"""

from typing import TYPE_CHECKING, Callable, List, Optional, Protocol, Set

from ..host.processes import Process
from ..job.stop import StopState
from .children import Children
from .status_file import StatusFile, say

if TYPE_CHECKING:
    from ..job.ending import Ending
    from ..unattended.event import Name

Hook = Callable[[], None]
"""What is looked after between two turns: called every POLL_S or sooner, quick, and does no more than is due."""


class Tell(Protocol):
    """Tells whom --notify names, if anybody, of an event, and how it ended. It waits for nothing."""

    def __call__(self, name: "Name", ending: "Optional[Ending]" = None) -> None: ...


class Stopped(Exception):
    """The job was asked to stop before it had started."""


class Turn:
    """At each turn children are reaped, a TERM to the supervisor asks its job to stop, and the status stays as it was
    written."""

    def __init__(self, status: StatusFile) -> None:
        self.job = status.job
        self.status = status
        self.children = Children()
        self.stop_state = StopState(self.job)
        self.hooks: List[Hook] = []
        self.tell: Optional[Tell] = None
        self.apart: Set[Process] = set()
        """Children of the supervisor that are none of the job's."""

    def wait(self) -> None:
        if self.children.wait():
            self.ask_to_stop()
        self.status.keep()
        for hook in self.hooks:
            hook()

    def ask_to_stop(self, reason: str = "") -> None:
        """Requests a stop on behalf of the supervisor."""
        error = self.stop_state.ask(reason)
        if error is not None:
            say("cannot write %s: %s" % (self.job.stop, error.strerror))

    def check(self) -> None:
        """Stopped once a stop was asked for."""
        if self.stop_state.read() is not None:
            raise Stopped
