"""`subprocess` of the simulated Linux: the programs that the world has (programs.py)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from tests.world.linux import calls, process_calls
from tests.world.linux.calls import kernel, this
from tests.world.linux.inodes import refuse
from tests.world.linux.kernel import Process, S, Thread
from tests.world.linux.streams import open_


class Popen:
    """As subprocess.Popen, of the programs that the world has (programs.py)."""

    def __init__(
        self,
        args: Any,
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        cwd: Any = None,
        env: Any = None,
        start_new_session: bool = False,
        close_fds: bool = True,
        pass_fds: Any = (),
        preexec_fn: Any = None,
        text: bool = False,
        universal_newlines: bool = False,
        encoding: Any = None,
        errors: Any = None,
        bufsize: int = -1,
        process_group: int | None = None,
    ) -> None:
        from tests.world.programs import body_of

        me = kernel().step("spawn")
        self.args = args
        self.returncode: int | None = None
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None
        argv = [os.fsdecode(word) for word in args]
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (me.env if env is None else env).items()}
        ours: list[tuple[str, int]] = []
        theirs: dict[int, Any] = {}
        for number, (wanted, name) in enumerate(((stdin, "stdin"), (stdout, "stdout"), (stderr, "stderr"))):
            if wanted is None:
                file = me.fds.get(number)
                theirs[number] = file.copy() if file is not None else None
            elif wanted == subprocess.PIPE:
                reading, writing = calls.new_pipe(me)
                theirs[number] = reading if number == 0 else writing
                ours.append((name, calls._new_fd(me, writing if number == 0 else reading)))
            elif wanted == subprocess.STDOUT:
                theirs[number] = theirs[1].copy()
            elif wanted == subprocess.DEVNULL:
                fd = calls.open_("/dev/null", os.O_RDWR)
                theirs[number] = me.fds.pop(fd)
            else:
                theirs[number] = me.fds[wanted if isinstance(wanted, int) else wanted.fileno()].copy()
        try:
            folder = me.cwd if cwd is None else _folder(me, os.fsdecode(cwd))
            body = body_of(argv, environment, folder)
        except OSError:
            for file in theirs.values():
                file and file.release()
            for _, fd in ours:
                calls.close(fd)
            raise
        child = kernel().new_process(me, argv, environment)
        child.fds = {number: file for number, file in theirs.items() if file is not None}
        for fd in {*pass_fds, *(() if close_fds or pass_fds else me.inheritable)} - {0, 1, 2}:
            child.fds[fd] = me.fds[fd].copy()
            child.inheritable.add(fd)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python gives a child back what it has itself set to ignored
            child.handlers.pop(number, None)
        child.has_execed = True
        child.cwd = folder
        if start_new_session:
            child.session = child.group = child.pid
        if preexec_fn is not None:
            try:
                preexec_fn_in(child, preexec_fn)
            except Exception:
                kernel().end(child, 255 << 8)
                kernel().reap(child)
                for _, fd in ours:
                    calls.close(fd)
                raise subprocess.SubprocessError("Exception occurred in preexec_fn.") from None
        kernel().start(child, body)
        self.pid = child.pid
        self._encoding = encoding or ("utf-8" if text or universal_newlines else "")
        self._errors = errors or "strict"
        self._has_begun = False
        for name, fd in ours:
            mode = ("w" if name == "stdin" else "r") + ("" if self._encoding else "b")
            setattr(self, name, open_(fd, mode, encoding=self._encoding or None, errors=errors))

    def poll(self) -> int | None:
        if self.returncode is None:
            self._wait(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and timeout is not None:
            me, pid = this(), self.pid
            deadline = kernel().now_ns + int(timeout * S)

            def is_over() -> bool:
                return all(child.is_over for child in me.children if child.pid == pid)

            if not kernel().block(is_over, me.child_ended, deadline_ns=deadline):
                raise subprocess.TimeoutExpired(self.args, timeout)
        if self.returncode is None:
            self._wait(0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, options: int) -> None:
        try:
            pid, status = process_calls.waitpid(self.pid, options)
        except ChildProcessError:
            self.returncode = 0  # somebody else has reaped it
            return
        if pid:
            self.returncode = -(status & 0x7F) if status & 0x7F else status >> 8

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Writes and reads at the same time; after a timeout it can go on."""
        if not self._has_begun:
            self._has_begun = True
            self._left = memoryview(self._encoded(input or b""))
            self._told = {end: bytearray() for end in (self.stdout, self.stderr) if end is not None}
        deadline = None if timeout is None else kernel().now_ns + int(timeout * S)

        def seconds_left() -> float | None:
            left = None if deadline is None else (deadline - kernel().now_ns) / S
            if left is not None and left <= 0:
                told = [bytes(self._told[end]) or None if end else None for end in (self.stdout, self.stderr)]
                raise subprocess.TimeoutExpired(self.args, timeout or 0, *told)
            return left

        while ends := [end for end in (*self._told, self.stdin) if end is not None and not end.closed]:
            if self.stdin in ends and not self._left:
                self._close_stdin()
                continue
            writers = [self.stdin] if self.stdin in ends else []
            readers = [end for end in ends if end is not self.stdin]
            readable, writable, _ = process_calls.select(readers, writers, [], seconds_left())
            for end in readable:
                data = calls.read(end.fileno(), 1 << 15)
                self._told[end] += data
                if not data:
                    end.close()
            if writable:
                try:
                    self._left = self._left[calls.write(self.stdin.fileno(), self._left[: calls.PIPE_BUF]) :]
                except BrokenPipeError:
                    self._left = self._left[:0]
            seconds_left()
        self.wait(seconds_left())
        out, err = (
            None if end is None else self._decoded(bytes(self._told[end])) for end in (self.stdout, self.stderr)
        )
        return out, err

    def _close_stdin(self) -> None:
        try:
            self.stdin.close()
        except BrokenPipeError:
            pass

    def _encoded(self, data: Any) -> bytes:
        return data.encode(self._encoding, self._errors) if isinstance(data, str) else bytes(data)

    def _decoded(self, data: bytes) -> Any:
        if not self._encoding:
            return data
        return data.decode(self._encoding, self._errors).replace("\r\n", "\n").replace("\r", "\n")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            process_calls.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *exc: object) -> None:
        for end in (self.stdout, self.stderr, self.stdin):
            if end is not None:
                end.close()
        self.wait()


def _folder(process: Process, path: str) -> str:
    """The whole path of where a child shall run."""
    inode = kernel().disk.lookup(process, path).inode
    if inode is None or not inode.is_folder:
        raise refuse(errno.ENOENT if inode is None else errno.ENOTDIR, path)
    return inode.place.path() if inode.place is not None else "/"


def preexec_fn_in(child: Process, function: Callable[[], None]) -> None:
    """Runs it as the child, whose thread there is none of yet: nothing comes between."""
    before = kernel().current
    kernel().current, kernel().is_aside = Thread(child, lambda: None), True
    try:
        function()
    finally:
        kernel().current, kernel().is_aside = before, False


def run(
    args: Any,
    *,
    input: Any = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **words: Any,
) -> Any:
    if input is not None:
        words["stdin"] = subprocess.PIPE
    if capture_output:
        words["stdout"] = words["stderr"] = subprocess.PIPE
    with Popen(args, **words) as process:
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, args, out, err)
    return subprocess.CompletedProcess(args, process.returncode, out, err)
