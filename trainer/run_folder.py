"""A run folder: one run at a time writes into it, and its last file, outcome.json, tells how that ended."""

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
"""Held by rank 0 as long as its process or its saver's lives, however they end. It holds that process's host and id."""
RANKS_LOCK_FILE = "control/ranks.lock"
"""Held by the other ranks of this node together, and by their savers: what one of them has begun to write may come when
rank 0 has ended, into the checkpoint of the next start."""
PATIENCE_S = 30.0
"""A restart may come while the ranks of the start before are still dying."""
IN_USE_HINT = "wait for it, stop it, or name another --run-dir"
_held: list[int] = []  # descriptors that stay open to the end of this process


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
    os.close(others)  # nobody of an earlier start is left, and no later one comes past the first lock
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {os.uname().nodename}, process {os.getpid()}\n".encode(), 0)
    _held.append(descriptor)
    return None


def acquire_shared(run_dir: Path) -> None:
    """Take part in the run folder that rank 0 has taken.

    Raises OSError while another start takes it, which it may once rank 0 has ended.
    """
    descriptor = _open(run_dir / RANKS_LOCK_FILE)
    if not _try_lock(descriptor, fcntl.LOCK_SH):
        os.close(descriptor)
        raise OSError(errno.EWOULDBLOCK, "another start has taken the run folder", str(run_dir))
    _held.append(descriptor)


def held_descriptors() -> tuple[int, ...]:
    """What a child is given that writes into the run folder too: the lock is held until both have ended."""
    return tuple(_held)


def release_all() -> None:
    """Give back what this process holds; its end does the same."""
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
    except OSError as error:  # it says neither which file nor what for
        raise OSError(error.errno, f"it cannot be locked: {error.strerror}") from None
    return True


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Write outcome.json in one piece: whoever follows the run may read it at any time."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in outcome.items()]
    replace_text(run_dir / OUTCOME_FILE, "{\n " + ",\n ".join(lines) + "\n}\n")  # a list of token ids on one line
