"""Loads the agent's modules: only files that belong to this account, and only undamaged bytecode.

Python accepts bytecode that a full disk, a power cut or a bad disk has damaged. And a root in /tmp can be removed by a
cleaning program and recreated by another account, while a supervisor or an agent still loads modules from it.

A process that starts a Python with the agent runs this file's text first, so it imports nothing from this package.
"""

import errno
import os
import stat
import sys
from _imp import source_hash  # as Python does for bytecode that is checked by hash
from importlib.machinery import BYTECODE_SUFFIXES, SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from typing import Any, Set

_OWNERS: Set[int] = {0, os.getuid()}
_SEAL_BYTES = 8


def _seal(data: bytes) -> bytes:
    return bytes(source_hash(0x7F3, data))


class OwnLoader(SourceFileLoader):
    """Treats bytecode that differs from what was written as missing: Python then compiles the module again."""

    def get_data(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe keeps nobody waiting
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in _OWNERS:
                raise OSError(errno.EPERM, "not a file of the user's own", path)
            with open(fd, "rb", closefd=False) as f:
                data = f.read()
        finally:
            os.close(fd)
        if path.endswith(tuple(BYTECODE_SUFFIXES)):
            data, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
            if seal != _seal(data):
                raise OSError(errno.EIO, "the bytecode is damaged", path)
        return data

    def set_data(self, path: str, data: Any, **mode: Any) -> None:
        super().set_data(path, bytes(data) + _seal(bytes(data)), **mode)


def enter(home: str) -> None:
    """Makes the agent in this folder importable."""

    def find_in(path: str) -> FileFinder:
        if not (path + "/").startswith(home + "/"):
            raise ImportError  # not ours
        return FileFinder(path, (OwnLoader, SOURCE_SUFFIXES))

    _OWNERS.add(os.stat(home).st_uid)  # a file server may say so of all that is the user's
    sys.path_hooks.insert(0, find_in)
    sys.path.append(home)  # behind Python's own modules: nothing there takes the place of one
