"""The paths that a config names: those of the project travel, though git ignores them; what of others is to be said."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from deployer.errors import UsageError
from deployer.paths import expanded
from deployer.project.manifest import Scan
from trainer.schema import Config

MOST_PIECES = 50
"""Ignored parts of a folder that travel beside the rest of it; with more of them the folder goes as one."""


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def travels(clean: str, code: Scan, includes: Sequence[str]) -> bool:
    """Whether a file or folder of the project (its plain relative path), or a part of it, is of what is sent."""
    return is_below(clean, includes) or any(is_below(e.path.removeprefix("code/"), [clean]) for e in code.entries)


def left_out(path: str, code: Scan, *, hint: str = "") -> UsageError:
    reason = code.why_ignored(os.path.normpath(path))
    why = f" ({reason.pattern} in {reason.source})" if reason else ""
    return UsageError(
        f"{path} is left out of the code tree{why}", hint=f"ship it once, by hash, with --include {path}{hint}"
    )


def named_paths(config: Config, project: Path) -> list[str]:
    """Paths of data, models, adapters, templates and a checkpoint, as the config has them."""
    from trainer.config.load import local_data_paths

    resume = [] if config.train.resume in ("auto", "never") else [config.train.resume]
    return list(dict.fromkeys((*local_data_paths(config, root=project), *resume)))


def check_named(config: Config, project: Path) -> list[str]:
    """Warnings of what the host itself must have. UsageError for a path that is not there, or cannot travel."""
    if re.search("[\\ud800-\\udfff]", config.target.root):
        raise UsageError(
            f"--remote-root {config.target.root} is not UTF-8: tokenizers cannot write into such a folder",
            hint="give the root another name; a program of your own may run in it",
        )
    remote = config.target.ssh is not None
    paths = named_paths(config, project)
    for path in paths:
        if not _is_hosts_own(path):
            _check_in_project(path, project)
        elif not remote and not expanded(path).exists():
            raise UsageError(f"{path}: no such file or folder", hint=did_you_mean(expanded(path)))
    return [_of_host(path, project) for path in paths if remote and _is_hosts_own(path)]


def _is_hosts_own(path: str) -> bool:
    return os.path.isabs(path) or path.startswith("~")  # noqa: PTH117


def _of_host(path: str, project: Path) -> str:
    line = f"{path} is not part of the project and does not travel: the host must have it"
    here = expanded(path)
    inside = inside_of(here, project)
    if inside is not None and here.exists():
        return f"{path} does not travel under this name: the host must have it, or write {inside}, which travels"
    return f"{line}; of this machine it would be {_link(path)}" if here.exists() else line


def inside_of(path: Path, project: Path) -> str | None:
    """The path as one relative to the project, where it lies below it."""
    for top in (project, project.resolve()):
        relative = os.path.relpath(path, top)
        if relative != "." and not is_below(relative, [".."]):
            return relative
    return None


def _link(path: str) -> str:
    name = shlex.quote(Path(path).resolve().name or "root")
    return f"ln -s {shlex.quote(path)} {name}, and then {name}: its target travels"


def _check_in_project(path: str, project: Path) -> None:
    clean = os.path.normpath(path)
    if is_below(clean, [".."]):
        exists = (project / clean).exists()
        hint = _link(path) if exists else did_you_mean(project / clean)
        raise UsageError(f"{path} is outside the project {project} and does not travel", hint=hint)
    if not (project / clean).exists():
        raise UsageError(f"{path}: no such file or folder in {project}", hint=did_you_mean(project / clean, project))


def did_you_mean(path: Path, project: Path | None = None) -> str:
    """A hint with the name in the same folder that is nearest to one that is not there; empty without any."""
    try:
        names = sorted(os.listdir(path.parent))  # noqa: PTH208 - names alone
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    if not near:
        return ""
    found = path.parent / near[0]
    return f"did you mean {(project and inside_of(found, project)) or found}?"


def to_include(config: Config, project: Path, *, code: Scan, includes: Sequence[str]) -> list[str]:
    """What the config names in the project and the rules of git would leave behind: as plain relative paths.

    UsageError for what `.deployignore` leaves out: that was written for deployments.
    """
    found = []
    for path in named_paths(config, project):
        clean = os.path.normpath(path)
        if _is_hosts_own(path) or clean == "." or is_below(clean, [".."]) or is_below(clean, includes):
            continue
        target = inside_of((project / clean).resolve(), project.resolve())
        if target != clean and (target is None or not travels(target, code, includes)):
            found.append(clean)  # a link: what it leads to comes under its name
        elif travels(clean, code, includes):
            found += _pieces(clean, code)
        elif _is_of_deployignore(clean, code):
            raise left_out(path, code, hint=f" (or files=[{path!r}] in the config)")
        else:
            found.append(clean)
    return list(dict.fromkeys(found))


def _pieces(folder: str, code: Scan) -> list[str]:
    """What git ignores of a folder that travels otherwise, such as the weights in a model's."""
    ignored = code.ignored.paths.items()
    pieces = [path for path, reason in ignored if is_below(path, [folder]) and _is_of_git(reason.source)]
    return pieces if len(pieces) <= MOST_PIECES else [folder]


def _is_of_git(source: str) -> bool:
    return not source.startswith("built in") and ".deployignore" not in source


def _is_of_deployignore(path: str, code: Scan) -> bool:
    reason = code.why_ignored(path)
    return reason is not None and ".deployignore" in reason.source
