"""The saver process: writes one rank's part of the checkpoints, so that the trainer's interpreter only trains.

It reads the state from shared memory and never uses a GPU. It ends when its trainer ends, in whatever way, so that no
saver of an earlier start is still writing. Only the trainer decides whether it ends earlier: it starts this process
with SIGINT, SIGTERM and SIGHUP blocked, which the system or a terminal sends to the whole process group.
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
"""Gives the training's threads priority. Set only after the saver's start: on a busy host it would never start up."""
EXPENDABLE = "500"
"""The OOM score: if the system runs out of memory, it ends this process first; the trainer can continue without it."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python -m trainer.saver.main DESCRIPTOR PARENT`: serve the trainer at the other end of a socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(EXPENDABLE)
    serve(Connection(descriptor), niceness=NICENESS)


def serve(connection: Connection, *, niceness: int = 0) -> None:
    """Join the other savers and carry out orders, until the trainer's end of the connection closes."""
    threading.Thread(target=end_with, args=(connection.fileno(),), name="trainer gone", daemon=True).start()
    from trainer.saver.serve import serve_orders  # imports torch: takes seconds; the trainer does not wait

    serve_orders(connection, niceness=niceness)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends: a child of the parent may keep the connection open."""
    with suppress(OSError, AttributeError):  # Linux only; elsewhere only the connection shows the parent's end
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def end_with(descriptor: int) -> None:
    """End this process once the other end is closed, even during a save: a checkpoint is either complete or absent."""
    watch = select.poll()
    watch.register(descriptor, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    watch.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
