"""Environments built on the host: a venv from a requirements file and requirements, once per content.

Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import json
import os
import re
import subprocess
from collections import deque
from contextlib import contextmanager
from typing import BinaryIO, Deque, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from ..host.disk import fail
from ..host.errors import AgentError
from ..host.files import blake2b
from ..host.layout import Root
from ..host.locks import take_lock
from .spec import PythonSpec

OLDEST = (3, 10)
"""The base of an environment is the first interpreter of the host that is at least this new, else simply the first."""
MISSING_HINT = (
    "name an interpreter that has them with --python P, or ship wheels for a host without internet with --wheels DIR"
)
_UNWANTED = ("PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONHOME")


class Interpreter(NamedTuple):
    """An interpreter that runs, and which of the requirements it does not meet, each with what is there instead."""

    path: str  # absolute, as sys.executable
    version: str
    unmet: List[str]

    def __str__(self) -> str:
        return "%s (Python %s) lacks %s" % (self.path, self.version, ", ".join(self.unmet))


def read_lock(path: str) -> bytes:
    """What a requirements file asks for, with the files that it names; b"" when it asks for nothing.

    AgentError when a file is missing, or when it installs a folder: an environment outlives the job whose code that is.
    """
    try:
        with open(path, "rb") as f:
            content = f.read()
    except OSError as error:
        raise AgentError("host", "cannot read %s of the project: %s" % (os.path.basename(path), error.strerror))
    lines = [re.split(rb"(?:^|\s)#", line)[0].strip() for line in content.splitlines()]
    wanted = [line for line in lines if line]
    for line in wanted:
        if re.match(rb"(-e\s*|--editable[\s=]+)?(\.|/|file:)", line):
            raise AgentError(
                "host",
                "%s installs a folder (%s)" % (os.path.basename(path), line.decode("utf-8", "replace")),
                "leave that line out: the job runs in its own copy of the code; or name an interpreter with --python P",
            )
    # a file at an address is the installer's to read
    named = [re.match(rb"(?:-r|-c|--requirement|--constraint)[\s=]*(?!\S+://)(\S+)", line) for line in wanted]
    others = [os.path.join(os.path.dirname(path), os.fsdecode(match.group(1))) for match in named if match]
    return b"\n".join(wanted + [read_lock(other) for other in others])


class Building:
    """Finds or builds the environment for a lock (as read) and requirements."""

    def __init__(
        self, spec: PythonSpec, lock: bytes, code_dir: str, root: Root, env: Dict[str, str], log: BinaryIO
    ) -> None:
        self.spec, self.lock, self.code_dir, self.root, self.log = spec, lock, code_dir, root, log
        self.env = {name: value for name, value in env.items() if name not in _UNWANTED}
        self.env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")

    def environment(self, found: Sequence[Interpreter]) -> str:
        """The interpreter of the environment. `found`: the host's interpreters, at least one. AgentError when it cannot
        be built, with what failed and what the host's own interpreters lack."""
        base = next((i for i in found if _version(i.version) >= OLDEST), found[0])
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
            raise AgentError("host", message + (" (of the host, %s)" % lacking if lacking else ""), MISSING_HINT)
        return python

    def _key(self, base: Interpreter) -> str:
        asked = [
            self.lock.decode("latin-1"),
            self.spec.requires,
            self.spec.wheels,
            base.version,
            os.uname().machine,
        ]
        return blake2b(json.dumps(asked).encode("ascii"), digest_size=10).hexdigest()

    @contextmanager
    def _only_one(self, path: str) -> Iterator[int]:
        """Holds the lock of an environment. The installers inherit it: one that outlives its agent still holds it."""
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
        uv = shutil.which("uv", path=self.env.get("PATH", os.defpath))
        if uv:
            self._run("uv venv", [uv, "venv", "--python", base.path, folder], lock_fd)
            install = [uv, "pip", "install", "--python", python]
        else:
            self._run("python -m venv", [base.path, "-m", "venv", folder], lock_fd)
            install = [python, "-m", "pip", "install"]
        wanted = self._wanted()
        if wanted:
            self._run("uv pip install" if uv else "pip install", install + wanted, lock_fd)
        with open(os.path.join(folder, "COMPLETE"), "w", encoding="utf-8") as f:
            f.write(base.path + "\n")

    def _wanted(self) -> List[str]:
        wheels = ["--no-index", "--find-links", self.spec.wheels] if self.spec.wheels else []
        lock = ["-r", os.path.join(self.code_dir, self.spec.lock)] if self.lock and self.spec.lock else []
        asked = lock + list(self.spec.requires)
        return wheels + asked if asked else []

    def _run(self, name: str, command: List[str], lock_fd: int) -> None:
        """Runs a command with its output in the log. CalledProcessError with its last lines when it fails."""
        last: Deque[str] = deque(maxlen=3)
        process = subprocess.Popen(
            command,
            env=self.env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[lock_fd],
        )
        assert process.stdout is not None
        for line in process.stdout:
            self.log.write(line)
            text = line.decode("utf-8", "replace").strip()
            if text:
                last.append(text)
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, name, " / ".join(last))

    def _say(self, line: str) -> None:
        self.log.write(("[torchferry] %s\n" % line).encode("utf-8", "surrogateescape"))
        self.log.flush()


def _is_complete(folder: str) -> bool:
    # the base may have been removed since: then its link leads nowhere
    return os.path.exists(os.path.join(folder, "COMPLETE")) and os.path.exists(os.path.join(folder, "bin", "python"))


def _version(text: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
