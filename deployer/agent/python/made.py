"""The files that a setup creates in the job's folder: stored beside its environment, and copied into later jobs.

Each job has its own copy of the code, so another job does not have the files that one job's setup wrote there. Large
files are stored once and linked, small ones are copied. Each job has its own folders, so that jobs do not write into
each other's.
Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import shutil
import stat
from typing import Dict, Iterator, List, Tuple

MADE = "made"
"""Their folder, in the setup's folder."""
LINKED_BYTES = 1 << 20
"""A file of at least this size is linked and made read-only."""
MOST = 20_000
_SKIPPED = ("__pycache__", ".git")

Seen = Dict[str, Tuple[int, ...]]
"""Relative path -> values that change with the file; empty for a folder."""


def look(code_dir: str) -> Seen:
    return dict(_walk(code_dir))


def keep(code_dir: str, before: Seen, store: str) -> List[str]:
    """Moves or copies new files into `store`. Returns notes about files that other jobs do not get. Raises OSError."""
    now = look(code_dir)
    venvs = [os.path.dirname(path) for path in now if os.path.basename(path) == "pyvenv.cfg" and path not in before]
    new = [path for path in now if path not in before]
    kept = [path for path in new if not any(path == venv or path.startswith(venv + "/") for venv in venvs)]
    notes = ["%s is a virtual environment: it is this job's alone" % venv for venv in venvs]
    changed = [path for path in before if before[path] and now.get(path) != before[path]]
    if changed:
        notes.append("it changed %s, which travels with each job: other jobs have it unchanged" % _some(changed))
    if len(kept) > MOST:
        notes.append("it made %d files here: these are this job's alone. $TORCHFERRY_SETUP_DIR is for all" % len(kept))
        return notes
    for path in sorted(kept):
        _take(os.path.join(code_dir, path), os.path.join(store, path))
    return notes


def put(code_dir: str, store: str) -> None:
    """Adds the files that `keep` has stored to a job, except those that it already has. Raises OSError."""
    top = os.path.realpath(code_dir)
    for path in sorted(look(store)) if os.path.isdir(store) else ():
        source, target = os.path.join(store, path), os.path.join(code_dir, path)
        inside = os.path.realpath(os.path.dirname(target))
        if os.path.lexists(target) or not (inside == top or inside.startswith(top + os.sep)):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        info = os.lstat(source)
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(target)
        elif _is_linked(info):
            os.symlink(source, target)
        else:
            shutil.copy2(source, target, follow_symlinks=False)


def _take(source: str, target: str) -> None:
    info = os.lstat(source)
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    if stat.S_ISDIR(info.st_mode):
        os.makedirs(target, mode=0o700, exist_ok=True)
    elif _is_linked(info):
        shutil.move(source, target)
        os.chmod(target, stat.S_IMODE(info.st_mode) & ~0o222)
        os.symlink(target, source)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _is_linked(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_size >= LINKED_BYTES


def _walk(top: str) -> Iterator[Tuple[str, Tuple[int, ...]]]:
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(top, folder)) as entries:
                found = [(entry, entry.stat(follow_symlinks=False)) for entry in entries]
        except OSError:
            continue  # gone meanwhile, or not ours to read
        for entry, info in found:
            path = os.path.join(folder, entry.name)
            if entry.name in _SKIPPED:
                continue
            if stat.S_ISDIR(info.st_mode):
                waiting.append(path)
                yield path, ()
            elif stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                yield path, (info.st_size, info.st_mtime_ns, info.st_mode)


def _some(paths: List[str]) -> str:
    more = len(paths) - 3
    return ", ".join(sorted(paths)[:3]) + (" and %d more" % more if more > 0 else "")
