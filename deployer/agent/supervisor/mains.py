"""The main process of each group, torchrun or a rank's wrapper: starts it, or finds it again after a supervisor was
killed.

Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import subprocess
from typing import List, Optional, Sequence, Tuple

from ..host.errors import AgentError
from ..host.layout import LAUNCHER_LOG
from ..host.marks import in_group
from ..host.processes import Process, is_running, process_of, read_stat
from ..job.status import RUNNING, GroupStatus, Status
from .prepare import Prepared
from .turn import Turn

_started: "List[subprocess.Popen[bytes]]" = []
"""Kept alive, because their destructors would wait for the processes, and `Children` does that."""


def start_groups(turn: Turn, prepared: Sequence[Prepared], number: int, stdin: int) -> None:
    """Starts the command of each group, and stores it in the status. `stdin`: for all of them."""
    for one in prepared:
        turn.status.note_group(one.folder, slots=one.slots, argv=one.argv, cwd=one.command.cwd)
        log = os.path.join(turn.job.logs(number, one.folder), LAUNCHER_LOG)
        main = _start(one, log, stdin)
        turn.children.expect(main.pid)
        turn.status.note_group(one.folder, main=main)


def _start(prepared: Prepared, log: str, stdin: int) -> Process:
    def in_child() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    command = prepared.command
    with open(log, "ab") as output:
        try:
            # used only to start it: `wait` and `poll` would take the exit code from Children
            started = subprocess.Popen(
                command.argv,
                cwd=command.cwd,
                env=command.env,
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except OSError as e:
            raise AgentError("host", "cannot start %s in %s: %s" % (command.argv[0], command.cwd, e.strerror))
    _started.append(started)
    return process_of(started.pid)


def find_mains(status: Status, ours: Sequence[Process]) -> Tuple[GroupStatus, ...]:
    """The job's groups with their current main processes. `ours`: the job's running processes."""
    return tuple(group._replace(main=_find(status, group, in_group(ours, group.folder))) for group in status.groups)


def _find(status: Status, group: GroupStatus, ours: Sequence[Process]) -> Optional[Process]:
    """The main process in the status, if it belongs to the group or has ended; else the oldest process that leads a
    session and was not started by another one of the group."""
    noted = group.main
    if not ours or (noted is not None and (noted in ours or not is_running(noted))):
        return noted
    if noted is None and status.state != RUNNING:
        return None  # it was being prepared
    pids = {process.pid for process in ours}

    def likeness(process: Process) -> Tuple[bool, bool, int]:
        stat = read_stat(process.pid)
        return stat is None or stat.session != process.pid, stat is None or stat.parent in pids, process.start_time

    return min(ours, key=likeness)
