"""Runs one command on this host, with its input and output as a stream.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import signal
import subprocess
import threading
from typing import Dict, List, NamedTuple, Optional

from ..host import environment
from ..host.errors import AgentError
from ..host.layout import Root
from ..wire.conversation import Call
from ..wire.frames import ProtocolError
from .jobs import find_folder


class _Command(NamedTuple):
    argv: List[str]
    job: Optional[str] = None
    bare: bool = False
    """Without the job's environment."""
    secrets: Dict[str, str] = {}
    """The job's secrets that the client has."""


def execute(root: Root, call: Call) -> Dict[str, int]:
    """Runs `argv`; with `job`, in its code folder and with its environment. Data frames name their stream; `exit` has
    the exit code."""
    asked = call.read(_Command)
    argv, cwd = asked.argv, os.path.expanduser("~")
    if not argv:
        raise AgentError("usage", "no command is given")
    env = environment.job_environment(dict(os.environ), environment.container_env())
    if asked.job:
        job = find_folder(root, asked.job)
        cwd = job.code
        if not asked.bare:
            from .beside import beside  # only a job has it

            found = beside(root, job, asked.secrets)
            argv, env = found.argv(argv), found.env
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in a word
        raise AgentError("host", "cannot run %.200s: %s" % (argv[0], getattr(error, "strerror", None) or error))
    pumps = [threading.Thread(target=_pump, args=(process, name, call), daemon=True) for name in ("stdout", "stderr")]
    threading.Thread(target=_feed, args=(process, call), daemon=True).start()
    for pump in pumps:
        pump.start()
    for pump in pumps:
        pump.join()
    code = process.wait()
    return {"exit": code if code >= 0 else 128 - code}


def _feed(process: "subprocess.Popen[bytes]", call: Call) -> None:
    assert process.stdin is not None
    try:
        for frame in call.receive():
            process.stdin.write(frame.body)
            process.stdin.flush()
        process.stdin.close()
    except ProtocolError:
        _end(process)
    except OSError:
        pass  # the command has closed its input


def _pump(process: "subprocess.Popen[bytes]", name: str, call: Call) -> None:
    fd = getattr(process, name).fileno()
    try:
        while True:
            data = os.read(fd, 32768)
            if not data:
                return
            call.send_data(data, stream=name)
    except ProtocolError:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    # the client is gone: its command ends with it, as in a closed terminal
    try:
        os.killpg(process.pid, signal.SIGHUP)
    except ProcessLookupError:
        pass
