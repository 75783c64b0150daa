"""Sends a job's events to URLs, each from a separate process. The job never waits for one.

The URLs are secrets: the supervisor keeps them in memory and passes them on through a pipe.
Stdlib only, Python 3.8, Linux.
"""

import json
import os
import subprocess
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set

from ..host.layout import RUN_DIR_ENV, Job
from ..host.processes import Process, own_process_argv, process_of
from ..host.typed import InvalidData, parse
from ..job import progress
from ..job.ending import Ending
from ..job.status import Status, utc
from .event import Event, Name, body_of

_HANDED_ON = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir", "path")
"""The variables of the job's environment that the process gets, in upper or lower case."""


class _Metrics(NamedTuple):
    step: Optional[int] = None
    loss: Optional[float] = None


class Notifier:
    def __init__(
        self, urls: Sequence[str], job: Job, name: str, env: Dict[str, str], tell: Callable[[str], None]
    ) -> None:
        """`tell`: called with a line about an event that could not be sent."""
        self._urls = urls
        self._job = job
        self._name = name
        self._env = {key: value for key, value in env.items() if key.lower() in _HANDED_ON}
        self._tell = tell
        self.processes: Set[Process] = set()
        """The processes that send. Their marks say that they do not belong to the job, but an ending process shows no
        mark any more."""
        self._sent: "List[subprocess.Popen[bytes]]" = []  # kept: their destructors would wait

    def send(self, name: Name, status: Status, ending: Optional[Ending] = None) -> None:
        """Never raises: errors go to `tell`."""
        try:
            self._send(body_of(self._event(name, status, ending)))
        except Exception as error:
            self._tell("notify: %s could not be told: %s" % (name, type(error).__name__))

    def _event(self, name: Name, status: Status, ending: Optional[Ending]) -> Event:
        metrics = self._metrics()
        return Event(
            self._job.id,
            self._name,
            name,
            status.state,
            os.uname().nodename,
            utc(time.time()),
            status.attempt,
            ending.code if ending is not None else None,
            ending.reason if ending is not None else "",
            metrics.step,
            metrics.loss,
        )

    def _metrics(self) -> _Metrics:
        try:
            return parse((progress.last_metrics(self._job) or "{}").encode("utf-8"), _Metrics)
        except InvalidData:
            return _Metrics(progress.last_step(self._job))

    def _send(self, body: Dict[str, object]) -> None:
        for url in self._urls:  # each by itself, so that none waits for another
            self._post(json.dumps({"url": url, "body": body}).encode("ascii"))

    def _post(self, letter: bytes) -> None:
        process = subprocess.Popen(
            own_process_argv(__package__ + ".send"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            # its mark says that it belongs to no job, so no sweep ends or counts it
            env={**self._env, RUN_DIR_ENV: os.devnull},
            start_new_session=True,
        )
        self._sent.append(process)
        self.processes.add(process_of(process.pid))
        assert process.stdin is not None
        with process.stdin:  # less than what a pipe holds
            process.stdin.write(letter)
