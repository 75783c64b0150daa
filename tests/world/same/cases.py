"""What a case is: a function of the libraries, whose answer does not depend on which Linux they lead into."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Libraries = SimpleNamespace
"""os, time, signal, ... and `open`; `here`: the case's folder, empty and the current one; `fork(body)`: a pid;
`child(name, *words)`: the command of a program of children.py."""
Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    assert function.__name__ not in CASES, function.__name__
    CASES[function.__name__] = function
    return function


def tried(call: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """What a call gives, or how it is refused: the exception's class and all that it says."""
    try:
        return call(*args, **words)
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}"


def put(m: Libraries, path: str, data: bytes = b"") -> str:
    with m.open(path, "wb") as file:
        file.write(data)
    return path


def open_at(m: Libraries, path: str, *flags: str, **words: Any) -> int:
    wanted = 0
    for flag in flags:
        wanted |= getattr(m.os, f"O_{flag}")
    fd: int = m.os.open(path, wanted, 0o640, **words)
    return fd


def read(m: Libraries, path: str) -> bytes:
    with m.open(path, "rb") as file:
        found: bytes = file.read()
    return found


def read_all(m: Libraries, fd: int) -> bytes:
    parts = []
    while data := m.os.read(fd, 1 << 16):
        parts.append(data)
    return b"".join(parts)


def tree(m: Libraries, top: str = ".") -> dict[str, Any]:
    """All that lies below: the names of folders, the targets of links, the content of files and how many names."""
    found: dict[str, Any] = {}
    for name in sorted(m.os.listdir(top)):
        path = m.os.path.join(top, name)
        if m.os.path.islink(path):
            found[name] = "-> " + m.os.readlink(path)
        elif m.os.path.isdir(path):
            found[name] = tree(m, path)
        else:
            found[name] = (read(m, path), m.os.stat(path).st_nlink)
    return found


def until(m: Libraries, holds: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Waits for what another process does; the last answer."""
    ends = m.time.monotonic() + seconds
    while not (found := holds()) and m.time.monotonic() < ends:
        m.time.sleep(0.005)
    return found


def run_case(m: Libraries, name: str) -> Any:
    try:
        return CASES[name](m)
    except Exception as failed:
        import traceback

        where = traceback.extract_tb(failed.__traceback__)[1]
        return f"line {where.lineno}: {type(failed).__name__}: {failed}"
