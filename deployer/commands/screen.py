"""What a followed job shows on this terminal, shared by `run` and `logs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from deployer import terminal
from deployer.agent.gpus.view import QueueView
from deployer.agent.host.layout import LogName
from deployer.agent.job.status import FAILED, LOST, PREPARING, RUNNING, STOPPED, State, Status
from deployer.agent.job.views import Ack
from deployer.commands.in_words import attempt_line, failing_rank
from deployer.connection.host import HERE
from deployer.errors import FerryError
from deployer.jobs.registry import JobRecord, note_state, write_record
from deployer.launch.follow import Watcher
from deployer.launch.logview import LogView
from deployer.printable import shown

DETACHED = 75
"""Exit code of a command that stopped following while the job runs on."""


class Screen(Watcher):
    """Tells on stderr how a launch goes."""

    def __init__(self, record: JobRecord, *, tells_attempts: bool = True) -> None:
        self.record = record
        self.beginning = ""
        """What is said of the job once it has started."""
        self.folder: str | None = None
        """The job's folder on the host, once the host has acknowledged the job."""
        self._bars = ExitStack()
        self._update: Callable[[int, int], None] | None = None
        self._waiting = False
        self._heard_at = time.monotonic()
        self._known_state: State = RUNNING
        self._attempt = 1
        self._tells_attempts = tells_attempts
        self._queue: QueueView | None = None

    def sending(self, sent: int, total: int) -> None:
        if self._update is None:
            self._update = self._bars.enter_context(terminal.progress(shown("sent")))
        self._update(sent, total)

    def started(self, ack: Ack) -> None:
        self.close()
        self.folder = ack.path
        self.remember()
        terminal.notice(shown("queued" if ack.queued else "already running" if ack.already else "started"))
        if self.beginning:
            terminal.notice(shown(self.beginning))

    @property
    def acknowledged(self) -> bool:
        return self.folder is not None

    def close(self) -> None:
        """Ends the upload's bar."""
        self._bars.close()

    def remember(self) -> None:
        """Notes the job, so that its id finds it. A disk that takes no note must not end the launch."""
        try:
            write_record(self.record)
        except OSError as error:
            terminal.notice(shown(f"warning: this client keeps no record of {self.record.job_id}: {error}"))

    def state(self, status: Status) -> None:
        # for a `ps` when the host cannot be reached
        note_state(self.record, self.record.ssh or HERE, status.state)
        self._known_state = status.state
        attempt = status.attempt or 1
        if self._tells_attempts and attempt != self._attempt:
            self._attempt = attempt
            terminal.notice(shown(attempt_line(status) or f"attempt {attempt}"))
        queue = status.queue
        if queue is not None and queue != self._queue:
            from deployer.agent.gpus.queue import queue_line

            terminal.notice(shown(f"queued: {queue_line(queue, time.time())}"))
        elif self._queue is not None and queue is None and status.state in (PREPARING, RUNNING):
            terminal.notice(shown("the GPUs are free"))
        self._queue = queue

    def heard(self) -> None:
        self._heard_at = time.monotonic()
        if self._waiting:
            self._waiting = False
            terminal.notice(shown("connected again"))

    def left_out(self, file: str, size_bytes: int, *, limit: int | None) -> None:
        name = LogName.parse(file)
        who = name.writer if name is not None and name.rank is not None else file
        if limit is None:
            what = f"of a longer line only the first {terminal.size(size_bytes)} were searched and are shown"
        else:
            what = f"{terminal.size(size_bytes)} of this log were dropped on the host, --log-max {terminal.size(limit)}"
        terminal.notice(shown(f"[{who}: {what}]"))

    def left_behind(self, *what: str) -> None:
        """Lines for one who stops following: what happened, how the job is, how to come back to it."""
        job_id, me = self.record.job_id, terminal.invoked_as()
        ago = terminal.age(time.monotonic() - self._heard_at)
        when = f"was {self._known_state} {ago} ago" if self._waiting else f"is {self._known_state}"
        terminal.notice(*map(shown, what))
        terminal.notice(shown(f"{job_id} {when}; it goes on without this client"))
        terminal.notice(shown(f"  {me} logs {job_id} -f comes back, {me} stop {job_id} stops it"))

    def reconnecting(self, error: FerryError, wait_s: float) -> None:
        if not self._waiting:
            goes_on = " (the job goes on)" if self.acknowledged else ""
            terminal.notice(shown(f"{error.message}; trying again{goes_on}"))
        self._waiting = True


def log_view(*, bare: bool, raw: bool = False, launcher: bool = False) -> LogView:
    """A view on this process's own stdout and stderr."""
    sys.stdout.flush()
    return LogView(
        sys.stdout.buffer,
        sys.stderr.buffer,
        terminal=sys.stdout.isatty(),
        bare=bare,
        raw=raw,
        launcher=launcher,
        escapes=terminal.escapes(),
        encoding=sys.stdout.encoding if sys.stdout.isatty() else "utf-8",
    )


def next_commands(job_id: str, final: Status | None = None, *, without: str = "") -> None:
    """What can be done next with a job that runs, or that has ended with the status `final`; not `without`, the command
    that was just carried out."""
    if final is None:
        lines = ["logs {} -f", "status {}", "stop {}", "pull {}"]
    elif final.state == FAILED:
        which = [*(["--launcher"] if final.first_failing_rank is None else []), *failing_rank(final)]
        lines = [" ".join(["logs", "{}", *which]), "exec {} -- ls -l", "pull {}"]
        if final.first_failing_rank is None and not final.started_at:  # its preparation failed
            lines[0] = "status {}"
    elif final.state in (LOST, STOPPED):
        lines = ["logs {}", "resume {}", "pull {}"]
    else:
        lines = ["logs {}", "pull {}"]
    for line in lines:
        if line != f"{without} {{}}":
            terminal.notice(shown(f"  {terminal.invoked_as()} {line.format(job_id)}"))
