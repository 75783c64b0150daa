"""A job's status.json, written by its supervisor, and the supervisor's own log.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Any, Optional, Tuple

from ..host.files import remove
from ..host.layout import Job
from ..job.status import Status, with_group, write_status

RESERVE_BYTES = 64 << 10
"""Space that is reserved on the disk for the final status: the job's own output may fill the disk."""
LAST_TRIES = 60
"""How often the final status is tried again, once a second, if there is still no space for it."""


class StatusFile:
    """The supervisor's status of the job. It is written again after a full disk, or if another process has changed the
    file. Space is reserved for the final status. `now`: the current values; `unsaved`: whether the file is older."""

    def __init__(self, job: Job, now: Status) -> None:
        self.now = now._replace(job=job.id)
        self.unsaved = False
        self.job = job
        self._written = self._look()

    def note(self, **changes: Any) -> None:
        """Sets values for the next `save`."""
        self.now = self.now._replace(**changes)

    def note_group(self, folder: str, **changes: Any) -> None:
        """The same for one group of the job's processes."""
        self.now = with_group(self.now, folder, **changes)

    def save(self, **changes: Any) -> None:
        """Writes the status. Ignores a full disk, which must not end the job: `keep` and `save_last` try again."""
        self.note(**changes)
        try:
            write_status(self.job, self.now)
        except OSError as e:
            if not self.unsaved:
                say("cannot write %s: %s" % (self.job.status, e.strerror))
            self.unsaved = True
        else:
            self.unsaved = False
        self._written = self._look()

    def keep(self) -> None:
        """Writes the status again if the last write failed or the file was changed."""
        if self.unsaved or self._look() != self._written:
            self.save()

    def _look(self) -> Optional[Tuple[int, ...]]:
        try:
            found = os.stat(self.job.status)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def reserve(self) -> None:
        """Reserves space on the disk for the final status."""
        try:
            with open(self.job.reserve, "wb") as f:
                f.write(os.urandom(RESERVE_BYTES))
        except OSError:
            pass  # then the final status waits for room

    def save_last(self) -> None:
        """Writes the final status into the reserved space."""
        remove(self.job.reserve)
        self.save()
        for _ in range(LAST_TRIES):
            if not self.unsaved or not os.path.isdir(self.job.path):
                return
            time.sleep(1)
            self.save()


def say(text: str) -> None:
    """Writes to the supervisor's log; a full disk must not end the supervisor."""
    try:
        os.write(2, (text + "\n").encode("utf-8", "replace"))
    except OSError:
        pass
