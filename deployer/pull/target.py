"""The target folder of a pull. Files are written into a hidden folder below it and renamed into place, whole and
verified.

A host chooses the file names, so no link below the target is followed: every folder is opened through its parent.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deployer.agent.requests.files.view import DIGEST_BYTES
from deployer.errors import ThisMachine

PARTIAL_FOLDER = ".pulling"
SAME_TIME_NS = 1_000_000
"""Times that differ by less than this count as equal: not every file system stores nanoseconds."""
COPY_BYTES = 1 << 20
HEADROOM_BYTES = 16 << 20
"""Free space that is left for journals and the file system's own blocks."""


class CannotWrite(ThisMachine):
    def __init__(self, message: str, *, reason: str, hint: str) -> None:
        super().__init__(f"{message}: {reason}", hint=hint)
        self.reason = reason


class PullTarget:
    """The target folder of one pull; use it as a context. Refuses a second pull into the same folder at the same
    time."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._top = self._partial = self._lock = -1
        self._locked = False
        self._made = not target.exists()

    def __enter__(self) -> PullTarget:
        with self._explained("."):
            self.target.mkdir(parents=True, exist_ok=True)
            self._top = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY)
            self._partial = _open_folder(self._top, [PARTIAL_FOLDER], make=0o700)
            if os.fstat(self._partial).st_uid != os.geteuid():
                whose = f"{self.target / PARTIAL_FOLDER} belongs to somebody else"
                raise ThisMachine(whose, hint="remove it and pull again")
            self._lock = os.open("lock", _CREATE, 0o600, dir_fd=self._partial)
            self._take_lock()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._locked and os.listdir(self._partial) == ["lock"]:  # noqa: PTH208 (a descriptor); nothing to go on with
            self.clear()
            if self._made:
                with suppress(OSError):  # it is not empty
                    self.target.rmdir()
        for fd in (self._lock, self._partial, self._top):
            if fd >= 0:
                os.close(fd)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._locked = True
        except BlockingIOError:
            raise ThisMachine(
                f"another pull is bringing files to {self.target}", hint="wait for it, or name another folder with --to"
            ) from None

    # --- existing files -----------------------------------------------------------------------------------------------

    def find(self, path: str) -> os.stat_result | None:
        """The regular file at this path; None if there is none, or only behind a link."""
        try:
            with self._folder_of(path, make=False) as (folder, name):
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return info if stat.S_ISREG(info.st_mode) else None

    def has(self, path: str, *, size: int, mtime_ns: int) -> bool:
        """Whether a regular file at this path has this size and time."""
        info = self.find(path)
        return info is not None and info.st_size == size and abs(info.st_mtime_ns - mtime_ns) <= SAME_TIME_NS

    def digest(self, path: str, start: int, length: int) -> str:
        """The hash of a part of an existing file."""
        with self._folder_of(path, make=False) as (folder, name):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            return digest_of(fd, start, length)
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        """Free bytes on the target's disk."""
        info = os.fstatvfs(self._top)
        return info.f_bavail * info.f_frsize

    def has_room(self) -> bool:
        """Whether the disk has more than HEADROOM_BYTES free."""
        return self.free_bytes() >= HEADROOM_BYTES

    def folds_case(self) -> bool:
        """Whether this disk ignores case in file names."""
        try:
            os.stat("LOCK", dir_fd=self._partial)
        except OSError:
            return False
        return True

    # --- writing files ------------------------------------------------------------------------------------------------

    def open_part(self, name: str) -> int:
        """A descriptor of a partial file or its journal, which may exist from an earlier pull."""
        return os.open(name, _CREATE, 0o600, dir_fd=self._partial)

    def drop_part(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._partial)
        except FileNotFoundError:
            pass

    def part_size(self, name: str) -> int:
        """Size of a partial file or a journal; 0 without one."""
        try:
            return os.stat(name, dir_fd=self._partial, follow_symlinks=False).st_size
        except OSError:
            return 0

    def publish(self, part: str, path: str, *, mtime_ns: int) -> None:
        """Renames a complete partial file into place."""
        with self._explained(path), self._folder_of(path, make=True) as (folder, name):
            os.utime(part, ns=(mtime_ns, mtime_ns), dir_fd=self._partial, follow_symlinks=False)
            os.rename(part, name, src_dir_fd=self._partial, dst_dir_fd=folder)

    def append(self, part: str, path: str, *, start: int, mtime_ns: int) -> None:
        """Writes a partial file after the first `start` bytes of an existing file.

        If it is interrupted, the file is longer than before, and the next pull continues it.
        """
        with self._explained(path), self._folder_of(path, make=False) as (folder, name):
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
            with os.fdopen(fd, "r+b", buffering=0) as file, os.fdopen(self.open_part(part), "rb") as tail:
                file.seek(start)
                shutil.copyfileobj(tail, file, COPY_BYTES)
                os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
        self.drop_part(part)

    def publish_folder(self, path: str, names: Sequence[str]) -> None:
        """Renames a complete folder, with only these files in it, into place; removes an older one there."""
        staged = self.target / PARTIAL_FOLDER / path
        for found in staged.rglob("*"):
            if not found.is_dir() and str(found.relative_to(staged)) not in names:
                found.unlink()  # of an earlier checkpoint of the same name
        self.drop_folder(_REPLACED)
        with (
            self._explained(path),
            self._folder_of(path, make=True) as (folder, name),
            self._folder_of(f"{PARTIAL_FOLDER}/{path}", make=False) as (gathered, same),
        ):
            try:
                os.rename(name, _REPLACED, src_dir_fd=folder, dst_dir_fd=self._partial)
            except FileNotFoundError:
                pass
            os.rename(same, name, src_dir_fd=gathered, dst_dir_fd=folder)
        self.drop_folder(_REPLACED)

    def drop_folder(self, path: str) -> None:
        """Removes what was copied of a folder."""
        staged = self.target / PARTIAL_FOLDER / path
        if staged.is_symlink():
            staged.unlink()
        elif staged.exists():
            shutil.rmtree(staged)

    def clear(self) -> None:
        """Removes the hidden folder."""
        shutil.rmtree(self.target / PARTIAL_FOLDER, ignore_errors=True)

    @contextmanager
    def _folder_of(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        *folders, name = path.split("/")
        fd = _open_folder(self._top, folders, make=0o777 if make else None)
        try:
            yield fd, name
        finally:
            os.close(fd)

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.write_error(path, error) from None

    def write_error(self, path: str, error: OSError) -> CannotWrite:
        what = f"cannot write {self.target / path}"
        return CannotWrite(what, reason=self.why_not(error, path), hint="--to names another folder")

    def why_not(self, error: OSError | CannotWrite, path: str = "it") -> str:
        """Why something cannot be written here, as text."""
        if isinstance(error, CannotWrite):
            return error.reason
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return f"{error.filename or path} is a link or a file where a folder is needed; links are not followed"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            info = os.fstatvfs(self._top) if self._top >= 0 else None
            used_up = info is not None and info.f_files and not info.f_favail
            return "this disk has no inodes left" if used_up else "this disk has no room left"
        if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL):
            return f"this file system does not take the name ({error.strerror})"
        return f"here: {error.strerror or error}"


_REPLACED = "replaced"
_CREATE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


def _open_folder(top: int, names: Sequence[str], *, make: int | None) -> int:
    """Opens a folder below `top` name by name, without following a link; creates missing ones with the mode `make`."""
    fd = os.dup(top)
    for name in names:
        try:
            if make is not None:
                try:
                    os.mkdir(name, make, dir_fd=fd)
                except FileExistsError:
                    pass
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        finally:
            os.close(fd)
        fd = child
    return fd


def digest_of(fd: int, offset: int, length: int) -> str:
    """The hash of a part of a file, as the host computes it."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    while length > 0 and (data := os.pread(fd, min(length, COPY_BYTES), offset)):
        digest.update(data)
        offset, length = offset + len(data), length - len(data)
    return digest.hexdigest()
