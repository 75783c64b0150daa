"""Messages about a followed job on this terminal, for `run` and `logs`."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from deployer import terminal
from deployer.agent.gpus.view import QueueView
from deployer.agent.host.layout import JOB_ID, LogName
from deployer.agent.job.status import FAILED, FINAL, LOST, PREPARING, QUEUED, RUNNING, STOPPED, State, Status
from deployer.agent.job.views import Ack
from deployer.agent.logs.identity import Change
from deployer.commands.in_words import attempt_line, group_of, telling_log, waits_line
from deployer.connection.host import HERE, Host
from deployer.errors import FerryError
from deployer.exit_codes import INTERRUPTED, RUNS_ON
from deployer.jobs.registry import JobRecord, note_state, write_record
from deployer.jobs.requests import last_lines
from deployer.launch.follow import Watcher
from deployer.launch.logview import LogView
from deployer.printable import shown

if TYPE_CHECKING:
    from deployer.launch.notify import Notices

LAST_LINES = 15
"""Lines of the log that are shown after a failure."""


class Screen(Watcher):
    """Shows the progress of a launch on stderr."""

    def __init__(self, record: JobRecord, *, tells_attempts: bool = True) -> None:
        self.record = record
        self.beginning = ""
        """A line to show when the job has started."""
        self.folder: str | None = None
        """The job's folder on the host, once the host has acknowledged the job."""
        self.keeps: Callable[[], None] | None = None
        """Called in a thread when the job has started, to keep notes on this client; the job does not wait for it."""
        self.notices: Notices | None = None
        """The --notify commands to run at the job's events."""
        self.stopping = False
        """Whether the host stops the job because it was cancelled just after its start."""
        self._asked = 0
        self._bars = ExitStack()
        self._update: Callable[[int, int], None] | None = None
        self._closed = False
        self._waiting = False
        self._heard_at = time.monotonic()
        self.known_state: State | None = None
        """The last state that the host reported; None before the first."""
        self._attempt = 1
        self._tells_attempts = tells_attempts
        self._queue: QueueView | None = None
        self._after: tuple[str, ...] = ()
        self._told: set[Change] = set()

    def asking(self) -> None:
        self._asked += 1

    def refused(self) -> None:
        self._asked -= 1

    @property
    def may_have_begun(self) -> bool:
        """Whether a host was asked to start the job and has not refused."""
        return self._asked > 0 and not self.stopping

    def sending(self, sent: int, total: int) -> None:
        if self._closed:
            return
        if self._update is None:
            self._update = self._bars.enter_context(terminal.progress(shown("sent")))
        self._update(sent, total)

    def started(self, ack: Ack) -> None:
        self.close()
        self.folder = ack.path
        self.stopping = ack.stopping
        self.remember()
        if self.stopping:
            return
        self.known_state = QUEUED if ack.queued else None
        if self.keeps is not None:
            threading.Thread(target=self.keeps).start()
        terminal.notice(shown("queued" if ack.queued else "already running" if ack.already else "started"))
        if self.beginning:
            terminal.notice(shown(self.beginning))

    @property
    def acknowledged(self) -> bool:
        return self.folder is not None

    def close(self) -> None:
        """Ends the progress bar of the upload; no other bar is shown after that."""
        self._closed = True
        self._bars.close()

    def called_off(self) -> int:
        """Shows the state of a job whose start was interrupted. Returns the exit code."""
        self.close()
        job_id, me = self.record.job_id, terminal.invoked_as()
        terminal.notice(shown(""))
        if self.stopping:
            terminal.notice(shown(f"cancelled: {job_id} had just begun, its host stops it: {me} status {job_id}"))
            return INTERRUPTED
        if not self.may_have_begun:
            terminal.notice(shown("cancelled: nothing was started"))
            return INTERRUPTED
        self.remember()  # `status` needs to know the job's host
        host = self.record.ssh or HERE
        terminal.notice(shown(f"cancelled, but {host} has not said whether {job_id} was started"))
        terminal.notice(shown(f"  {me} status {job_id} looks, {me} stop {job_id} stops it"))
        return RUNS_ON

    def remember(self) -> None:
        """Writes the job's record, so that its ID finds it. A disk error must not end the launch."""
        try:
            write_record(self.record)
        except OSError as error:
            terminal.notice(shown(f"warning: this client keeps no record of {self.record.job_id}: {error}"))

    def state(self, status: Status) -> None:
        # `ps` shows it if the host cannot be reached
        note_state(self.record, self.record.ssh or HERE, status.state)
        if self.notices is not None:
            self.notices.state(status)
        self.known_state = status.state
        attempt = status.attempt or 1
        if self._tells_attempts and attempt != self._attempt:
            self._attempt = attempt
            terminal.notice(shown(attempt_line(status) or f"attempt {attempt}"))
        if status.after != self._after and status.state not in FINAL:
            told = waits_line(status.after) if status.after else f"{', '.join(self._after)} succeeded"
            terminal.notice(shown(told))
            self._after = status.after
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

    @property
    def tells_of_changes(self) -> bool:
        return bool(self._told)

    def changed(self, change: Change) -> None:
        if change in self._told:  # shown already, over an earlier connection
            return
        self._told.add(change)
        name = LogName.parse(change.file)
        file = name._replace(copy=1).text if name is not None else change.file
        terminal.notice(shown(f"[{file} {_CHANGED[change.what].format(change.to)}]"))

    def left_behind(self, *what: str) -> None:
        """Shows lines when this client stops following: what happened, the job's state, and how to follow it again."""
        job_id, me = self.record.job_id, terminal.invoked_as()
        ago = terminal.age(time.monotonic() - self._heard_at)
        state = self.known_state or RUNNING
        when = f"was {state} {ago} ago" if self._waiting else f"is {state}"
        terminal.notice(*map(shown, what))
        terminal.notice(shown(f"{job_id} {when}; it goes on without this client"))
        terminal.notice(shown(f"  {me} logs {job_id} -f comes back, {me} stop {job_id} stops it"))

    def reconnecting(self, error: FerryError, wait_s: float) -> None:
        if not self._waiting:
            goes_on = " (the job goes on)" if self.acknowledged else ""
            terminal.notice(shown(f"{error.message}; trying again{goes_on}"))
        self._waiting = True


_CHANGED = {
    "renamed": "was renamed to {} on the host; what is written there is shown",
    "removed": "was removed on the host; what its program writes is shown as long as it runs",
    "replaced": "is another file on the host now: what the first one held beyond this is not shown, the new one is",
    "cut": "was cut on the host: what stood there beyond this is not shown, what comes now is",
    "gone": "is gone: it was removed or taken elsewhere on the host, nothing of it can be shown",
}


class _Ended(KeyboardInterrupt):
    """SIGTERM was received, or the terminal was closed."""


def leave_terminal() -> None:
    """Redirects output to a terminal to /dev/null: a write to a closed terminal would be an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # isatty is false for a closed terminal
            os.dup2(null, stream)
    os.close(null)


def is_unread(error: OSError) -> bool:
    """Whether an output stream has lost its reader: a broken pipe, or a closed terminal."""
    return error.errno in (errno.EPIPE, errno.EIO)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """In this context, SIGTERM and a closed terminal act like Ctrl-C, so that the running work ends in order. Ignored
    signals stay ignored, for example under nohup."""

    def end(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        raise _Ended

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def log_view(*, bare: bool, raw: bool = False, launcher: bool = False, as_json: bool = False) -> LogView:
    """A log view on this process's stdout and stderr; all on stderr if a script reads JSON on stdout."""
    sys.stdout.flush()
    if as_json:
        return LogView(sys.stderr.buffer, sys.stderr.buffer, terminal=False, bare=bare, escapes=False)
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


def missed_lines(job_id: str, final: Status, host: Host) -> list[str]:
    """Lines that explain why files that the job missed were not there, as far as this client knows."""
    if not final.missing:
        return []
    from deployer.jobs.left_out import recall_left_out, why_missing

    return why_missing(final.missing, recall_left_out(job_id), remote=host.ssh is not None)


def last_words(job_id: str, final: Status, host: Host) -> list[str]:
    """The last lines of the log that explains a failure best, for a script; empty if there is no log, or the host does
    not answer now."""
    if final.state != FAILED or final.log == "":
        return []
    name = LogName.parse(final.log or "")
    group, rank = group_of(final.first_failing_group), final.first_failing_rank
    if name is not None:
        group, rank = name.group, name.rank
    try:
        text = last_lines(host, job_id, group, rank=rank, lines=LAST_LINES)
    except FerryError:
        return []
    return text.decode("utf-8", "replace").splitlines()


def next_commands(job_id: str, final: Status | None = None, *, without: str = "") -> None:
    """Shows the next commands for a job, except `without`, the command that just ran."""
    left = [line for line in next_lines(job_id, final) if line != f"{without} {job_id}"]
    for n, line in enumerate(left):
        terminal.notice(shown(f"{'      ' if n else 'next: '}{terminal.invoked_as()} {line}"))


def next_lines(job_id: str, final: Status | None) -> list[str]:
    """Commands for a job that runs, or that has ended with the status `final`."""
    if final is None:
        return [f"logs {job_id} -f", f"status {job_id}", f"stop {job_id}", f"pull {job_id}"]
    if final.state == FAILED and final.after:  # it has never started
        because = final.after[0]
        # a text from a host, in lines that people paste
        return [f"status {because}", f"resume {job_id} --after {because}"] if JOB_ID.match(because) else []
    if final.state == FAILED:
        which = telling_log(final)
        is_unprepared = final.first_failing_rank is None and not final.started_at and not final.log
        first = ["status", job_id] if which is None or is_unprepared else ["logs", job_id, *which]
        return [" ".join(first), f"exec {job_id} -- ls -l", f"pull {job_id}"]
    if final.state in (LOST, STOPPED):
        return [f"logs {job_id}", f"resume {job_id}", f"pull {job_id}"]
    return [f"logs {job_id}", f"pull {job_id}"]
