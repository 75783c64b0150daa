"""A job's log followed to the job's end, also over connections that break."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deployer.errors import ConnectError, FerryError, LostConnection
from deployer.link import Call, Link
from deployer.logview import LogView

GIVE_UP_AFTER_S = 600.0
"""A broken connection is tried again for so long; the job runs on meanwhile, and afterwards."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
Connect = Callable[..., Link]
"""Opens a link: `connect(request=…, payload=…)`."""


class Watcher:
    """What a launch tells while it goes on; every method may be overridden."""

    def sending(self, sent: int, total: int) -> None:
        """An upload's progress in bytes."""

    def started(self, ack: dict[str, Any]) -> None:
        """The host has acknowledged the job."""

    def state(self, status: dict[str, Any]) -> None:
        """The job's state has changed."""

    def reconnecting(self, error: FerryError, wait_s: float) -> None:
        """The connection broke and is tried again."""


def follow_to_end(
    connect: Connect,
    job_id: str,
    *,
    view: LogView,
    watcher: Watcher,
    opened: tuple[Link, Call] | None = None,
    request: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Follows a job's log to the end of the job and returns its final status; makes broken connections again.

    LostConnection (exit code 75) when none comes about for GIVE_UP_AFTER_S: the job runs on.
    """
    lost_at: float | None = None
    tries = 0
    while True:
        try:
            if opened is None:
                link = connect(request={"op": "follow", "job": job_id, **(request or {}), **_resume(view)})
                opened = (link, link.first)
            lost_at, tries = None, 0
            return _follow(opened[1], view, watcher)
        except (LostConnection, ConnectError) as error:
            first = opened is None and lost_at is None and not view.offsets
            if opened is not None:
                opened[0].close()
            opened = None
            lost_at = lost_at or time.monotonic()
            if first or time.monotonic() - lost_at > GIVE_UP_AFTER_S:
                raise
            wait_s = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            tries += 1
            watcher.reconnecting(error, wait_s)
            time.sleep(wait_s)
        finally:
            view.flush()


def _resume(view: LogView) -> dict[str, Any]:
    return {"offsets": view.offsets, "tail": None} if view.offsets else {}


def _follow(call: Call, view: LogView, watcher: Watcher) -> dict[str, Any]:
    for name, value, data in call.events():
        if name == "data":
            view.feed(value["file"], value["offset"], data)
            if not call.pending():
                view.flush()
        elif name == "state":
            watcher.state(value)
        elif name == "status":
            view.finish()
            return dict(value)
    raise LostConnection("the host ended the log without a status")
