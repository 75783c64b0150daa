"""A request to stop: a file in the job's folder. The supervisor carries it out and the trainer polls it.

Stdlib only, Python 3.8, Linux.
"""

import errno
import os
import time
from typing import NamedTuple, Optional

from ..host.files import write_json
from ..host.layout import Job
from ..host.typed import InvalidData, read_typed

DEFAULT_GRACE_S = 120.0


class StopRequest(NamedTuple):
    """`_mono` times are of this boot's monotonic clock, in seconds: the wall clock may jump while a job stops."""

    grace_s: float
    requested_at: float  # Unix time of the first request, for the eye
    requested_mono: float
    deadline_mono: float  # a later request may only bring it forward
    reason: str = ""  # why the supervisor itself asks; empty for a request from outside
    force: bool = False  # KILL at once


def new_stop(grace_s: float, *, reason: str = "", force: bool = False) -> StopRequest:
    """A request that begins now."""
    now = time.monotonic()
    return StopRequest(grace_s, time.time(), now, now + grace_s, reason, force)


def request_stop(job: Job, grace_s: float = DEFAULT_GRACE_S, *, reason: str = "", force: bool = False) -> StopRequest:
    """Requests a stop within `grace_s` seconds, or with `force` at once. It can be repeated: only a shorter time, or
    force, replaces the first request."""
    wanted = new_stop(0.0 if force else grace_s, reason=reason, force=force)
    before = read_stop(job)
    if before is not None:
        if before.force or (wanted.deadline_mono >= before.deadline_mono and not force):
            return before
        first = {key: getattr(before, key) for key in ("requested_at", "reason")}
        wanted = wanted._replace(**first, requested_mono=min(before.requested_mono, wanted.requested_mono))
    os.makedirs(job.control, mode=0o700, exist_ok=True)
    try:
        write_json(job.stop, wanted._asdict())
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        os.truncate(job.reserve, os.path.getsize(job.reserve) // 2)  # the rest stays for the final status
        write_json(job.stop, wanted._asdict())
    return wanted


def read_stop(job: Job) -> Optional[StopRequest]:
    """The stop request; None without one. A file that a user created by hand requests the default grace period."""
    try:
        touched_at = os.stat(job.stop).st_mtime
    except OSError:
        return None
    try:
        return read_typed(job.stop, StopRequest)
    except (OSError, InvalidData):
        mono = time.monotonic() - max(0.0, time.time() - touched_at)
        return StopRequest(DEFAULT_GRACE_S, touched_at, mono, mono + DEFAULT_GRACE_S)


class StopState:
    """The stop requests that a supervisor has received: by a file in the job's folder, or by a signal while this file
    cannot be written. A request stays valid, whatever happens to the file."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._request: Optional[StopRequest] = None

    def read(self) -> Optional[StopRequest]:
        self._request = read_stop(self._job) or self._request
        return self._request

    def ask(self, reason: str = "") -> Optional[OSError]:
        """The supervisor's own request to stop, unless there is one already. Returns the error if the request file
        could not be written."""
        if self.read() is not None:
            return None
        self._request = new_stop(DEFAULT_GRACE_S, reason=reason)
        try:
            os.stat(self._job.path)  # a folder that was moved away must not appear again
            self._request = request_stop(self._job, reason=reason)
        except OSError as error:
            return error
        return None

    def is_flagged(self) -> bool:
        """Whether the request file exists, so that the ranks see it."""
        return os.path.exists(self._job.stop)
