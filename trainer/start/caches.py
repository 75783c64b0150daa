"""What a start may take over from the starts before it: compiled kernels, and Python's bytecode. No torch.

    CACHE/compile/torch-2.11.0+cu130_triton-3.6.0_cudnn_…/    of torch.compile; in triton/ of Triton
    CACHE/bytecode-5f2a90c1/                                  of packages that were installed without any

CACHE is what the deployer names in the environment (the host's root, so that jobs share it and `gc` finds it), else
torchferry/ among the user's caches. The compiler's own keys decide what is valid, but leave out what a library that was
built here needs of a machine, and several may share a home: that is in the folder's name. What is read from here is
executed, so a folder that others could write into or replace is not used.
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
"""The first of the kernels that attention takes (trainer.models.attention). AOTAutograd's keys leave it out: with
another order in the same folder a run would silently get the former one's kernels."""
ROOM_BYTES = 512 << 20
"""Less free than this is as good as a full disk."""


class CacheError(Exception):
    """A folder cannot serve as a cache."""


class CompileCache(NamedTuple):
    """Variables to add to the environment before torch is imported, and a word for the user where there is no cache."""

    env: dict[str, str]
    note: str | None = None


def open_compile_cache(environ: Mapping[str, str], *, for_cpu: bool = False) -> CompileCache:
    """The folders for what is compiled, made where they are missing, unless the environment names some.

    Without a usable folder they are in one that goes with this process: the compiler's own, /tmp/torchinductor_USER, is
    a name that anybody could have taken.
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
    """`torch-2.11.0+cu130_triton-3.6.0_cudnn_py3.12_x86_64`, a file's name whatever the versions say."""
    parts = [f"torch-{torch or 'unknown'}", *([f"triton-{triton}"] if triton else []), ATTENTION, machine]
    return re.sub(r"[^A-Za-z0-9._+-]", "_", "_".join(parts))


def machine_tag(*, for_cpu: bool) -> str:
    """`py3.12_x86_64_glibc-2.39`: what a library needs that was built here. For the CPU with a sign of what it can do:
    the compiler uses all of it, and elsewhere the library would die of SIGILL."""
    parts = [f"py{sys.version_info.major}.{sys.version_info.minor}", platform.machine(), _libc()]
    return "_".join(filter(None, [*parts, cpu_sign() if for_cpu else ""]))


def cpu_sign(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`cpu-5f2a90c1` for what a CPU says it can do; empty where it does not tell."""
    try:
        with cpuinfo.open() as lines:
            can = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
    return f"cpu-{hashlib.sha256(can.encode()).hexdigest()[:8]}" if can else ""


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where caches lie, made or not. Raises CacheError where nothing names a place and the user has no home."""
    if environ.get(CACHE_ENV):
        return Path(environ[CACHE_ENV]).absolute()
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute() and sys.platform != "darwin":
        return named / "torchferry"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises where there is none
    if not home.is_absolute() or home == Path("/"):  # so it is with an empty HOME
        raise CacheError(f"there is no home folder; {CACHE_ENV} names one for caches")
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "torchferry"


def _checked_from(root: Path, environ: Mapping[str, str]) -> Path:
    """The folders from here on must be nobody else's: the agent has looked at those above its own cache."""
    return root if environ.get(CACHE_ENV) else Path("/")


def make_private(folder: Path, *, below: Path | None = None, room_bytes: int = 0) -> None:
    """Make the folder, with those above it that are missing 0700, and note that it is in use.

    Raises CacheError when it cannot be written, is another user's or open to one (or one of those from `below` on
    is, so that it could be replaced), or when its disk is full.
    """
    try:
        for part in reversed([folder, *folder.parents]):
            part.mkdir(mode=0o700, exist_ok=True)
        _check_owner(folder, {os.getuid()}, closed_to=stat.S_IWGRP | stat.S_IWOTH)
        above = {*folder.parents, *folder.resolve().parents}
        for part in sorted(part for part in above if part.is_relative_to(below or folder)):
            found = part.stat()
            is_sticky = found.st_mode & stat.S_ISVTX  # nobody replaces what is in it, as in /tmp
            group = 0 if _is_own_group(found.st_gid) else stat.S_IWGRP
            _check_owner(part, {0, os.getuid()}, closed_to=0 if is_sticky else stat.S_IWOTH | group)
        os.utime(folder)  # by its time `gc` tells what nobody uses any more
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CacheError(f"{error.filename or folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be written")
    if free < room_bytes:
        raise CacheError(f"{free >> 20} MiB are free for {folder}")


def _is_own_group(gid: int) -> bool:
    """Whether a group is root's, or the user's alone as many systems make one for each user."""
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = gid == 0 or (gid == me.pw_gid and group.gr_name == me.pw_name)
    return own and not set(group.gr_mem) - {me.pw_name, "root"}


def _check_owner(folder: Path, owners: set[int], *, closed_to: int) -> None:
    """Raise CacheError unless the folder is of one of the owners and has none of these bits of a mode."""
    found = folder.stat()
    if found.st_uid not in owners or found.st_mode & closed_to:
        raise CacheError(f"{folder} is another user's, or others can write into it")


def use_bytecode_cache(torch: ModuleSpec, environ: MutableMapping[str, str]) -> None:
    """Where torch has no bytecode and will get none: keep it in a folder of ours from now on, as do the processes that
    this one starts.

    Images whose packages came without bytecode, into folders that the user cannot write or with
    PYTHONDONTWRITEBYTECODE set, would compile some 2,500 files again at every start: 8 s of 12 (2 cores, torch 2.13).
    The folder is named by what is installed: Python knows bytecode by path, size and time of its source, and images
    that are built to be reproducible give all files one time.
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
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would hold for this folder too


def packages_sign(folder: Path) -> str:
    """`5f2a90c1` for the packages in a folder and their versions."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".dist-info", ".egg-info"))
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()[:8]


def lacks_bytecode(source: Path) -> bool:
    """Whether a module has no bytecode, and Python will write none."""
    try:
        kept = Path(cache_from_source(source))
    except NotImplementedError:  # this Python keeps none at all
        return False
    folder = kept.parent if kept.parent.exists() else source.parent
    return not kept.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK))


def _libc() -> str:
    """`glibc-2.39`; empty for another one."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "-")
    except (ValueError, OSError):
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
