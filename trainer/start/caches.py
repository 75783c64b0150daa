"""Caches that later starts reuse: compiled kernels and Python's bytecode. Imports no torch.

    CACHE/compile/torch-2.11.0+cu130_triton-3.6.0_cudnn_…/    torch.compile's cache; Triton's is in triton/
    CACHE/bytecode-5f2a90c1/                                  bytecode of packages that were installed without it

CACHE is the folder that the deployer names in the environment (in the host's root, so that jobs share it and `gc` finds
it), else torchferry/ in the user's cache folder. The compiler's own keys decide what is valid. But they leave out what
a library built here requires of the machine, and several machines may share a home: so the folder's name has this.
Files in the cache are executed, so a folder that others could write into or replace is not used.
"""

from __future__ import annotations

import atexit
import grp
import hashlib
import os
import platform
import pwd
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from trainer.schema import CACHE_ENV

COMPILER_ENV, TRITON_ENV, BYTECODE_ENV = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPYCACHEPREFIX"
ATTENTION = "cudnn"
"""The kernel that attention prefers (trainer.models.attention). AOTAutograd's keys leave it out: if the order changed
and the folder stayed the same, a run would silently get the kernels of the former order."""
ROOM_BYTES = 512 << 20
"""A disk with fewer free bytes counts as full."""


class CacheError(Exception):
    """A folder cannot be used as a cache."""


class CompileCache(NamedTuple):
    """Variables to add to the environment before torch is imported, and a note for the user if there is no cache."""

    env: dict[str, str]
    note: str | None = None


def open_compile_cache(environ: Mapping[str, str], *, for_cpu: bool = False) -> CompileCache:
    """The folders for compiled code, created if missing, unless the environment already names them.

    Without a usable cache they are in a temporary folder, which is deleted when this process ends. The compiler's
    default, /tmp/torchinductor_USER, is not used, because any user could have created it.
    """
    if environ.get(COMPILER_ENV) and environ.get(TRITON_ENV):
        return CompileCache({})
    note = None
    try:
        root = cache_root(environ)
        folder = root / "compile" / compile_tag(_version("torch"), _version("triton"), machine_tag(for_cpu=for_cpu))
        make_private(folder, below=_checked_from(root, environ), room_bytes=ROOM_BYTES)
    except CacheError as error:
        note = f"note: no compile cache, so every start compiles anew: {error}"
        folder = Path(tempfile.mkdtemp(prefix="torchferry-compile-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    named = {COMPILER_ENV: str(folder), TRITON_ENV: str(folder / "triton")}
    return CompileCache({name: value for name, value in named.items() if not environ.get(name)}, note)


def compile_tag(torch: str | None, triton: str | None, machine: str) -> str:
    """`torch-2.11.0+cu130_triton-3.6.0_cudnn_py3.12_x86_64`; a valid file name for any version text."""
    parts = [f"torch-{torch or 'unknown'}", *([f"triton-{triton}"] if triton else []), ATTENTION, machine]
    return re.sub(r"[^A-Za-z0-9._+-]", "_", "_".join(parts))


def machine_tag(*, for_cpu: bool) -> str:
    """`py3.12_x86_64_glibc-2.39`: what a library built here requires. With `for_cpu` also a hash of the CPU's features:
    the compiler uses all of them, and on a CPU without them the library would fail with SIGILL."""
    parts = [f"py{sys.version_info.major}.{sys.version_info.minor}", platform.machine(), _libc()]
    return "_".join(filter(None, [*parts, cpu_sign() if for_cpu else ""]))


def cpu_sign(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`cpu-5f2a90c1`, a hash of the CPU's feature flags; empty if they are not known."""
    try:
        with cpuinfo.open() as lines:
            can = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
    return f"cpu-{hashlib.sha256(can.encode()).hexdigest()[:8]}" if can else ""


def cache_root(environ: Mapping[str, str]) -> Path:
    """The folder for caches, which may not exist. Raises CacheError if the environment names none and the user has no
    home folder."""
    if environ.get(CACHE_ENV):
        return Path(environ[CACHE_ENV]).absolute()
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute() and sys.platform != "darwin":
        return named / "torchferry"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises where there is none
    if not home.is_absolute() or home == Path("/"):  # this happens with an empty HOME
        raise CacheError(f"there is no home folder; {CACHE_ENV} names one for caches")
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "torchferry"


def _checked_from(root: Path, environ: Mapping[str, str]) -> Path:
    """The first folder to check for foreign owners: the agent has checked those above its own cache."""
    return root if environ.get(CACHE_ENV) else Path("/")


def make_private(folder: Path, *, below: Path | None = None, room_bytes: int = 0) -> None:
    """Create the folder and missing parents with mode 0700, and set its time to mark it as used.

    Raises CacheError if it cannot be written, belongs to another user or is writable for others, or its disk is full;
    also if another user could replace it, because a folder from `below` on belongs to or is writable for others.
    """
    try:
        for part in reversed([folder, *folder.parents]):
            part.mkdir(mode=0o700, exist_ok=True)
        _check_owner(folder, {os.getuid()}, closed_to=stat.S_IWGRP | stat.S_IWOTH)
        above = {*folder.parents, *folder.resolve().parents}
        for part in sorted(part for part in above if part.is_relative_to(below or folder)):
            found = part.stat()
            is_sticky = found.st_mode & stat.S_ISVTX  # other users cannot replace its entries, as in /tmp
            group = 0 if _is_own_group(found.st_gid) else stat.S_IWGRP
            _check_owner(part, {0, os.getuid()}, closed_to=0 if is_sticky else stat.S_IWOTH | group)
        os.utime(folder)  # `gc` finds unused caches by their time
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CacheError(f"{error.filename or folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be written")
    if free < room_bytes:
        raise CacheError(f"{free >> 20} MiB are free for {folder}")


def _is_own_group(gid: int) -> bool:
    """Whether a group is root's, or the user's private group (many systems create one for each user)."""
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = gid == 0 or (gid == me.pw_gid and group.gr_name == me.pw_name)
    return own and not set(group.gr_mem) - {me.pw_name, "root"}


def _check_owner(folder: Path, owners: set[int], *, closed_to: int) -> None:
    """Raise CacheError unless the folder has one of these owners and none of the mode bits in `closed_to`."""
    found = folder.stat()
    if found.st_uid not in owners or found.st_mode & closed_to:
        raise CacheError(f"{folder} is another user's, or others can write into it")


def use_bytecode_cache(torch: ModuleSpec, environ: MutableMapping[str, str]) -> None:
    """If torch has no bytecode and Python would write none, keep bytecode in a cache folder, for this process and its
    children.

    In images with packages installed without bytecode, in folders that the user cannot write or with
    PYTHONDONTWRITEBYTECODE set, every start would compile some 2,500 files again: 8 s of 12 (2 cores, torch 2.13).
    The folder's name depends on the installed packages: Python identifies bytecode by path, size and time of its
    source, and in reproducible images all files have the same time.
    """
    if torch.origin is None or sys.pycache_prefix is not None or not lacks_bytecode(Path(torch.origin)):
        return
    try:
        root = cache_root(environ)
        folder = root / f"bytecode-{packages_sign(Path(torch.origin).parents[1])}"
        make_private(folder, below=_checked_from(root, environ), room_bytes=ROOM_BYTES)
    except (CacheError, OSError):
        return  # as slow as before
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    environ[BYTECODE_ENV] = str(folder)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would apply to this folder too


def packages_sign(folder: Path) -> str:
    """`5f2a90c1`, a hash of the names and versions of the packages in a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".dist-info", ".egg-info"))
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()[:8]


def lacks_bytecode(source: Path) -> bool:
    """Whether a module has no bytecode and Python will not write any."""
    try:
        kept = Path(cache_from_source(source))
    except NotImplementedError:  # this Python never stores bytecode
        return False
    folder = kept.parent if kept.parent.exists() else source.parent
    return not kept.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK))


def _libc() -> str:
    """`glibc-2.39`; empty for other C libraries."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "-")
    except (ValueError, OSError):
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
