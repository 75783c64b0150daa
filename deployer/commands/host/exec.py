"""`exec` and `shell`: commands beside a job."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO, Literal, NamedTuple

from deployer.connection.call import Call
from deployer.connection.host import Host
from deployer.errors import FerryError, HostError, UsageError
from deployer.jobs.requests import read_status
from deployer.terminal import say_json


class _Output(NamedTuple):
    stream: Literal["stdout", "stderr"]


class _Exit(NamedTuple):
    exit: int


MOST_KEPT = 8 << 20
"""Bytes of each output that are kept for a script; what follows is dropped, and the answer says so."""


def execute(host: Host, job_id: str | None, argv: Sequence[str], *, as_json: bool = False) -> int:
    """Runs a command on the host, in a job's code folder when one is given, with this process's own input and output;
    its exit code is ours. `as_json`: what it wrote is one JSON at its end."""
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    cut = False
    with host.connect() as link:
        call = link.call("exec", argv=list(argv), job=job_id)
        if sys.stdin is None or sys.stdin.isatty():
            call.end_data()
        else:
            threading.Thread(target=_feed, args=(call, sys.stdin.buffer), daemon=True).start()
        for name, value, data in call.events():
            if name == "data":
                output = call.read(value, _Output, name).stream
                if as_json:
                    cut |= len(kept[output]) + len(data) > MOST_KEPT
                    kept[output] += data[: MOST_KEPT - len(kept[output])]
                    continue
                stream = (sys.stdout if output == "stdout" else sys.stderr).buffer
                stream.write(data)
                stream.flush()
            elif name == "ok":
                code = call.read(value, _Exit, "answer").exit & 0xFF
                if as_json:
                    texts = {name: data.decode("utf-8", "replace") for name, data in kept.items()}
                    say_json({"code": code, **texts, "cut": cut})
                return code
    raise HostError("the command ended without an exit code")


def _feed(call: Call, stdin: BinaryIO) -> None:
    try:
        while data := os.read(stdin.fileno(), 32768):
            call.send_data(data)
        call.end_data()
    except (FerryError, OSError):
        pass  # the command or the connection has ended: its reader tells


def shell(host: Host, job_id: str | None) -> int:
    """A login shell on the host, in the job's code folder when one is given."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("a shell needs a terminal", hint="deploy.py exec ID -- cmd… runs one command without one")
    folder = read_status(host, job_id).path + "/code" if job_id else None
    if host.ssh is None:
        return subprocess.call([os.environ.get("SHELL", "/bin/sh")], cwd=folder)
    # the login shell may be fish or tcsh: it only hands on one constant text and one quoted word
    enter = 'exec /bin/sh -c \'cd "$0" && exec "${SHELL:-/bin/sh}" -l\''
    command = f"{enter} {shlex.quote(folder)}" if folder else None
    return host.run_shell(command)
