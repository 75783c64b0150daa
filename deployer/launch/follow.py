"""Follows a job's log to the job's end, also over connections that break."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployer.agent.job.status import Status
from deployer.agent.job.views import Ack, JobView
from deployer.agent.logs.identity import Change
from deployer.connection.call import Call
from deployer.connection.host import BACKOFF_S, GIVE_UP_AFTER_S
from deployer.connection.link import Link
from deployer.errors import ConnectError, FerryError, HostError, LostConnection, UnknownJob
from deployer.launch.logview import LogView

Connect = Callable[..., Link]
"""Opens a link: `connect(request=…, payload=…)`."""


class Watcher:
    """Callbacks of a launch and of a followed log; override any of them."""

    def sending(self, sent: int, total: int) -> None:
        """An upload's progress in bytes."""

    def asking(self) -> None:
        """Called just before the host can receive the request: from now on it may start the job."""

    def refused(self) -> None:
        """The host has reported that the last request started nothing."""

    def started(self, ack: Ack) -> None:
        """The host has acknowledged the job; `ack.stopping`: it also stops the job, as requested."""

    def state(self, status: Status) -> None:
        """Called with the new status whenever the host sends one."""

    def heard(self) -> None:
        """The host has sent something about the job."""

    def reconnecting(self, error: FerryError, wait_s: float) -> None:
        """The connection broke; the next try follows after `wait_s`."""

    def left_out(self, file: str, size_bytes: int, *, limit: int | None) -> None:
        """A part of a log is not shown: dropped by its size limit, or (without one) the rest of an endless line."""

    def changed(self, change: Change) -> None:
        """A log was renamed, removed, truncated or replaced on the host."""


@dataclass
class _Contact:
    """A follower's contact with the host."""

    give_up_s: float
    known: bool
    """The job is known to exist: from now on only the host can report its end."""
    begun: bool = False
    """The log has begun: the next request names offsets."""
    heard: bool = False
    """Something has arrived over the current connection."""
    lost_at: float | None = None
    tries: int = 0

    def hear(self) -> None:
        self.known = self.begun = self.heard = True
        self.lost_at, self.tries = None, 0

    def lose(self) -> float | None:
        """Seconds to the next try; None if it is time to give up."""
        now = time.monotonic()
        self.heard = False
        self.lost_at = self.lost_at if self.lost_at is not None else now
        left_s = self.lost_at + self.give_up_s - now
        wait_s = BACKOFF_S[min(self.tries, len(BACKOFF_S) - 1)]
        self.tries += 1
        return min(wait_s, left_s) if left_s > 0 else None


def follow_to_end(
    connect: Connect,
    job_id: str,
    *,
    view: LogView,
    watcher: Watcher,
    opened: tuple[Link, Call] | None = None,
    request: dict[str, Any] | None = None,
    known: bool = False,
    give_up_s: float = GIVE_UP_AFTER_S,
) -> Status:
    """Follows a job's log to the end of the job and returns its final status; reconnects if a connection breaks.

    `opened`: the conversation that started the job. Without it, a connection that fails at once is not tried again
    unless the job is `known` to exist. Raises LostConnection (exit code 75) if the host was not reached for `give_up_s`
    (the job runs on), and HostError (125) if the host reports that the job is gone.
    """
    contact = _Contact(give_up_s, known=known or opened is not None, begun=opened is not None)
    link = opened[0] if opened else None
    call = opened[1] if opened else None
    while True:
        try:
            if call is None:
                resume = (
                    {"offsets": view.offsets, "marks": view.marks, "tail": None, "since": None} if contact.begun else {}
                )
                link = connect(request={"op": "follow", "job": job_id, **(request or {}), **resume})
                call = link.first
            return _follow(call, view, watcher, contact)
        except UnknownJob as error:
            if not contact.known:
                raise
            raise HostError(f"{job_id} is lost: {error.message}", hint=error.hint) from error
        except (LostConnection, ConnectError, HostError) as error:
            if not contact.known or (contact.heard and isinstance(error, HostError)):
                raise
            wait_s = contact.lose()
            if wait_s is None:
                raise LostConnection(error.message, where=error.where, hint=error.hint) from error
            watcher.reconnecting(error, wait_s)
        finally:
            view.flush()
            if link is not None:
                link.close()
        link = call = None
        time.sleep(wait_s)


def _follow(call: Call, view: LogView, watcher: Watcher, contact: _Contact) -> Status:
    for name, value, data in call.events():
        contact.hear()
        watcher.heard()
        if name == "status":
            view.finish()
            return call.read(value, JobView, name).status
        _take(call, name, value, data, view=view, watcher=watcher)
        if not call.pending():  # whatever came last: there may be log before it
            view.flush()
    raise LostConnection("the host ended the log without a status")


class _Chunk(NamedTuple):
    """The log file and offset of some data."""

    file: str
    offset: int
    mark: str = ""
    """A mark that identifies the file after a reconnect."""


class _LeftOut(NamedTuple):
    file: str
    size: int
    limit: int | None


def _take(call: Call, name: str, value: Any, data: bytes, *, view: LogView, watcher: Watcher) -> None:
    if name == "data":
        chunk = call.read(value, _Chunk, name)
        view.feed(chunk.file, chunk.offset, data)
        view.marks[chunk.file] = chunk.mark
    elif name == "from":
        view.offsets = call.read(value, dict[str, int], name)
    elif name == "left_out":
        file, size, limit = call.read(value, _LeftOut, name)
        if limit is None:
            view.end_line(file)
        watcher.left_out(file, size, limit=limit)
    elif name == "changed":
        watcher.changed(call.read(value, Change, name))
    elif name == "state":
        watcher.state(call.read(value, Status, name))
