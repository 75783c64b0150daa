"""Builds environments on the host: a venv from a file of the project and requirements, once per content.

Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import json
import os
import subprocess
from collections import deque
from contextlib import contextmanager
from typing import BinaryIO, Deque, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from ..host.disk import fail
from ..host.errors import AgentError
from ..host.files import blake2b
from ..host.layout import Root
from ..host.locks import take_lock
from .editable import compiled_modules, share_editables
from .spec import PythonSpec

OLDEST = (3, 10)
"""An environment is built with the first interpreter of the host that is at least this new, else with the first one."""
MISSING_HINT = (
    "name an interpreter that has them with --python P; for a host without internet, send wheels with --wheels DIR"
)
UV_HINT = "install uv there, or make the lock a file that pip reads: uv export --frozen --no-dev -o requirements.txt"
_SHOWN = 8
_UNWANTED = ("PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONHOME")


class Interpreter(NamedTuple):
    """A working interpreter, and the requirements that it does not meet, each with what is installed instead."""

    path: str  # absolute, as sys.executable
    version: str
    unmet: List[str]
    python_fits: bool = True

    def __str__(self) -> str:
        shown = self.unmet[:_SHOWN]
        more = ["and %d more" % (len(self.unmet) - _SHOWN)] if len(self.unmet) > _SHOWN else []
        return "%s (Python %s) lacks %s" % (self.path, self.version, ", ".join(shown + more))


class Building:
    """Finds or builds the environment for a lock and requirements."""

    def __init__(self, spec: PythonSpec, code_dir: str, root: Root, env: Dict[str, str], log: BinaryIO) -> None:
        self.spec, self.root, self.log = spec, root, log
        self.lock = os.path.join(code_dir, spec.lock) if spec.lock else ""
        self.code_dir = code_dir
        self.env = {name: value for name, value in env.items() if name not in _UNWANTED}
        self.env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        self._hidden = [value for name in spec.variables for value in forms_of(env.get(name, ""))]

    def environment(self, found: Sequence[Interpreter]) -> str:
        """The interpreter of the environment. `found`: the host's interpreters, at least one. Raises AgentError if it
        cannot be built, with what failed and what the host's own interpreters lack."""
        fitting = [i for i in found if i.python_fits]
        base = next((i for i in fitting if _version(i.version) >= OLDEST), (fitting or list(found))[0])
        folder = os.path.join(self.root.envs, self._key(base))
        python = os.path.join(folder, "bin", "python")
        try:
            if not _is_complete(folder):
                with self._only_one(folder + ".lock") as lock_fd:
                    if not _is_complete(folder):
                        self._build(folder, python, base, lock_fd)
        except OSError as error:
            fail(error.filename or folder, error)
        except subprocess.CalledProcessError as error:
            lacking = "; ".join(map(str, [i for i in found if i.unmet][:3]))
            why = "%s ended with %d: %s" % (error.cmd, error.returncode, error.output)
            message = "the job's Python environment could not be built: " + why
            hint = UV_HINT if error.cmd == _GETTING_UV else MISSING_HINT
            raise AgentError("host", message + (" (of the host, %s)" % lacking if lacking else ""), hint)
        return python

    def _key(self, base: Interpreter) -> str:
        spec = self.spec
        read = spec.key
        if self.lock and not read:  # of an older client
            try:
                with open(self.lock, "rb") as f:
                    read = blake2b(f.read()).hexdigest()
            except OSError as error:
                raise AgentError("host", "cannot read %s of the project: %s" % (spec.lock, error.strerror))
        asked = [read, spec.requires, spec.python, spec.wheels, base.version, os.uname().machine]
        return blake2b(json.dumps(asked).encode("ascii"), digest_size=10).hexdigest()

    @contextmanager
    def _only_one(self, path: str) -> Iterator[int]:
        """Holds the lock of an environment. The installers inherit the lock, so one that outlives its agent still holds
        it."""
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not take_lock(fd):
                self._say("waiting: another launch is building this environment")
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _build(self, folder: str, python: str, base: Interpreter, lock_fd: int) -> None:
        import shutil  # a supervisor, which loads this early, starts without it

        shutil.rmtree(folder, ignore_errors=True)
        self._say("building the environment %s with %s (Python %s)" % (folder, base.path, base.version))
        uv = shutil.which("uv", path=self.env.get("PATH", os.defpath)) or ""
        if not base.python_fits and not uv:
            raise AgentError(
                "host",
                "the job needs Python %s, and of this host %s is Python %s"
                % (self.spec.python, base.path, base.version),
                "install one there, or uv, which fetches it; or name one with --python P",
            )
        if uv:
            wanted = base.path if base.python_fits else self.spec.python
            self._run("uv venv", [uv, "venv", "--python", wanted, folder], lock_fd)
        else:
            self._run("python -m venv", [base.path, "-m", "venv", folder], lock_fd)
        before = compiled_modules(self.code_dir) if self.lock else frozenset()
        self._install(uv, folder, python, lock_fd)
        if self.lock:
            share_editables(folder, self.code_dir, before)
        with open(os.path.join(folder, "COMPLETE"), "w", encoding="utf-8") as f:
            f.write(base.path + "\n")

    def _install(self, uv: str, folder: str, python: str, lock_fd: int) -> None:
        where = self.code_dir if self.lock else "/"
        try:
            for name, command in self._installs(uv, folder, python):
                self._run(name, command, lock_fd, cwd=where)
        except subprocess.CalledProcessError as error:
            # uv parses a requirements file differently: a file that it rejects may be valid for pip
            if error.cmd != "uv pip install" or error.returncode != _UV_CANNOT_READ or not self.lock.endswith(".txt"):
                raise
            self._say("uv cannot read %s, pip tries" % self.spec.lock)
            self._run("python -m ensurepip", [python, "-I", "-m", "ensurepip"], lock_fd)
            for name, command in self._installs("", folder, python):
                self._run(name, command, lock_fd, cwd=where)

    def _installs(self, uv: str, folder: str, python: str) -> Iterator[Tuple[str, List[str]]]:
        """The commands to run, in order, each with a name for messages."""
        # they run in the project's folder, for paths in its files; -I keeps its modules out of pip
        pip = "uv pip install" if uv else "pip install"
        wheels = ["--no-index", "--find-links", self.spec.wheels] if self.spec.wheels else []
        install = (
            [uv, "pip", "install", "--python", python] if uv else [python, "-I", "-m", "pip", "install"]
        ) + wheels
        lock, besides = [], list(self.spec.requires)
        if os.path.basename(self.lock) == "uv.lock":
            if not uv:
                yield _GETTING_UV, [*install, "uv"]
                uv = os.path.join(folder, "bin", "uv")
            self.env["UV_PROJECT_ENVIRONMENT"] = folder
            for name, command in _sync(uv, folder, os.path.dirname(self.lock), wheels):
                yield name, command
        elif os.path.basename(self.lock) == "pyproject.toml":
            lock = ["-e", os.path.dirname(self.lock)]
        elif self.lock:
            lock = ["-r", self.lock]
            with open(self.lock, "rb") as f:
                if b"--hash" in f.read():  # then each one needs a hash
                    yield pip, install + lock
                    lock = []
        if lock or besides:
            yield pip, install + lock + besides

    def _run(self, name: str, command: List[str], lock_fd: int, *, cwd: str = "/") -> None:
        """Runs a command with its output in the log. Raises CalledProcessError with its last lines if it fails."""
        last: Deque[str] = deque(maxlen=3)
        process = subprocess.Popen(
            command,
            env=self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[lock_fd],
        )
        assert process.stdout is not None
        for line in process.stdout:
            for value in self._hidden:
                line = line.replace(value, b"****")
            self.log.write(line)
            text = line.decode("utf-8", "replace").strip()
            if text:
                last.append(text)
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, name, " / ".join(last))

    def _say(self, line: str) -> None:
        note(self.log, line)


_UV_CANNOT_READ = 2
_GETTING_UV = "pip install uv"


def _sync(uv: str, folder: str, project: str, wheels: List[str]) -> Iterator[Tuple[str, List[str]]]:
    """The commands that install a uv.lock like uv sync; with wheels, its versions from these wheels, which the lock
    does not contain."""
    python, here = os.path.join(folder, "bin", "python"), ["--directory", project]
    if not wheels:
        # inexact: otherwise uv would remove itself
        yield "uv sync", [uv, *here, "sync", "--frozen", "--inexact", "--python", python]
        return
    listed = os.path.join(folder, "locked.txt")
    yield "uv export", [uv, *here, "export", "--frozen", "--no-hashes", "--quiet", "--output-file", listed]
    yield "uv pip install", [uv, *here, "pip", "install", "--python", python, *wheels, "-r", listed]


def note(log: BinaryIO, line: str) -> None:
    log.write(("[torchferry] %s\n" % line).encode("utf-8", "surrogateescape"))
    log.flush()


def forms_of(value: str) -> List[bytes]:
    """How a variable's value, or a line of it, may appear in a program's output, the longest first. Values too short to
    be secret are left out."""
    from urllib.parse import quote

    found = set()
    for part in (value, *(line.strip() for line in value.splitlines())):
        if len(part) >= 4:
            found |= {part, quote(part, safe=""), json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]}
    return sorted((form.encode("utf-8", "surrogateescape") for form in found), key=len, reverse=True)


def _is_complete(folder: str) -> bool:
    # the base interpreter may have been removed since: then its link leads nowhere
    return os.path.exists(os.path.join(folder, "COMPLETE")) and os.path.exists(os.path.join(folder, "bin", "python"))


def _version(text: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
