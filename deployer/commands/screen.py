"""What a followed job shows on this terminal, shared by `run` and `logs`."""

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
"""Of a log, where a job has failed."""


class Screen(Watcher):
    """Tells on stderr how a launch goes."""

    def __init__(self, record: JobRecord, *, tells_attempts: bool = True) -> None:
        self.record = record
        self.beginning = ""
        """What is said of the job once it has started."""
        self.folder: str | None = None
        """The job's folder on the host, once the host has acknowledged the job."""
        self.keeps: Callable[[], None] | None = None
        """What is kept on this client of a launch that has come to a job; no job waits for it."""
        self.notices: Notices | None = None
        """The commands that are told of the job."""
        self.stopping = False
        """The host stops it, for it was called off just after its start."""
        self._asked = 0
        self._bars = ExitStack()
        self._update: Callable[[int, int], None] | None = None
        self._closed = False
        self._waiting = False
        self._heard_at = time.monotonic()
        self.known_state: State | None = None
        """As its host said last; None before."""
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
        """Whether a host was asked to start it, and has not said that it did not."""
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
        """Ends the upload's bar, for good."""
        self._closed = True
        self._bars.close()

    def called_off(self) -> int:
        """Says how it stands with a job whose start was interrupted; the exit code."""
        self.close()
        job_id, me = self.record.job_id, terminal.invoked_as()
        terminal.notice(shown(""))
        if self.stopping:
            terminal.notice(shown(f"cancelled: {job_id} had just begun, its host stops it: {me} status {job_id}"))
            return INTERRUPTED
        if not self.may_have_begun:
            terminal.notice(shown("cancelled: nothing was started"))
            return INTERRUPTED
        self.remember()  # `status` must know which host to ask
        host = self.record.ssh or HERE
        terminal.notice(shown(f"cancelled, but {host} has not said whether {job_id} was started"))
        terminal.notice(shown(f"  {me} status {job_id} looks, {me} stop {job_id} stops it"))
        return RUNS_ON

    def remember(self) -> None:
        """Notes the job, so that its id finds it. A disk that takes no note must not end the launch."""
        try:
            write_record(self.record)
        except OSError as error:
            terminal.notice(shown(f"warning: this client keeps no record of {self.record.job_id}: {error}"))

    def state(self, status: Status) -> None:
        # for a `ps` when the host cannot be reached
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
        if change in self._told:  # over an earlier connection
            return
        self._told.add(change)
        name = LogName.parse(change.file)
        file = name._replace(copy=1).text if name is not None else change.file
        terminal.notice(shown(f"[{file} {_CHANGED[change.what].format(change.to)}]"))

    def left_behind(self, *what: str) -> None:
        """Lines for one who stops following: what happened, how the job is, how to come back to it."""
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
    """SIGTERM has come, or the terminal is gone."""


def leave_terminal() -> None:
    """Says no more to a terminal: a word to one that is gone would be an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # of one that is gone, isatty says no
            os.dup2(null, stream)
    os.close(null)


def is_unread(error: OSError) -> bool:
    """Whether a stream of ours has lost its reader: a pipe, or a terminal that was closed."""
    return error.errno in (errno.EPIPE, errno.EIO)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Within, SIGTERM and a terminal that is closed are what Ctrl-C is: whatever was begun is called off or left in
    order. Not where somebody has them ignored, as nohup does."""

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
    """A view on this process's own stdout and stderr; all on stderr where a script reads a JSON on stdout."""
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
    """Why what the job missed was not there, as far as this client knows."""
    if not final.missing:
        return []
    from deployer.jobs.left_out import recall_left_out, why_missing

    return why_missing(final.missing, recall_left_out(job_id), remote=host.ssh is not None)


def last_words(job_id: str, final: Status, host: Host) -> list[str]:
    """The last lines of the log that tells most of a failure, for a script; none where there is no log, or the host
    does not tell now."""
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
    """Says what can be done next with a job; not `without`, the command that was just carried out."""
    left = [line for line in next_lines(job_id, final) if line != f"{without} {job_id}"]
    for n, line in enumerate(left):
        terminal.notice(shown(f"{'      ' if n else 'next: '}{terminal.invoked_as()} {line}"))


def next_lines(job_id: str, final: Status | None) -> list[str]:
    """Commands for a job that runs, or that has ended with the status `final`."""
    if final is None:
        return [f"logs {job_id} -f", f"status {job_id}", f"stop {job_id}", f"pull {job_id}"]
    if final.state == FAILED and final.after:  # it never started
        because = final.after[0]
        # a host's word, in what people paste
        return [f"status {because}", f"resume {job_id} --after {because}"] if JOB_ID.match(because) else []
    if final.state == FAILED:
        which = telling_log(final)
        is_unprepared = final.first_failing_rank is None and not final.started_at and not final.log
        first = ["status", job_id] if which is None or is_unprepared else ["logs", job_id, *which]
        return [" ".join(first), f"exec {job_id} -- ls -l", f"pull {job_id}"]
    if final.state in (LOST, STOPPED):
        return [f"logs {job_id}", f"resume {job_id}", f"pull {job_id}"]
    return [f"logs {job_id}", f"pull {job_id}"]
