"""Random sequences of file operations: on a dozen paths, with four descriptors."""

from __future__ import annotations

import errno
import os
import random
from typing import Any

from tests.world.same.cases import Libraries, tree

PATHS = [
    "a",
    "b",
    "c",
    "one",
    "one/a",
    "one/b",
    "two",
    "two/a",
    "two/b",
    "one/sub",
    "one/sub/a",
    "a/b",
    ".",
    "..",
    "one/",
    "a/",
    "one/../a",
    "two/.",
]
LINKED = ["a", "b", "one", "one/a", "../a", "../two", "missing", "sub", ".", "one/sub"]
FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_RDWR | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT | os.O_APPEND,
    os.O_RDONLY | os.O_NOFOLLOW,
    os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
    os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW,
    os.O_WRONLY | os.O_TRUNC,
    os.O_RDONLY | os.O_CREAT,
)
Step = tuple[Any, ...]


def make_sequence(seed: int, length: int = 40) -> list[Step]:
    """(name, arguments); descriptors are numbers of four places to keep one in."""
    chance = random.Random(f"sequence {seed}")

    def path() -> str:
        return chance.choice(PATHS)

    def slot() -> int:
        return chance.randrange(4)

    def size() -> int:
        return chance.choice((0, 1, 3, 10, 5000))

    makers = {
        "open": lambda: (slot(), path(), chance.choice(FLAGS), chance.choice((None, None, None, slot()))),
        "close": lambda: (slot(),),
        "dup": lambda: (slot(), slot()),
        "read": lambda: (slot(), size()),
        "write": lambda: (slot(), chance.choice((b"", b"x", b"hello", b"0123456789" * 30))),
        "pread": lambda: (slot(), size(), size()),
        "pwrite": lambda: (slot(), b"pw", size()),
        "lseek": lambda: (
            slot(),
            chance.choice((-3, 0, 2, 400)),
            chance.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END)),
        ),
        "ftruncate": lambda: (slot(), size()),
        "truncate": lambda: (path(), size()),
        "fstat": lambda: (slot(),),
        "where": lambda: (slot(),),
        "mkdir": lambda: (path(),),
        "makedirs": lambda: (path(), chance.random() < 0.5),
        "rmdir": lambda: (path(),),
        "unlink": lambda: (path(),),
        "rename": lambda: (path(), path()),
        "link": lambda: (path(), path(), chance.random() < 0.3),
        "link_open": lambda: (slot(), path()),
        "symlink": lambda: (chance.choice(LINKED), path()),
        "readlink": lambda: (path(),),
        "stat": lambda: (path(),),
        "lstat": lambda: (path(),),
        "listdir": lambda: (path(),),
        "realpath": lambda: (path(),),
        "rmtree": lambda: (path(),),
        "flock": lambda: (slot(), chance.choice((1, 2, 1, 2, 8))),
    }
    often = ["open", "mkdir", "rename", "write", "symlink", "link"]
    names = [*makers, *often, *often]
    steps: list[Step] = [("mkdir", "one"), ("mkdir", "two")]
    for _ in range(length):
        name = chance.choice(names)
        steps.append((name, *makers[name]()))
    return steps


def _told(stat: Any) -> tuple[str, int, int]:
    is_folder = stat.st_mode >> 12 == 4
    return oct(stat.st_mode), 0 if is_folder else stat.st_nlink, 0 if is_folder else stat.st_size


class Player:
    def __init__(self, m: Libraries) -> None:
        self.m = m
        self.above = m.os.path.dirname(m.here)
        self.fds: dict[int, int] = {}

    def open(self, slot: int, path: str, flags: int, at: int | None) -> str:
        fd = self.m.os.open(path, flags, 0o640, dir_fd=None if at is None else self.fds.get(at, 999))
        self._keep(slot, fd)
        return "opened"

    def _keep(self, slot: int, fd: int) -> None:
        former = self.fds.get(slot)
        self.fds[slot] = fd
        if former is not None:
            self.m.os.close(former)

    def close(self, slot: int) -> None:
        self.m.os.close(self.fds.pop(slot, 999))

    def dup(self, slot: int, to: int) -> None:
        self._keep(to, self.m.os.dup(self.fds.get(slot, 999)))

    def fstat(self, slot: int) -> Any:
        return _told(self.m.os.fstat(self.fds.get(slot, 999)))

    def where(self, slot: int) -> Any:
        return (
            self.m.os.readlink(f"/proc/self/fd/{self.fds.get(slot, 999)}")
            .replace(self.m.here, "HERE")
            .replace(self.above, "ABOVE")
        )

    def lseek(self, slot: int, position: int, how: int) -> Any:
        fd = self.fds.get(slot, 999)
        is_folder = self.m.os.fstat(fd).st_mode >> 12 == 4  # a matter of the file system
        return None if is_folder else self.m.os.lseek(fd, position, how)

    def stat(self, path: str) -> Any:
        return _told(self.m.os.stat(path))

    def lstat(self, path: str) -> Any:
        return _told(self.m.os.lstat(path))

    def listdir(self, path: str) -> Any:
        return sorted(self.m.os.listdir(path))

    def realpath(self, path: str) -> Any:
        return self.m.os.path.realpath(path).replace(self.m.here, "HERE").replace(self.above, "ABOVE")

    def makedirs(self, path: str, exist_ok: bool) -> None:
        self.m.os.makedirs(path, exist_ok=exist_ok)

    def link(self, source: str, path: str, follow: bool) -> None:
        self.m.os.link(source, path, follow_symlinks=follow)

    def link_open(self, slot: int, path: str) -> None:
        fd = self.fds.get(slot, 999)
        here = self.m.os.open(".", self.m.os.O_RDONLY)
        try:
            self.m.os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=here, follow_symlinks=True)
        finally:
            self.m.os.close(here)

    def rmtree(self, path: str) -> None:
        if path not in (".", "..", "two/."):
            self.m.shutil.rmtree(path)

    def flock(self, slot: int, how: int) -> None:
        self.m.fcntl.flock(self.fds.get(slot, 999), how | self.m.fcntl.LOCK_NB)

    def play(self, name: str, *words: Any) -> Any:
        if hasattr(self, name):
            return getattr(self, name)(*words)
        if name in ("read", "write", "pread", "pwrite", "ftruncate"):
            return getattr(self.m.os, name)(self.fds.get(words[0], 999), *words[1:])
        return getattr(self.m.os, name)(*words)


def run_sequence(m: Libraries, steps: list[Step]) -> list[Any]:
    """What each step gives, and what is there at the end."""
    player = Player(m)
    answers: list[Any] = []
    for step in steps:
        try:
            answer = player.play(*step)
        except OSError as refused:
            text = str(refused).replace(m.here, "HERE")
            for fd in player.fds.values():
                text = text.replace(f"/fd/{fd}'", "/fd/N'")
            answer = f"{errno.errorcode.get(refused.errno or 0)} {type(refused).__name__} {text}"
        answers.append(answer)
    for fd in player.fds.values():
        m.os.close(fd)
    answers.append(tree(m))
    return answers
