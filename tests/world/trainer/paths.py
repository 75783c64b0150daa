"""`pathlib.Path` of the simulated Linux, as far as the trainer uses it: each method makes the calls of the real one."""

from __future__ import annotations

import fnmatch
import pathlib
from collections.abc import Iterator
from typing import Any

from tests.world.linux import calls
from tests.world.linux.calls import kernel, this
from tests.world.linux.modules import OS
from tests.world.linux.streams import open_

MISSING = (FileNotFoundError, NotADirectoryError)


def hidden_from() -> set[str]:
    """What this process does not see yet of what others have named: so does a network file system."""
    find = getattr(kernel(), "hidden", None)
    return set() if find is None else find(this())


class Path(pathlib.PurePosixPath):
    """A path of the world."""

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return calls.stat_(self, follow_symlinks=follow_symlinks)

    def exists(self) -> bool:
        try:
            self.stat()
        except MISSING:
            return False
        return True

    def is_dir(self) -> bool:
        return bool(OS.path.isdir(self))

    def is_file(self) -> bool:
        return bool(OS.path.isfile(self))

    def absolute(self) -> Path:
        return self if self.is_absolute() else Path(OS.getcwd(), self)

    def readlink(self) -> Path:
        return Path(calls.readlink(self))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        try:
            calls.mkdir(self, mode)
        except FileNotFoundError:
            if not parents or self.parent == self:
                raise
            Path(self.parent).mkdir(parents=True, exist_ok=True)
            self.mkdir(mode, parents=False, exist_ok=exist_ok)
        except OSError:
            if not exist_ok or not self.is_dir():
                raise

    def open(self, mode: str = "r", encoding: str | None = None, errors: str | None = None) -> Any:
        return open_(self, mode, encoding=encoding, errors=errors)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self) -> str:
        with self.open() as file:
            return str(file.read())

    def write_bytes(self, data: Any) -> int:
        with self.open("wb") as file:
            return int(file.write(data))

    def write_text(self, text: str, errors: str | None = None) -> int:
        with self.open("w", errors=errors) as file:
            return int(file.write(text))

    def rename(self, target: Any) -> Path:
        calls.rename(self, target)
        return Path(target)

    replace = rename

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            calls.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def iterdir(self) -> Iterator[Path]:
        names, hidden = calls.listdir(self), hidden_from()
        yield from [self / name for name in names if name not in hidden]

    def glob(self, pattern: str) -> Iterator[Path]:
        """Of one part, as those of the trainer are. A folder that is not there, or is no folder, holds nothing."""
        assert "/" not in pattern, pattern
        try:
            names = calls.listdir(self)
        except OSError:
            return
        yield from [self / name for name in fnmatch.filter(names, pattern)]
