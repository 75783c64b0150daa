"""--notify CMD: runs the user's commands on this client, for events of the job, while the client follows it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from deployer.agent.host.typed import to_json
from deployer.agent.job.status import FINAL, RUNNING, Status, utc
from deployer.agent.unattended.event import Event, Name, body_of, last_event

COMMAND_S = 30.0
"""Time limit of a command, and at the end of the job of all of them together."""


class Notices:
    """Runs the commands for each event, one after another, in the background."""

    def __init__(self, commands: Sequence[str], job_id: str, name: str, host: str, tell: Callable[[str], None]) -> None:
        """`tell`: called with a line if a command failed."""
        self._commands = commands
        self._job = (job_id, name)
        self._host = host
        self._tell = tell
        self._attempt = 0
        self._started = 0
        self._due: queue.Queue[Event | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def state(self, status: Status) -> None:
        """Takes the job's current status."""
        if status.state in FINAL:
            return
        if self._attempt and status.attempt > self._attempt:
            self._say("restart", status, reason=status.attempts[-1].reason if status.attempts else "")
        self._attempt = status.attempt
        if status.state == RUNNING:
            self._start(status)

    def end(self, final: Status) -> None:
        """Takes the final status, and waits until the commands have ended."""
        if final.started_at:
            self._start(final)
        if final.stalled:
            self._say("idle" if " idle " in final.reason else "stall", final, reason=final.reason)
        self._say(last_event(final.state), final, reason=final.reason)
        self._due.put(None)
        self._thread.join(COMMAND_S)

    def _start(self, status: Status) -> None:
        if self._started < status.attempt:
            self._started = status.attempt
            self._say("start", status._replace(state=RUNNING, code=None))

    def _say(self, event: Name, status: Status, *, reason: str = "") -> None:
        self._due.put(
            Event(
                *self._job,
                event,
                status.state,
                self._host,
                utc(time.time()),
                status.attempt,
                status.code,
                reason,
                status.attempts[-1].step if status.attempts else None,
            )
        )

    def _run(self) -> None:
        for event in iter(self._due.get, None):
            for command in self._commands:
                trouble = run_command(command, event)
                if trouble:
                    self._tell(f"--notify {command!r}: {trouble}")


def run_command(command: str, event: Event) -> str:
    """Runs the user's shell command, with the event on stdin and in its environment. Returns why it failed, or an empty
    text. Its output is not part of the job's log."""
    body = body_of(event)
    told = {key: "" if value is None else str(value) for key, value in to_json(body).items()}
    variables = {f"TORCHFERRY_{key.upper()}": value.replace("\0", "") for key, value in told.items()}
    try:
        done = subprocess.run(
            command,
            shell=True,  # the user wrote it as one
            input=json.dumps(body).encode(),
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_S,
            start_new_session=True,  # Ctrl-C is for this client
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {COMMAND_S:g} s"
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"it ended with code {done.returncode}" + (f": {said[-1][:200]}" if said else "")
