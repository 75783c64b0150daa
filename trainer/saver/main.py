"""The process that writes one rank's part of the checkpoints, so that the trainer's interpreter does nothing but train.

It reads the state from memory that both map, and never touches a GPU. It ends when its trainer does, however that
ends: a start that comes after it finds nobody writing. The trainer alone decides when it ends before: it starts this
process with SIGINT, SIGTERM and SIGHUP blocked, which the system or a terminal send to the whole process group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

NICENESS = 10
"""The training's own threads come first once the saver is up; before, on a busy host, it would never come up."""
EXPENDABLE = "500"
"""Where the system runs out of memory it ends this process before a trainer, which can do without."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python -m trainer.saver.main DESCRIPTOR PARENT`: serve the trainer at the other end of a socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(EXPENDABLE)
    serve(Connection(descriptor), niceness=NICENESS)


def serve(connection: Connection, *, niceness: int = 0) -> None:
    """Join the other savers and write what is ordered, until the trainer's end of the connection closes."""
    threading.Thread(target=end_with, args=(connection.fileno(),), name="trainer gone", daemon=True).start()
    from trainer.saver.serve import serve_orders  # imports torch: seconds, while the trainer goes on

    serve_orders(connection, niceness=niceness)


def die_with(parent: int) -> None:
    """Be killed when the parent ends, though a child of it may hold its end of the connection open."""
    with suppress(OSError, AttributeError):  # a Linux call; elsewhere the connection alone tells
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def end_with(descriptor: int) -> None:
    """End this process, in the middle of a save too, once the other end is closed: a checkpoint is whole or absent."""
    watch = select.poll()
    watch.register(descriptor, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    watch.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
