"""`exec` and `shell`: commands in a job's folder on its host, with the job's environment."""

from __future__ import annotations

import json
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
"""Bytes of each output that are kept for --json; more is dropped, and `cut` in the answer is true then."""


def execute(
    host: Host,
    job_id: str | None,
    argv: Sequence[str],
    *,
    bare: bool,
    secrets: Sequence[str],
    as_json: bool = False,
) -> int:
    """Runs a command on the host, connected to this process's input and output, and returns its exit code. With a job,
    it runs in the job's code folder and, unless `bare`, with the job's environment. `secrets`: names of the secrets
    that this client passed to the job; `as_json`: print the output as one JSON at the end."""
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    cut = False
    with host.connect() as link:
        call = link.call("exec", argv=list(argv), job=job_id, bare=bare, payload=True)
        _send_secrets(call, () if bare else secrets)
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


def _send_secrets(call: Call, names: Sequence[str]) -> None:
    """Sends the secrets that are set here. They follow the request as data, because every user of a machine can see the
    command line of a process."""
    values = {name: os.environ[name] for name in names if name in os.environ}
    call.send_data(json.dumps({"secrets": values}).encode("ascii"))
    call.end_data()


def _feed(call: Call, stdin: BinaryIO) -> None:
    try:
        while data := os.read(stdin.fileno(), 32768):
            call.send_data(data)
        call.end_data()
    except (FerryError, OSError):
        pass  # the command or the connection has ended: the reader reports it


def shell(host: Host, job_id: str | None, *, bare: bool, secrets: Sequence[str]) -> int:
    """Opens a shell on the host. With a job, it starts in the job's code folder and, unless `bare`, has its
    environment."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("a shell needs a terminal", hint="deploy.py exec ID -- cmd… runs one command without one")
    if job_id is None:
        return _login_shell(host, None)
    if bare:
        return _login_shell(host, read_status(host, job_id).path + "/code")
    with host.connect() as link:
        call = link.call("enter", job=job_id, payload=True)
        _send_secrets(call, secrets)
        events = call.events()
        pipe = next((call.read(value, str, name) for name, value, _ in events if name == "enter"), None)
        if pipe is None:
            raise HostError(f"{host.name} has not said where the job's environment is")
        return _start_shell(host, _ENTER, pipe)


# the login shell may be fish or tcsh: it only passes on one constant text and one quoted word. The job's shell is not a
# login shell, because the start-up files of a login shell change PATH
_ENTER = '. "$0" && exec "${SHELL:-/bin/sh}"'
_GO_THERE = 'cd "$0" && exec "${SHELL:-/bin/sh}" -l'


def _start_shell(host: Host, text: str, word: str) -> int:
    if host.ssh is None:
        return subprocess.call(["/bin/sh", "-c", text, word])
    return host.run_shell(f"exec /bin/sh -c '{text}' {shlex.quote(word)}")


def _login_shell(host: Host, folder: str | None) -> int:
    if folder is not None:
        return _start_shell(host, _GO_THERE, folder)
    return subprocess.call([os.environ.get("SHELL", "/bin/sh")]) if host.ssh is None else host.run_shell(None)
