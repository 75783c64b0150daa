"""`tensorboard`: shows a job's current event files in TensorBoard, here or on the job's host."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from deployer import terminal
from deployer.agent.job.status import FINAL, State
from deployer.agent.job.views import JobView
from deployer.commands.screen import ending_in_order
from deployer.connection.host import Host, ReconnectBackoff
from deployer.connection.link import Link
from deployer.errors import ConnectError, FerryError, HostError, LostConnection, UsageError
from deployer.forward.tunnel import LOOPBACK, Tunnel, listen
from deployer.jobs.requests import read_status
from deployer.printable import shown
from deployer.pull.choice import PullRequest
from deployer.pull.rounds import pull

EVENTS = "tensorboard"
"""The folder of event files, below the job's folder."""
USUAL_PORT = 6006
START_S = 120.0
"""Seconds for TensorBoard to start: its imports take long on a busy machine."""

# not `-m`, which would run a tensorboard.py in the current folder
_PROGRAM = "import sys; sys.path[:] = [p for p in sys.path if p]; from tensorboard.main import run_main; run_main()"
_URL = re.compile(rb"http://[^\s/]*:(\d+)/")


def tensorboard(
    host: Host, job_id: str, *, target: Path | None, port: int | None, every_s: float, on_host: bool, as_json: bool
) -> int:
    """Serves until Ctrl-C, which is the normal end, and returns 0."""
    try:
        with ending_in_order():
            found = read_status(host, job_id)
            here = importlib.util.find_spec("tensorboard") is not None
            if on_host or not here:
                _serve_from_host(host, found, port, as_json=as_json, local_lacks_it=not here)
            else:
                folder = Path(found.path) if host.ssh is None else target or Path("results") / found.job_id
                _serve_here(host, found, folder.absolute(), port, every_s=every_s, as_json=as_json)
    except KeyboardInterrupt:
        pass
    finally:
        host.close()
    return 0


def _tell_up(job_id: str, port: int, *, as_json: bool, where: str) -> None:
    url = f"http://{LOOPBACK}:{port}/"
    if as_json:
        terminal.say(shown(json.dumps({"id": job_id, "url": url, "port": port, "files": where})))
        return
    terminal.say(shown(f"TensorBoard of {job_id}: {url}"))
    terminal.notice(shown(f"it reads {where}; Ctrl-C ends it"))


def _argv(logdir: str, port: int) -> list[str]:
    options = {"--logdir": logdir, "--host": LOOPBACK, "--port": str(port), "--reload_interval": "5"}
    return ["-c", _PROGRAM, *(word for pair in options.items() for word in pair)]


def _choose_port(asked: int | None, job_id: str) -> int:
    """A free port: the requested one, else the usual one, else any."""

    def instead(port: int) -> str:
        return f"deploy.py tensorboard {job_id} --port {port}"

    if asked is None:
        with suppress(UsageError), listen(USUAL_PORT, instead=instead):
            return USUAL_PORT
    with listen(asked or 0, instead=instead) as listener:
        port: int = listener.getsockname()[1]
        return port


def _no_events(job_id: str, state: State) -> UsageError:
    return UsageError(
        f"{job_id} has {state} and written no event files",
        hint="run.trackers=[tensorboard] has the trainer write them; a program of your own writes them to "
        "$TORCHFERRY_RUN_DIR/tensorboard",
    )


# --- here -------------------------------------------------------------------------------------------------------------


def _serve_here(host: Host, found: JobView, folder: Path, port: int | None, *, every_s: float, as_json: bool) -> None:
    files = _Files(host, found, folder)
    files.refresh()
    chosen = _choose_port(port, found.job_id)
    server = _Server(str(folder / EVENTS), chosen)
    try:
        server.await_ready()
        _tell_up(found.job_id, chosen, as_json=as_json, where=str(folder / EVENTS))
        due = time.monotonic() + every_s
        while True:
            server.check()
            time.sleep(0.2)
            if not files.complete and time.monotonic() >= due:
                files.refresh()
                due = time.monotonic() + every_s
    finally:
        server.end()


class _Files:
    """The local copy of the event files that the job has written so far."""

    def __init__(self, host: Host, found: JobView, folder: Path) -> None:
        self._host = host
        self._id = found.job_id
        self._folder = folder
        self._state: State = found.status.state
        self._backoff = ReconnectBackoff(terminal.notice)
        self._begun = self._told = False
        self.complete = False
        """Whether the job has ended and all files are here."""

    def refresh(self) -> None:
        """Pulls new files. Raises UsageError if the job has ended without event files."""
        try:
            if self._begun:  # read before the pull, so that the last output is pulled too
                self._state = read_status(self._host, self._id).status.state
            ended = self._state in FINAL
            if self._host.ssh is not None:
                pull(
                    self._host,
                    self._id,
                    target=self._folder,
                    request=PullRequest(paths=(EVENTS,)),
                    tell=terminal.notice,
                )
        except (LostConnection, ConnectError) as error:
            if not self._begun:
                raise
            self._backoff.wait(error)
            return
        self._backoff.progressed()
        self._judge(ended=ended)
        self._begun = True

    def _judge(self, *, ended: bool) -> None:
        has_some = any((self._folder / EVENTS).rglob("*tfevents*"))
        if ended and not has_some:
            raise _no_events(self._id, self._state)
        if not has_some and not self._told:
            self._told = True
            terminal.notice(shown(f"{self._id} has written no event files yet (run.trackers=[tensorboard]?); waiting"))
        if ended and self._begun:
            terminal.notice(shown(f"{self._id} has ended: {self._state}; all that it wrote is shown"))
        self.complete = ended


class _Server:
    """A TensorBoard on this machine, in a separate session together with its child processes."""

    def __init__(self, logdir: str, port: int) -> None:
        self._said: deque[bytes] = deque(maxlen=12)
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, *_argv(logdir, port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            if _URL.search(line):
                self._ready.set()
        self._ready.set()

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._ready.wait(0.2):  # a short wait, so that Ctrl-C works
            self.check()
            if time.monotonic() > deadline:
                raise FerryError(f"TensorBoard has not begun to serve within {START_S:g} s")
        self.check()

    def check(self) -> None:
        """Raises FerryError with its last output if it has ended."""
        if self._process.poll() is not None:
            raise FerryError(f"TensorBoard has ended with {self._process.returncode}", where=_words(self._said))

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


def _words(said: deque[bytes]) -> list[str]:
    return [f"tensorboard: {line.decode('utf-8', 'replace').rstrip()}" for line in said if line.strip()]


# --- on the host ------------------------------------------------------------------------------------------------------


def _serve_from_host(host: Host, found: JobView, port: int | None, *, as_json: bool, local_lacks_it: bool) -> None:
    logdir = f"{found.path}/{EVENTS}"
    chosen = _choose_port(port, found.job_id)
    with listen(chosen, instead=lambda other: f"deploy.py tensorboard {found.job_id} --port {other}") as listener:
        link = host.connect()
        try:
            remote = _start_there(link, found, logdir, local_lacks_it=local_lacks_it)
        except BaseException:
            link.close()
            raise

        def again(new: Link) -> int:  # the previous TensorBoard ended with its connection
            return _start_there(new, found, logdir, local_lacks_it=local_lacks_it)

        through = Tunnel(host, link, listener, remote, tell=terminal.notice, again=again)
        try:
            _tell_up(found.job_id, chosen, as_json=as_json, where=f"{logdir} on {host.name}")
            through.serve()
        finally:
            through.close()


def _start_there(link: Link, found: JobView, logdir: str, *, local_lacks_it: bool) -> int:
    """Starts TensorBoard on the host with the job's interpreter, and returns its port. It ends with the connection."""
    script = 'find "$0/" -name "*tfevents*" 2>/dev/null | grep -q .'
    if link.call("exec", argv=["sh", "-c", script, logdir], job=found.job_id).result().get("exit"):
        if found.status.state in FINAL:
            raise _no_events(found.job_id, found.status.state)
        terminal.notice(shown(f"{found.job_id} has written no event files yet (run.trackers=[tensorboard]?)"))
    call = link.call("exec", argv=["python", *_argv(logdir, 0)], job=found.job_id)
    said: deque[bytes] = deque(maxlen=12)
    events = call.events()
    rest = b""
    for name, _, data in events:
        if name == "ok":
            break
        *lines, rest = (rest + data)[-(1 << 16) :].split(b"\n")
        said += lines
        if port := next((m for line in [*lines, rest] if (m := _URL.search(line))), None):
            threading.Thread(target=_drain, args=(events,), daemon=True).start()
            return int(port[1])
    words = _words(said)
    if any("No module named 'tensorboard'" in line for line in words):
        install = f"{sys.executable} -m pip install tensorboard" if local_lacks_it else "leave --on-host out"
        whose = "neither this Python nor the job's has" if local_lacks_it else "the job's Python has not got"
        raise HostError(f"{whose} TensorBoard", hint=install)
    raise HostError("TensorBoard ended on the host before it served", where=words)


def _drain(events: Iterator[object]) -> None:
    """Reads and drops all later output, so that it does not block the connection."""
    with suppress(FerryError):
        for _ in events:
            pass
