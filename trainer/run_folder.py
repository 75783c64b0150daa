"""The run folder: only one run at a time writes into it. Its last file, outcome.json, records how the run ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from trainer.files import replace_text
from trainer.schema import OUTCOME_FILE

LOCK_FILE = "control/trainer.lock"
"""Locked by rank 0 until its process and its saver process have ended, in whatever way. Contains the host and process
ID of rank 0."""
RANKS_LOCK_FILE = "control/ranks.lock"
"""Locked (shared) by the other ranks of this node and by their savers. Without it, after rank 0 has ended, one of them
could still write into a checkpoint of the next start."""
PATIENCE_S = 30.0
"""Seconds to wait for the lock: at a restart, the ranks of the previous start may still be ending."""
IN_USE_HINT = "wait for it, stop it, or name another --run-dir"
_held: list[int] = []  # descriptors that stay open until this process ends


def acquire_run_folder(run_dir: Path, *, patience_s: float = PATIENCE_S) -> str | None:
    """Take the run folder's lock for this process. Returns None, or after `patience_s` a text that names the holder.

    The lock is valid on this node: on a network file system another host may not see it.
    """
    descriptor, others = _open(run_dir / LOCK_FILE), _open(run_dir / RANKS_LOCK_FILE)
    deadline = time.monotonic() + patience_s
    for one in (descriptor, others):
        while not _try_lock(one, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                owner = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                os.close(others)
                if one == others:
                    owner = f"a rank of a start whose rank 0 has ended{': ' if owner else ''}{owner}"
                return f"{run_dir} is in use by another run ({owner or 'another process'})"
            time.sleep(0.1)
    os.close(others)  # no process of an earlier start is left, and a later start cannot pass the first lock
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {os.uname().nodename}, process {os.getpid()}\n".encode(), 0)
    _held.append(descriptor)
    return None


def acquire_shared(run_dir: Path) -> None:
    """Take the shared lock in the run folder that rank 0 has locked.

    Raises OSError if another start is taking the folder, which is possible once rank 0 has ended.
    """
    descriptor = _open(run_dir / RANKS_LOCK_FILE)
    if not _try_lock(descriptor, fcntl.LOCK_SH):
        os.close(descriptor)
        raise OSError(errno.EWOULDBLOCK, "another start has taken the run folder", str(run_dir))
    _held.append(descriptor)


def held_descriptors() -> tuple[int, ...]:
    """The locks' descriptors, for a child process that also writes into the run folder: it then holds the locks too."""
    return tuple(_held)


def release_all() -> None:
    """Release this process's locks. The end of the process does the same."""
    while _held:
        os.close(_held.pop())


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # the original names neither the file nor the action
        raise OSError(error.errno, f"it cannot be locked: {error.strerror}") from None
    return True


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Write outcome.json in one step: another process may read it at any time."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in outcome.items()]
    replace_text(run_dir / OUTCOME_FILE, "{\n " + ",\n ".join(lines) + "\n}\n")  # a list of token ids on one line
