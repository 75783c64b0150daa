"""The wrapper of each rank: writes its output to a separate log file, and records its process and its end.

torchrun starts `python -u rank.py PROGRAM ARGS...`; this starts `python -u PROGRAM ARGS...` (with `--exec` before it:
PROGRAM itself, if it is not Python). It runs in the job's interpreter, as a script, and imports none of our modules.
Without TORCHFERRY_RUN_DIR (a command copied from a dry run) it becomes the program and records nothing.

It runs in torchrun's session, and the program in its own process group, so a signal that torchrun sends to the group
arrives once. If the wrapper is killed (torchrun's last step), the program dies with it. The supervisor's end affects
neither.
Stdlib only, Python 3.8, Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would delay every start by milliseconds
    from typing import Any, Callable, Dict, List, NoReturn, Tuple

RUN_DIR_ENV = "TORCHFERRY_RUN_DIR"  # as in host/layout.py
ATTEMPT_ENV = "TORCHFERRY_ATTEMPT"
GROUP_ENV = "TORCHFERRY_GROUP"

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_RECORD_BYTES = 1024
_WATCHED = {signal.SIGCHLD, *_FORWARDED}
_STOPPED_BEFORE_START = 128 + signal.SIGTERM


def main(args: List[str]) -> int:
    """The program's exit code (128 + N for signal N), or 0 after a stop was requested: torchrun terminates all ranks
    when one fails, and another rank may still be saving. The record contains the true code."""
    argv = args[1:] if args[:1] == ["--exec"] else [sys.executable, "-u", *args]
    run_dir = os.environ.get(RUN_DIR_ENV)
    if not run_dir:
        _become(argv)
    attempt = "attempt_" + os.environ.get(ATTEMPT_ENV, "1")
    rank = int(os.environ.get("RANK", "0"))
    group = os.environ.get(GROUP_ENV, "")
    log = os.path.join(run_dir, "logs", attempt, group, "rank_%d.log" % rank)
    record = os.path.join(run_dir, "ranks", attempt, group, "rank_%d.json" % rank)
    code = _run(argv, rank, log, record, os.path.join(run_dir, "control", "stop.json"))
    return 0 if os.path.exists(os.path.join(run_dir, "control", "stop.json")) else code


def _run(argv: List[str], rank: int, log: str, record: str, stop_flag: str) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # from here on they wait in the queue for _wait
    started = {
        "job": os.path.basename(os.environ.get(RUN_DIR_ENV, "")),
        "rank": rank,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "wrapper": {"pid": os.getpid(), "start_time": _start_time(os.getpid())},
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if os.path.exists(stop_flag):
        _write(record, {**started, "pid": 0, "start_time": 0, **_end(_STOPPED_BEFORE_START, None)})
        return _STOPPED_BEFORE_START
    pid, inode = _start(argv, log)
    started.update(pid=pid, start_time=_start_time(pid), log_inode=inode)
    _write(record, started, sync=False)  # a stop looks for it from now on; a slow disk must not keep it back
    code, signum = _wait(pid)
    _write(record, {**started, **_end(code, signum)})
    return code


def _start(argv: List[str], log: str) -> Tuple[int, int]:
    """The program's PID, and its log's inode, because the log may be renamed later."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    wrapper = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def program() -> NoReturn:
        os.setpgid(0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != wrapper:  # it was killed before the line above
            os._exit(1)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _become(argv)

    pid = _start_copy(program)
    inode = os.fstat(output).st_ino
    os.close(output)
    return pid, inode


def _start_copy(body: Callable[[], NoReturn]) -> int:
    """The PID of a child that is a copy of this process and runs `body`, which ends it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(127)
    return pid


def _become(argv: List[str]) -> NoReturn:
    """Replaces this process by the program; ends it with 127 (not found) or 126 (not executable) as a shell does."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the program would inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(argv[0], argv)
    except OSError as e:
        os.write(2, ("cannot start %s: %s\n" % (argv[0], e.strerror)).encode("utf-8", "replace"))
        code = 127 if isinstance(e, FileNotFoundError) else 126
    os._exit(code)


def _wait(pid: int) -> Tuple[int, Any]:
    """(code, signal or None) once the program has ended; forwards every signal until then."""
    while True:
        signum = signal.sigwait(_WATCHED)
        if signum != signal.SIGCHLD:
            os.kill(pid, signum)  # not reaped yet, so the pid is still its own
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return (
                (128 + os.WTERMSIG(status), os.WTERMSIG(status))
                if os.WIFSIGNALED(status)
                else (os.WEXITSTATUS(status), None)
            )


def _end(code: int, signum: Any) -> Dict[str, Any]:
    return {"code": code, "signal": signum, "ended_at_ns": time.time_ns(), "ended_mono_ns": time.monotonic_ns()}


def _start_time(pid: int) -> int:
    with open("/proc/%d/stat" % pid, "rb") as f:
        text = f.read()
    return int(text[text.rindex(b")") + 2 :].split()[19])


def _write(path: str, value: Dict[str, Any], *, sync: bool = True) -> None:
    """Writes the record atomically. A full disk must not hide the program's code: in that case this overwrites the
    record of the start, which has the same length and needs no new space."""
    import json  # here: by now the program has been started

    temporary = "%s.%d.tmp" % (path, os.getpid())
    data = json.dumps(value).encode("ascii").ljust(_RECORD_BYTES)
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            if sync:
                os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        if _write_over(path, data):
            _remove(temporary)
            return
        try:
            os.write(2, ("cannot write %s: %s\n" % (path, e.strerror)).encode("utf-8", "replace"))
        except OSError:  # the log may be on the same full disk
            pass
        _remove(temporary)


def _write_over(path: str, data: bytes) -> bool:
    """Overwrites the existing record with one call, so that no process reads a part of it. Returns whether that was
    possible."""
    try:
        record = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.fstat(record).st_size == len(data) and os.pwrite(record, data, 0) == len(data)
    except OSError:
        return False
    finally:
        os.close(record)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
