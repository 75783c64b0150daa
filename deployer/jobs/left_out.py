"""Stores on this client which paths a launch left out and by which rule, and explains with it which paths a job did not
find."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deployer.agent.host.typed import InvalidData, parse, to_json
from deployer.agent.job.status import Missing
from deployer.paths import expanded, state_dir, write_whole
from deployer.terminal import typed

MOST_PATHS = 2000
"""Maximum number of paths; the topmost ones are kept. A folder that was left out is one path."""


class Rule(NamedTuple):
    pattern: str
    source: str
    """`.gitignore:3`, or `built in: …`."""


class LeftOut(NamedTuple):
    project: str
    rules: tuple[Rule, ...]
    paths: dict[str, int]
    """Path relative to the project -> index of its rule."""


def left_out(project: Path, paths: Mapping[str, tuple[str, str]]) -> LeftOut:
    """`paths`: each with its rule, as a pattern and the rule's source."""
    rules: dict[tuple[str, str], int] = {}
    kept = sorted(paths, key=lambda path: (path.count("/"), path))[:MOST_PATHS]
    numbers = {path: rules.setdefault(paths[path], len(rules)) for path in kept}
    return LeftOut(str(project), tuple(Rule(*rule) for rule in rules), numbers)


def note_left_out(job_id: str, left: LeftOut) -> None:
    """Stores it in case the job fails. Ignores a disk that cannot be written: the launch goes on."""
    with suppress(OSError):
        write_whole(_file_of(job_id), json.dumps(to_json(left)).encode("ascii"))


def recall_left_out(job_id: str) -> LeftOut | None:
    """None if the job was launched from elsewhere, or its note is damaged."""
    try:
        return parse(_file_of(job_id).read_bytes(), LeftOut)
    except (OSError, InvalidData):
        return None


def forget_left_out(job_id: str) -> None:
    _file_of(job_id).unlink(missing_ok=True)


def _file_of(job_id: str) -> Path:
    return state_dir() / "left_out" / f"{job_id}.json"


# --- what the job did not find ----------------------------------------------------------------------------------------


def why_missing(missing: Sequence[Missing], left: LeftOut | None, *, remote: bool) -> list[str]:
    """A line for each missing file or module that exists here: why the host does not have it, and what to do."""
    if left is None:
        return []
    lines: list[str] = []
    for one in missing:
        # the names come from a host: one that no file can have explains nothing
        with suppress(OSError, ValueError):
            lines += _explain(one, left, remote=remote)
    return list(dict.fromkeys(lines))[:4]


def _explain(one: Missing, left: LeftOut, *, remote: bool) -> Iterator[str]:
    if one.kind == "module":
        yield from _by_rule(_path_of_module(one.name, left), left)
        return
    path, project = PurePosixPath(os.path.normpath(expanded(one.name))), PurePosixPath(left.project)
    if not path.is_absolute():
        yield from _inside(str(path), left)
    elif path.is_relative_to(project):
        inner = str(path.relative_to(project))
        found = [*_inside(inner, left)]
        yield f"{path} is a path of this machine: the job runs in a copy of the project, so write {inner}"
        yield from found
    elif remote and Path(path).exists() and not any(part.startswith(".") for part in path.parts):
        how = f"ln -s {typed(str(path))} . and --include {typed(path.name)}, then write {path.name}"
        yield f"{path} is on this machine and not on the host; {how}"


def _inside(path: str, left: LeftOut) -> Iterator[str]:
    """The reasons for a path inside the project."""
    by_rule = list(_by_rule(path, left))
    here = Path(left.project) / path
    if by_rule or path == "." or path.startswith("../"):
        yield from by_rule
        return
    for folder in [here, *here.parents][: path.count("/") + 1]:
        name = folder.relative_to(left.project).as_posix()
        if folder.is_dir() and not any(folder.iterdir()):
            if _is_submodule(name, left):
                update = f"git submodule update --init {typed(name)}"
                yield f"{name} is a submodule that is not checked out here; {update}"
            else:
                yield f"{name} is an empty folder here, and empty folders do not travel; have the program make it"
            return
    if here.exists() and not here.is_symlink():
        yield f"{path} is here and did not travel; --include {typed(path)}"


def _by_rule(path: str, left: LeftOut) -> Iterator[str]:
    parts = path.split("/")
    for top in ("/".join(parts[: count + 1]) for count in range(len(parts))):
        number = left.paths.get(top)
        if number is not None and number < len(left.rules):
            pattern, source = left.rules[number]
            by = f"the built-in rule {pattern}" if source.startswith("built in") else f"{source} ({pattern})"
            yield f"{top} was left out by {by}; --include {typed(top)}"
            return


def _path_of_module(name: str, left: LeftOut) -> str:
    """The path that was left out and may hold the module; the module's own path if there is none."""
    whole, first = name.replace(".", "/"), name.split(".")[0]
    wanted = [whole, f"{whole}.py", first, f"{first}.py"]
    found = [path for path in wanted if path in left.paths]
    inner = [path for path in left.paths if path.endswith(tuple(f"/{text}" for text in wanted))]
    return next(iter([*found, *inner]), whole)


def _is_submodule(path: str, left: LeftOut) -> bool:
    try:
        lines = (Path(left.project) / ".gitmodules").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.replace(" ", "").strip() == f"path={path}" for line in lines)
