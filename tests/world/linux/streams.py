"""`open` of the simulated Linux, under Python's own buffers."""

from __future__ import annotations

import errno
import io
import os
import stat
from typing import Any

from tests.world.linux import calls
from tests.world.linux.calls import kernel, this


class Raw(io.RawIOBase):
    """An open file of the world under Python's own buffers."""

    def __init__(self, fd: int, mode: str, name: Any, close: bool = True) -> None:
        super().__init__()
        self._fd = fd
        self._mode = mode
        self._closes = close
        self._process = this()
        self.name = name
        self.mode = mode

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return "r" in self._mode or "+" in self._mode

    def writable(self) -> bool:
        return "r" not in self._mode or "+" in self._mode

    def seekable(self) -> bool:
        file = self._process.fds.get(self._fd)
        return file is not None and file.inode.pipe is None

    def readinto(self, buffer: Any) -> int:
        data = calls.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        parts = []
        while data := calls.read(self._fd, 1 << 20):
            parts.append(data)
        return b"".join(parts)

    def write(self, data: Any) -> int:
        return calls.write(self._fd, data)

    def seek(self, position: int, how: int = 0) -> int:
        return calls.lseek(self._fd, position, how)

    def tell(self) -> int:
        return calls.lseek(self._fd, 0, os.SEEK_CUR)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        calls.ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        if not self.closed:
            try:
                if self._closes and not self._process.is_over:
                    current = kernel().current
                    if current is not None and current.process is self._process:
                        calls.close(self._fd)
            finally:
                super().close()


def open_(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """As the builtin."""
    kind = mode.replace("b", "").replace("t", "")
    if isinstance(file, int):
        fd = file
        if fd not in this().fds:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    else:
        flags = {
            "r": os.O_RDONLY,
            "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
            "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        }
        flags["a"] = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        wanted = flags[kind[0]]
        if "+" in kind:
            wanted = wanted & ~os.O_WRONLY | os.O_RDWR
        path = os.fspath(file)
        if kind == "r" and buffering != 0 and (content := calls.read_proc(path)) is not None:
            whole = io.BytesIO(content)
            return whole if "b" in mode else io.TextIOWrapper(whole, encoding or "utf-8", errors, newline)
        fd = calls.open_(path, wanted | os.O_CLOEXEC, 0o666)
        if this().fds[fd].inode.kind == stat.S_IFDIR:
            calls.close(fd)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raw = Raw(fd, kind, file, closefd)
    if kind[0] == "a" and raw.seekable():
        raw.seek(0, os.SEEK_END)
    if buffering == 0:
        return raw
    buffered: Any
    if "+" in kind:
        buffered = io.BufferedRandom(raw)
    elif raw.writable():
        buffered = io.BufferedWriter(raw)
    else:
        buffered = io.BufferedReader(raw)
    if "b" in mode:
        return buffered
    text: Any = io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)
    text.mode = mode
    return text


def file_io(fd: Any, mode: str = "r", closefd: bool = True) -> Raw:
    return Raw(fd, mode.replace("b", ""), fd, closefd)
