"""What a start may take over from the starts before it: compiled kernels, and Python's bytecode. No torch.

    CACHE/compile/torch-2.11.0+cu130_triton-3.6.0_cudnn/    of torch.compile; in triton/ of Triton
    CACHE/bytecode/                                         of packages that were installed without any

CACHE is what the deployer names in the environment (the host's root, so that jobs share it and `gc` finds it), else
torchferry/ among the user's caches. The compiler's own keys decide what is valid. What is read from here is executed,
so a folder that others could write into is not used.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
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


def open_compile_cache(environ: Mapping[str, str]) -> CompileCache:
    """The folders for what is compiled, made where they are missing, unless the environment names some.

    Without a usable folder the compiler keeps to its own, in the system's temporary one.
    """
    if COMPILER_ENV in environ and TRITON_ENV in environ:
        return CompileCache({})
    folder = cache_root(environ) / "compile" / compile_tag(_version("torch"), _version("triton"))
    try:
        make_private(folder, room_bytes=ROOM_BYTES)
    except CacheError as error:
        return CompileCache({}, f"note: no compile cache, so every start compiles anew: {error}")
    named = {COMPILER_ENV: str(folder), TRITON_ENV: str(folder / "triton")}
    return CompileCache({name: value for name, value in named.items() if name not in environ})


def compile_tag(torch: str | None, triton: str | None) -> str:
    """`torch-2.11.0+cu130_triton-3.6.0_cudnn`, a file's name whatever the versions say."""
    parts = [f"torch-{torch or 'unknown'}", *([f"triton-{triton}"] if triton else []), ATTENTION]
    return re.sub(r"[^A-Za-z0-9._+-]", "_", "_".join(parts))


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where caches lie, made or not."""
    if environ.get(CACHE_ENV):
        return Path(environ[CACHE_ENV]).absolute()
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises where there is none
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "torchferry"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "torchferry"


def make_private(folder: Path, *, room_bytes: int = 0) -> None:
    """Make the folder, with those above it that are missing 0700, and note that it is in use.

    Raises CacheError when it cannot be written, is another user's or open to one, or when its disk is full.
    """
    try:
        for part in reversed([folder, *folder.parents]):
            part.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheError(f"{folder} is another user's, or others can write into it")
        os.utime(folder)  # by its time `gc` tells what nobody uses any more
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CacheError(f"{error.filename or folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be written")
    if free < room_bytes:
        raise CacheError(f"{free >> 20} MiB are free for {folder}")


def use_bytecode_cache(torch: ModuleSpec, environ: MutableMapping[str, str]) -> None:
    """Where torch has no bytecode and will get none: keep it in a folder of ours from now on, as do the processes that
    this one starts.

    Images whose packages came without bytecode, into folders that the user cannot write or with
    PYTHONDONTWRITEBYTECODE set, would compile some 2,500 files again at every start: 8 s of 12 (2 cores, torch 2.13).
    """
    if torch.origin is None or sys.pycache_prefix is not None or not lacks_bytecode(Path(torch.origin)):
        return
    folder = cache_root(environ) / "bytecode"
    try:
        make_private(folder, room_bytes=ROOM_BYTES)
    except CacheError:
        return  # as slow as before
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    environ[BYTECODE_ENV] = str(folder)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would hold for this folder too


def lacks_bytecode(source: Path) -> bool:
    """Whether a module has no bytecode, and Python will write none."""
    try:
        kept = Path(cache_from_source(source))
    except NotImplementedError:  # this Python keeps none at all
        return False
    folder = kept.parent if kept.parent.exists() else source.parent
    return not kept.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
