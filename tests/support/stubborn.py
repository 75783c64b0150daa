"""Process trees that do not want to end, for tests of `stop`: Python sources that a job runs, by name.

Every process of a tree has the tree's canary in its command line, so that `running` finds all of them without asking
the code under test.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

HEAD = """
import os, signal, subprocess, sys, time
CANARY = sys.argv[-1]
def sleep():
    while True:
        time.sleep(1000)
def spawn(code, **options):
    # as fork would do it, with the canary in its own command line
    return subprocess.Popen([sys.executable, '-c', HEAD + code, CANARY], **options)
"""

HOPPER = """
while True:
    open('hop', 'w')
    if os.fork(): os._exit(0)
    os.setsid()
"""
RESPAWNER = """
while True:
    pid = os.fork()
    if not pid: os.setsid(), sleep()
    os.waitpid(pid, 0)
"""

PARTS = {
    "worker": "spawn('sleep()')\n",
    "deaf worker": "spawn('signal.signal(signal.SIGTERM, signal.SIG_IGN); sleep()')\n",
    "daemon": "spawn('if os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\nsleep()')\n",
    "daemon without its environment": "spawn('if os.fork(): os._exit(0)\\nos.setsid()\\nsleep()', env={})\n",
    "halted worker": "spawn('os.kill(os.getpid(), signal.SIGSTOP); sleep()')\n",
    "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "hopper": f"spawn({HOPPER!r}, env={{}})\n",
    "respawner": f"spawn({RESPAWNER!r}, env={{}})\n",
}
"""What a program does before it sleeps."""


def program(*parts: str) -> str:
    """A program that does these and says `up` once it sleeps."""
    return f"HEAD = {HEAD!r}\nexec(HEAD)\n" + "".join(PARTS[part] for part in parts) + "print('up')\nsleep()\n"


def canary() -> str:
    """A word that is in no other command line of this machine."""
    return f"canary-{secrets.token_hex(8)}"


def running(word: str) -> list[int]:
    """The pids of the processes with this canary that are no zombies; torchrun and the wrappers carry it too."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has gone meanwhile
    return [pid for pid in found if pid != os.getpid()]


def hops(folder: Path) -> bool:
    """Whether a hopper is alive there: it is too quick to be seen among the processes."""
    (folder / "hop").unlink(missing_ok=True)
    time.sleep(0.1)  # a hundred hops
    return (folder / "hop").exists()
