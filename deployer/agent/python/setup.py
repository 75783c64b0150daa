"""A job's setup: a command that runs before the job, once for its key and the job's interpreter.

It has its own environment on top of that interpreter, in `envs/KEY` like a built one: later jobs with the same key
reuse it. Stdlib only, Python 3.8, Linux: this package runs on the host.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import BinaryIO, Deque, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from ..host.disk import fail
from ..host.errors import SetupFailed
from ..host.files import blake2b, write_whole
from ..host.layout import SETUP_ENV, Root
from ..host.locks import take_lock
from ..host.processes import Process, all_stats, process_of, send
from . import layer, made
from .build import forms_of, note
from .editable import compiled_modules, share_editables

TERM_S = 3.0
"""Seconds after TERM for processes that the setup started."""
KILL_S = 5.0
POLL_S = 0.05
LAST_LINES = 5
FOLDER, COMPLETE = "data", "COMPLETE"
_LINE_BYTES = 64 << 10
_UNWANTED = ("PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
_PR_SET_CHILD_SUBREAPER = 36


class SetupRequest(NamedTuple):
    """The setup command of a job, with its time limit and environment."""

    command: str
    key: str
    timeout_s: float
    env: Dict[str, str]
    """The job's environment."""
    hidden: Sequence[str]
    """Values that its output must not show in a log."""
    explicit: bool
    """The user chose the interpreter: the setup gets it unchanged."""


def set_up(request: SetupRequest, python: str, code_dir: str, root: Root, log: BinaryIO) -> Tuple[str, str]:
    """(the job's interpreter, the setup's folder), once the setup has run for this key, now or earlier.

    Raises SetupFailed if the command fails or takes too long, and AgentError if it cannot be run. In both cases nothing
    of it is kept.
    """
    below = layer.ask(python, request.env)
    folder = os.path.join(root.envs, _key(request, python, below))
    own = python if request.explicit else os.path.join(folder, "bin", "python")
    try:
        if _is_complete(folder, own):
            note(log, "setup: what it made before is reused, %s" % folder)
        else:
            with _only_one(folder + ".lock", log) as lock_fd:
                if _is_complete(folder, own):
                    note(log, "setup: what the other launch made is used, %s" % folder)
                else:
                    _run_anew(request, python, below, code_dir, folder, log, lock_fd)
        made.put(code_dir, os.path.join(folder, made.MADE))
    except OSError as error:
        fail(error.filename or folder, error)
    return own, folder


def environment_of(env: Dict[str, str], python: str, folder: str) -> Dict[str, str]:
    """The environment variables for processes after the setup in this folder."""
    return {**layer.in_layer(env, python, folder), SETUP_ENV: os.path.join(folder, FOLDER)}


def _key(request: SetupRequest, python: str, below: layer.Below) -> str:
    parts: List[object] = [request.key, python, below.version, below.sites, os.uname().machine]
    if request.explicit:  # made anew under the same name it is another one
        parts += [_stamp(python), _stamp(os.path.join(os.path.dirname(os.path.dirname(python)), "pyvenv.cfg"))]
    return blake2b(json.dumps(parts).encode("ascii"), digest_size=10).hexdigest()


def _stamp(path: str) -> List[int]:
    try:
        info = os.stat(path)
    except OSError:
        return []
    return [info.st_ino, info.st_mtime_ns]


def _is_complete(folder: str, python: str) -> bool:
    # the base interpreter may have been removed since: then its link leads nowhere
    return os.path.exists(os.path.join(folder, COMPLETE)) and os.path.exists(python)


@contextmanager
def _only_one(path: str, log: BinaryIO) -> Iterator[int]:
    """Holds the lock of a setup. The command inherits the lock, so one that outlives its supervisor still holds it."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not take_lock(fd):
            note(log, "setup: waiting, another launch runs it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _run_anew(
    request: SetupRequest, python: str, below: layer.Below, code_dir: str, folder: str, log: BinaryIO, lock_fd: int
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.makedirs(os.path.join(folder, FOLDER), mode=0o700)
        if not request.explicit:
            write_whole(os.path.join(folder, layer.BASE), (python + "\n").encode("utf-8", "surrogateescape"))
            layer.make_layer(folder, python, below, request.env)
        before = made.look(code_dir)
        own = python if request.explicit else os.path.join(folder, "bin", "python")
        _Running(request, own, code_dir, folder, log).to_the_end(lock_fd)
        if not request.explicit:
            # modules that it has compiled in the project's folder are stored for other jobs, like all its files
            share_editables(folder, code_dir, compiled_modules(code_dir))
        for line in made.keep(code_dir, before, os.path.join(folder, made.MADE)):
            note(log, "setup: " + line)
        with open(os.path.join(folder, COMPLETE), "w", encoding="utf-8") as f:
            f.write(request.key + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Running:
    """The run of the command."""

    def __init__(self, request: SetupRequest, python: str, code_dir: str, folder: str, log: BinaryIO) -> None:
        env = {name: value for name, value in request.env.items() if name not in _UNWANTED}
        env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        self._request, self._log, self._code_dir = request, log, code_dir
        self._env = environment_of(env, python, folder)
        self._hidden = [form for value in request.hidden for form in forms_of(value)]
        self._last: Deque[str] = deque(maxlen=LAST_LINES)

    def to_the_end(self, lock_fd: int) -> None:
        """Runs the command to its end. Raises SetupFailed unless it exits with 0. Afterwards none of its processes
        runs."""
        shell = shutil.which("bash", path=self._env["PATH"]) or "/bin/sh"
        note(self._log, "setup: %s" % " ".join(self._request.command.split())[:200])
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what it leaves behind comes to this process
        process = subprocess.Popen(
            [shell, "-e", "-c", self._request.command],
            env=self._env,
            cwd=self._code_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[lock_fd],
            start_new_session=True,
        )
        reader = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        reader.start()
        deadline = time.monotonic() + self._request.timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        code = process.returncode
        left = _end_descendants()
        if left and code is not None:
            note(self._log, "setup: ended what it left running (%d)" % left)
        reader.join(KILL_S)
        if code is None:
            limit = "%g s" % self._request.timeout_s
            hint = "--setup-timeout gives it more time; a question that it asks is never answered: stdin is empty"
            raise SetupFailed(0, "the setup was ended after %s%s" % (limit, self._words()), hint)
        if code != 0:
            shown = "code %d" % code if code > 0 else "signal %d" % -code
            hint = (
                "--setup runs in the job's copy of the project; each line of the command must succeed: it runs under "
                "bash -e, or sh -e if there is no bash"
            )
            raise SetupFailed(
                code if code > 0 else 128 - code, "the setup failed with %s%s" % (shown, self._words()), hint
            )

    def _words(self) -> str:
        return ": " + " / ".join(self._last)[-1000:] if self._last else ", and wrote nothing"

    def _copy(self, output: BinaryIO) -> None:
        for line in iter(lambda: output.readline(_LINE_BYTES), b""):
            for value in self._hidden:
                line = line.replace(value, b"****")
            try:
                self._log.write(line)
            except OSError:  # a full disk: the command goes on, and its last words are told
                pass
            text = line.decode("utf-8", "replace").strip()
            if text:
                self._last.append(text[:300])


def _end_descendants() -> int:
    """Ends all descendants of this process: TERM, then KILL. Returns how many there were."""
    told = set()
    begun = time.monotonic()
    while time.monotonic() < begun + TERM_S + KILL_S:
        _reap()
        found = _descendants()
        if not found:
            break
        is_late = time.monotonic() > begun + TERM_S
        for process in found:
            if is_late or process not in told:
                send(process, signal.SIGKILL if is_late else signal.SIGTERM)
                send(process, signal.SIGCONT)
        told |= set(found)
        time.sleep(POLL_S)
    return len(told)


def _descendants() -> List[Process]:
    stats = all_stats()
    known = {os.getpid()}
    while True:
        more = {pid for pid, stat in stats.items() if stat.parent in known and stat.state not in "ZX"} - known
        if not more:
            break
        known |= more
    return [process_of(pid) for pid in known - {os.getpid()}]


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
