"""Polls one job in the background: its latest known values, and their age."""

from __future__ import annotations

import threading
import time
from copy import deepcopy

from deployer.agent.gpus.view import GpuLoad
from deployer.agent.host.layout import JOB_ID
from deployer.agent.host.typed import InvalidData, to_json
from deployer.agent.job.status import FINAL
from deployer.agent.job.views import Glance, GlanceRequest, NewMetrics, Row
from deployer.connection.host import BACKOFF_S, Host
from deployer.connection.link import Link
from deployer.curves.metrics import Metrics
from deployer.errors import FerryError

EVERY_S, EVERY_ENDED_S = 2.0, 10.0
KEPT_RECORDS = 4000
"""If more metrics records than this have collected, which takes days, all are requested again, thinned by the host."""
MOST_LOG = 20_000
"""Characters of the log to keep, even if a host sends more."""


class Glancer:
    """A job as its host reports it. `job_id` may be the beginning of an ID until the host has answered."""

    def __init__(self, host: Host, job_id: str) -> None:
        self.host = host
        self.job_id = job_id
        self.row: Row | None = None
        self.gpus: tuple[GpuLoad, ...] = ()
        self.no_gpus = ""
        self.metrics = Metrics()
        self.log = ""
        self.latest: str | None = None
        self.trouble = ""
        """The error, if the host does not answer now."""
        self.heard_at: float | None = None
        """Time of the last answer on the monotonic clock."""
        self.news = 0
        """Counts answers and failures."""
        self._known = GlanceRequest(job_id)
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._due_at = 0.0
        self._failed = 0

    @property
    def silent_s(self) -> float:
        """Seconds since the host's last answer."""
        return 0.0 if self.heard_at is None else time.monotonic() - self.heard_at

    def keep_looking(self) -> None:
        """Polls again in the background if it is time to. Call it often."""
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and time.monotonic() >= self._due_at:
            self._thread = threading.Thread(target=self._look, name=f"top {self.job_id}", daemon=True)
            self._thread.start()

    def look(self, *, whole: bool = False) -> None:
        """Polls once, now. Raises FerryError if the host does not answer."""
        request = {"op": "glance", **to_json(self._known._replace(whole=whole), sparse=True)}
        if self._link is None or self._link.lost:
            self._link = self.host.connect(request=request)
            call = self._link.first
        else:
            call = self._link.call(**request)
        found = call.result("glance", Glance)
        if not JOB_ID.match(found.row.id):  # it is part of commands that people copy
            raise call.link.not_understood(InvalidData(f"is {found.row.id[:60]!r}", place="glance.row.id"))
        self._take(found)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _look(self) -> None:
        try:
            self.look()
        except FerryError as error:
            self.trouble = error.message
            self.close()
            self._due_at = time.monotonic() + max(EVERY_S, BACKOFF_S[min(self._failed, len(BACKOFF_S) - 1)])
            self._failed += 1
        else:
            self.trouble, self._failed = "", 0
            ended = self.row is not None and self.row.state in FINAL
            self._due_at = time.monotonic() + (EVERY_ENDED_S if ended else EVERY_S)
        self.news += 1

    def _take(self, found: Glance) -> None:
        self.job_id, self.row = found.row.id, found.row
        self.gpus, self.no_gpus, self.latest = found.gpus, found.no_gpus, found.latest
        if found.log is not None:
            self.log = found.log[-MOST_LOG:]
        self._add(found.metrics)
        file, to = (found.metrics.file, found.metrics.to) if self.metrics.records < KEPT_RECORDS else ("", 0)
        self._known = GlanceRequest(self.job_id, file, to, found.log_mark)
        self.heard_at = time.monotonic()

    def _add(self, new: NewMetrics) -> None:
        """Adds records to a copy, because the screen reads the metrics at the same time. With KEPT_RECORDS or more, the
        host was asked for all metrics again, so the old ones are dropped, whatever `new.anew` is."""
        metrics = Metrics()
        if not new.anew and self.metrics.records < KEPT_RECORDS:
            metrics.records = self.metrics.records
            metrics.series = deepcopy(self.metrics.series)
        for record in new.records:
            metrics.add(dict(record))
        self.metrics = metrics
