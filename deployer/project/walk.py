"""Walks over a project with git's ignore rules, and over an included folder without any.

The rules, strongest first: `.deployignore` files (deepest first), files that git tracks (always sent), `.gitignore`
files (deepest first), `.git/info/exclude`, the user's global excludes, and JUNK. As in git, a file below an ignored
folder cannot be re-included alone. `.git` is never sent. Submodules and other repositories inside have their own rules.
"""
# names are bytes here, as for git, and pathlib takes none:
# ruff: noqa: PTH110, PTH112, PTH113, PTH116, PTH118, PTH123

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from deployer.errors import UsageError
from deployer.project.git import Repo, read_repo
from deployer.project.ignore import RuleFile, decide

SECRETS = (".ssh/", ".aws/", ".gnupg/", ".netrc", ".env", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
JUNK = (
    *("__pycache__/", "*.pyc", ".venv/", ".*_cache/", ".DS_Store", "node_modules/"),
    *("/results/", "/runs/", ".torchferry/"),
    *SECRETS,
)
"""Left out without any ignore file, unless a `!rule` re-includes it; also every folder that contains a `pyvenv.cfg`."""
_INSIDE = RuleFile("\n".join(rule for rule in JUNK if not rule.startswith("/")).encode(), "built in")
_SECRET_NAMES = frozenset(rule.rstrip("/") for rule in SECRETS)
_COUNT_LIMIT = 2000
"""How many files in ignored folders are counted for the report; beyond this it shows "2,000+"."""


class Reason(NamedTuple):
    """Why something was left out: the rule as written, and its place (`.gitignore:3`)."""

    pattern: str
    source: str


@dataclass(frozen=True)
class Ignored:
    """What the rules left out. `at_least`: there are more files than the counted ones."""

    count: int
    size_bytes: int
    at_least: bool
    reasons: tuple[tuple[Reason, int], ...]  # each with its number of files, most first
    paths: dict[str, Reason]  # file or folder (all of it), relative to the project


class Found(NamedTuple):
    path: bytes  # relative to the root of the walk
    absolute: bytes
    stat: os.stat_result


@dataclass
class Notes:
    """What a walk finds in addition to the files."""

    count: int = 0
    size_bytes: int = 0
    at_least: bool = False
    reasons: Counter[Reason] = field(default_factory=Counter)
    paths: dict[str, Reason] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    pointers: dict[str, list[bytes]] = field(default_factory=dict)  # by the command that brings what they stand for
    empty_submodules: list[bytes] = field(default_factory=list)
    sparse: list[bytes] = field(default_factory=list)  # tracked files of a repository of which a part is checked out

    def ignore(self, entry: os.DirEntry[bytes], path: bytes, reason: Reason) -> None:
        count, size = 0, 0
        for file in _files_below(entry):
            if self.count + count >= _COUNT_LIMIT and count:
                self.at_least = True
                break
            count, size = count + 1, size + _size_of(file)
        self.count += count
        self.size_bytes += size
        self.reasons[reason] += count
        self.paths[os.fsdecode(path)] = reason

    def ignored(self) -> Ignored:
        return Ignored(self.count, self.size_bytes, self.at_least, tuple(self.reasons.most_common()), self.paths)


@dataclass(frozen=True)
class _Rules:
    """The ignore files that apply in a folder, weakest first, and the files that git tracks in its repository."""

    deploy: tuple[RuleFile, ...]
    git: tuple[RuleFile, ...]
    tracked: frozenset[bytes]  # in lower case with ignore_case, as are the next two
    above: frozenset[bytes]  # folders of tracked files
    submodules: frozenset[bytes]
    in_ignored: Reason | None = None  # why the folder is ignored: only tracked files of it travel
    ignore_case: bool = False

    def keep(self, path: bytes, *, is_dir: bool) -> bool:
        """Whether git tracks the file, or anything below the folder."""
        return (path.lower() if self.ignore_case else path) in (self.above if is_dir else self.tracked)

    def is_submodule(self, path: bytes) -> bool:
        return (path.lower() if self.ignore_case else path) in self.submodules


class Walk:
    """A walk over a project with its ignore rules."""

    def __init__(self, root: bytes, extra_ignore: str, notes: Notes) -> None:
        self.root = root
        self.extra_ignore = os.fsencode(extra_ignore)
        self.notes = notes

    def files(self) -> Iterator[Found]:
        junk = RuleFile("\n".join(JUNK).encode(), "built in")
        empty = _Rules((), (junk,), frozenset(), frozenset(), frozenset())
        folder = Path(os.fsdecode(self.root))
        repo = read_repo(folder)
        yield from self._folder(b"", self._enter_repo(b"", repo, empty) if repo else empty)

    def _enter_repo(self, path: bytes, repo: Repo, outer: _Rules) -> _Rules:
        """The rules at the root of the walk's repository or of one inside. The outer .gitignore files do not apply
        there."""
        if repo.warning:
            self.notes.warnings.append(repo.warning)
        skip, below = len(path) + bool(path), os.path.relpath(os.path.join(self.root, path), repo.top)
        above = [] if below == b"." else below.split(b"/")
        places = [b"".join(part + b"/" for part in above[n:]) for n in range(len(above))]
        files = [_read_rules(f, prefix=places[0] if places else b"", skip=skip, repo=repo) for f in repo.exclude_files]
        for depth, place in enumerate(places):
            folder = os.path.join(repo.top, *above[:depth])
            files.append(_read_rules(os.path.join(folder, b".gitignore"), prefix=place, skip=skip, repo=repo))
        fold = bytes.lower if repo.ignore_case else bytes
        tracked = frozenset(fold(_below(path, p)) for p in repo.tracked | repo.submodules)
        if repo.sparse:
            self.notes.sparse += [_below(path, p) for p in repo.tracked]
        return _Rules(
            deploy=outer.deploy,
            git=(outer.git[0], *(f for f in files if f is not None)),
            tracked=tracked,
            above=_parents(tracked),
            submodules=frozenset(fold(_below(path, p)) for p in repo.submodules),
            ignore_case=repo.ignore_case,
        )

    def _folder(self, path: bytes, rules: _Rules) -> Iterator[Found]:
        entries = _list_folder(os.path.join(self.root, path))
        names = {e.name for e in entries}
        if not entries and rules.is_submodule(path):
            self.notes.empty_submodules.append(path)
        if path and b".git" in names:
            repo = read_repo(Path(os.fsdecode(os.path.join(self.root, path))))
            rules = self._enter_repo(path, repo, rules) if repo else rules
        elif b"pyvenv.cfg" in names and path and not rules.keep(path, is_dir=True):
            rules = replace(rules, in_ignored=Reason("pyvenv.cfg", "built in: a virtual environment"))
        rules = self._with_files_of(path, entries, rules)
        for entry in entries:
            if entry.name != b".git":
                yield from self._entry(entry, _below(path, entry.name), rules)

    def _with_files_of(self, path: bytes, entries: Sequence[os.DirEntry[bytes]], rules: _Rules) -> _Rules:
        for entry in entries:
            if entry.name in (b".gitignore", self.extra_ignore) and entry.is_file(follow_symlinks=False):
                source = os.fsdecode(_below(path, entry.name))
                text, skip = _read(entry.path), len(path) + bool(path)
                file = RuleFile(text, source, skip=skip, ignore_case=rules.ignore_case)
                if entry.name == self.extra_ignore:
                    rules = replace(rules, deploy=(*rules.deploy, file))
                else:
                    rules = replace(rules, git=(*rules.git, file))
        return rules

    def _entry(self, entry: os.DirEntry[bytes], path: bytes, rules: _Rules) -> Iterator[Found]:
        is_dir = entry.is_dir(follow_symlinks=False)
        ignored_by = self._judge(path, is_dir, rules)
        if ignored_by and not (is_dir and rules.keep(path, is_dir=True) and ignored_by[1]):
            self.notes.ignore(entry, path, ignored_by[0])
        elif is_dir:
            inside = replace(rules, in_ignored=ignored_by[0]) if ignored_by else rules
            inside = replace(inside, in_ignored=None) if rules.is_submodule(path) else inside
            yield from self._folder(path, inside)
        else:
            yield from _found(entry, path, self.notes)

    def _judge(self, path: bytes, is_dir: bool, rules: _Rules) -> tuple[Reason, bool] | None:
        """Why a path is left out, and whether tracked files below it are sent nevertheless; None if the path is
        sent."""
        if rules.deploy and (rule := decide(rules.deploy, path, is_dir)):
            return None if rule.negated else (Reason(rule.pattern, rule.source), False)
        if rules.is_submodule(path) or (not is_dir and rules.keep(path, is_dir=False)):
            return None
        if rules.in_ignored is not None:
            return rules.in_ignored, True
        git_rule = decide(rules.git, path, is_dir)
        return (Reason(git_rule.pattern, git_rule.source), True) if git_rule and not git_rule.negated else None


def _below(folder: bytes, path: bytes) -> bytes:
    return folder + b"/" + path if folder else path


def _parents(paths: Iterable[bytes]) -> frozenset[bytes]:
    parents = set[bytes]()
    for path in paths:
        while (cut := path.rfind(b"/")) > 0 and (path := path[:cut]) not in parents:
            parents.add(path)
    return frozenset(parents)


def _read_rules(path: bytes, *, prefix: bytes, skip: int, repo: Repo) -> RuleFile | None:
    if not os.path.isfile(path):
        return None
    return RuleFile(_read(path), os.fsdecode(path), prefix=prefix, skip=skip, ignore_case=repo.ignore_case)


def _read(path: bytes) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as error:
        raise unreadable(path, error) from error


def _list_folder(path: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: bytes | str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot read {os.fsdecode(path)}: {error.strerror}",
        hint="make it readable, or leave it out with a line in .deployignore",
    )


def _size_of(entry: os.DirEntry[bytes]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # it has just vanished
        return 0


def _files_below(entry: os.DirEntry[bytes]) -> Iterator[os.DirEntry[bytes]]:
    if not entry.is_dir(follow_symlinks=False):
        yield entry
        return
    try:
        with os.scandir(entry.path) as entries:
            for inner in entries:
                yield from _files_below(inner)
    except OSError:  # what cannot be read in an ignored folder is not missed
        return


def _found(entry: os.DirEntry[bytes], path: bytes, notes: Notes) -> Iterator[Found]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
        yield Found(path, entry.path, status)
    else:
        notes.warnings.append(f"{os.fsdecode(path)} is left out: {_kind(status.st_mode)}")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a block device"))
    return next((name for test, name in kinds if test(mode)), "a device")


def is_junk(path: bytes, *, is_dir: bool) -> bool:
    """Whether a path below any folder is left out without any rule."""
    return decide([_INSIDE], path, is_dir) is not None


def is_secret(path: str) -> bool:
    """Whether a path, or a folder above it, has the name of a secret."""
    return not _SECRET_NAMES.isdisjoint(path.split("/"))


Keep = Callable[[bytes, bytes, bool], bool]
"""Whether an entry of an included folder is sent: called with its path there, its real path, and whether it is a
folder."""


def walk_included(
    root: bytes, path: bytes, folder: bytes, notes: Notes, above: frozenset[bytes], keep: Keep | None = None
) -> Iterator[Found]:
    for entry in _list_folder(folder):
        inner, target = _below(path, entry.name), os.path.realpath(entry.path)
        inside = target == root or target.startswith(root + b"/")
        if entry.name == b".git" or (keep and not keep(inner, target, os.path.isdir(target))):
            continue
        if entry.is_symlink() and (inside or not os.path.exists(target)):
            yield from _found(entry, inner, notes)
        elif os.path.isdir(target):
            if target not in above:
                yield from walk_included(root, inner, entry.path, notes, above | {target}, keep)
        elif os.path.isfile(target):
            yield Found(inner, target, os.stat(target))
        else:
            yield from _found(entry, inner, notes)
