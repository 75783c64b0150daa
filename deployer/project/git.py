"""Reads from git a folder's tracked files, ignore settings, commit and uncommitted changes.

Every question is one process; callers start them together. A folder without a repository, or a machine without git, is
no error.
"""
# names are bytes here, as for git, and pathlib takes none:
# ruff: noqa: PTH111, PTH118

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_PATCH = 1 << 20
"""Maximum bytes of the patch of uncommitted changes."""
MAX_EXCLUDED = 1000
"""With more ignored tracked files than this, no patch is made: each is an argument of git."""

# another repository in the caller's environment (a hook's) must not answer for this one
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True)
class Repo:
    """A working tree's settings; paths in lists are relative to `folder`."""

    top: bytes  # absolute path of the working tree's root
    tracked: frozenset[bytes]  # files below the folder that are in the index
    submodules: frozenset[bytes]  # folders below it that are submodules
    exclude_files: tuple[bytes, ...]  # global and info/exclude, weakest first, absolute
    ignore_case: bool
    sparse: bool  # only a part of the tracked files is checked out
    warning: str  # why git could not be asked, or ""


def find_top(folder: Path) -> Path | None:
    """The nearest folder at or above that holds a `.git` (folder, or file of a worktree or submodule)."""
    return next((f for f in (folder, *folder.parents) if os.path.lexists(f / ".git")), None)


def read_repo(folder: Path) -> Repo | None:
    """Index and ignore settings of a folder in a working tree. None outside of one, and for a folder that it ignores as
    a whole (an environment's site-packages): a user who names it wants its files. Without a usable git, only the
    working tree's own files are known, and `warning` gives the reason."""
    top = find_top(folder)
    if top is None:
        return None
    try:
        listing = _start(folder, "ls-files", "-z", "--stage")
    except FileNotFoundError:
        return _without_git(top, "git is not installed: tracked files that are also ignored are left out")
    settings = _start(folder, "config", "-z", "--get-regexp", r"^core\.(excludesfile|ignorecase|sparsecheckout)$")
    where = _start(folder, "rev-parse", "--git-path", "info/exclude")
    ignored = _start(folder, "check-ignore", "-q", ".") if folder != top else None
    listed, error = listing.communicate()
    values, exclude = settings.communicate()[0], where.communicate()[0]
    if listing.returncode != 0:
        reason = error.decode("utf-8", "surrogateescape").strip().splitlines()[:1]
        return _without_git(top, f"git cannot read {top}: {' '.join(reason)}")
    if ignored is not None and ignored.communicate() and ignored.returncode == 0:
        return None
    tracked, submodules = _parse_stage(listed)
    config = dict(_parse_setting(item) for item in values.split(b"\0") if item)
    excludes = os.path.join(os.fsencode(top), _global_excludes(config))
    files = (excludes, os.path.join(os.fsencode(folder), exclude.rstrip(b"\n")))
    folds, sparse = (_is_true(config.get(key, b"no")) for key in (b"core.ignorecase", b"core.sparsecheckout"))
    return Repo(os.fsencode(top), tracked, submodules, files, folds, sparse, "")


def _without_git(top: Path, warning: str) -> Repo:
    files = (_global_excludes({}), os.fsencode(top / ".git/info/exclude"))
    return Repo(os.fsencode(top), frozenset(), frozenset(), files, ignore_case=False, sparse=False, warning=warning)


def _parse_stage(listed: bytes) -> tuple[frozenset[bytes], frozenset[bytes]]:
    rows = [row.partition(b"\t") for row in listed.split(b"\0") if row]
    submodules = frozenset(path for mode, _, path in rows if mode.startswith(b"160000"))
    return frozenset(path for _, _, path in rows) - submodules, submodules


def _parse_setting(item: bytes) -> tuple[bytes, bytes]:
    key, equals, value = item.partition(b"\n")
    return key, value if equals else b"true"


def _is_true(value: bytes) -> bool:
    """A boolean value, as git reads its settings."""
    number = re.fullmatch(rb"\s*[+-]?(0x)?0*([0-9a-f]*)[kmg]?", value.lower())
    return bool(number and number[2]) or value.lower() in (b"true", b"yes", b"on")


def _global_excludes(config: dict[bytes, bytes]) -> bytes:
    chosen = config.get(b"core.excludesfile")
    if chosen is not None:
        return os.path.expanduser(chosen)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.fsencode(os.path.join(home, "git", "ignore"))


def git_state(project: Path, *, apart: Sequence[str] = ()) -> dict[str, object] | None:
    """{commit, branch, dirty, patch} of the project's repository; None without a repository or without git.

    commit: 40 or 64 hex digits, "" before the first commit. branch: "" when detached. dirty: tracked changes, or
    untracked files that no rule ignores. patch: `git diff HEAD` of the project's folder without ignored files and
    `.env*` and the paths `apart`, at most MAX_PATCH bytes; if it was truncated, a last line says so.
    """
    if find_top(project) is None:
        return None
    try:
        status = _start(project, "status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--", ".")
        ignored = _start(project, "ls-files", "-z", "--cached", "--ignored", "--exclude-standard")
    except FileNotFoundError:
        return None
    report = status.communicate()[0].decode("utf-8", "surrogateescape")
    hidden = [os.fsdecode(p) for p in ignored.communicate()[0].split(b"\0") if p] + list(apart)
    if status.returncode != 0:
        return None
    lines = report.splitlines()
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit = headers.get("branch.oid", "").replace("(initial)", "")
    dirty = any(not line.startswith("# ") for line in lines)
    patch = _read_patch(project, hidden) if dirty and commit else ""
    branch = headers.get("branch.head", "").replace("(detached)", "")
    return {"commit": commit, "branch": branch, "dirty": dirty, "patch": patch}


def _read_patch(project: Path, hidden: list[str]) -> str:
    if len(hidden) > MAX_EXCLUDED:
        return f"# no patch: {len(hidden)} tracked files are ignored by git's rules\n"
    excluded = [":(exclude,glob)**/.env*", ":(exclude,glob)**/.env*/**", *(f":(exclude,literal){p}" for p in hidden)]
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--relative")
    diff = _start(project, "diff", "HEAD", *options, "--", ".", *excluded)
    assert diff.stdout is not None
    data: bytes = diff.stdout.read(MAX_PATCH + 1)
    if len(data) > MAX_PATCH:
        diff.kill()
        data = data[:MAX_PATCH] + b"\n# patch cut here: it is longer than %d bytes\n" % MAX_PATCH
    diff.communicate()
    return data.decode("utf-8", "surrogateescape")


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
    environment.update(GIT_OPTIONAL_LOCKS="0", LC_ALL="C")
    return subprocess.Popen(
        ["git", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
