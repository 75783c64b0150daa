"""The supervisor's wait loop, in every phase: preparing, watching, waiting for GPUs or for the next attempt.

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
"""Work between two waits: called every POLL_S or sooner; must be quick and do only what is needed now."""


class Tell(Protocol):
    """Sends an event to the `--notify` URLs, if there are any. Does not block."""

    def __call__(self, name: "Name", ending: "Optional[Ending]" = None) -> None: ...


class Stopped(Exception):
    """A stop was requested before the job had started."""


class Turn:
    """The supervisor's wait loop. Each `wait` reaps children, turns a SIGTERM into a stop request, rewrites a lost or
    changed status and runs the hooks."""

    def __init__(self, status: StatusFile) -> None:
        self.job = status.job
        self.status = status
        self.children = Children()
        self.stop_state = StopState(self.job)
        self.hooks: List[Hook] = []
        self.tell: Optional[Tell] = None
        self.apart: Set[Process] = set()
        """Children of the supervisor that do not belong to the job."""

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
        """Raises Stopped if a stop was requested."""
        if self.stop_state.read() is not None:
            raise Stopped
