"""The paths that a config names: those in the project are sent even if git ignores them; for the others it warns or
refuses."""
# names are bytes in a walk, and pathlib takes none:
# ruff: noqa: PTH110, PTH118

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from deployer.errors import UsageError
from deployer.paths import expanded
from deployer.project.manifest import Scan
from deployer.project.walk import Keep, is_junk, is_secret
from trainer.schema import Config

MOST_PIECES = 50
"""Maximum number of ignored parts that are sent in addition to a folder; with more, the whole folder is sent."""
NEEDED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".model", ".tiktoken", ".gguf", ".distcp", ".metadata"),
    *(".arrow", ".npy", ".npz"),
)
"""File endings that a model's or a checkpoint's folder needs, in addition to those of data and templates."""


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def travels(clean: str, code: Scan, includes: Sequence[str]) -> bool:
    """Whether a file or folder of the project (as a plain relative path), or a part of it, is sent."""
    return is_below(clean, includes) or any(is_below(e.path.removeprefix("code/"), [clean]) for e in code.entries)


def left_out(path: str, code: Scan, *, hint: str = "") -> UsageError:
    reason = code.why_ignored(os.path.normpath(path))
    why = f" ({reason.pattern} in {reason.source})" if reason else ""
    return UsageError(f"{path} is left out of what is sent{why}", hint=f"send it with --include {path}{hint}")


def named_paths(config: Config, project: Path) -> list[str]:
    """The config's paths of data, models, adapters, templates and a checkpoint."""
    from trainer.config.load import local_data_paths

    resume = [] if config.train.resume in ("auto", "never") else [config.train.resume]
    return list(dict.fromkeys((*local_data_paths(config, root=project), *resume)))


def check_named(config: Config, project: Path) -> list[str]:
    """Warnings about paths that the host itself must have. Raises UsageError for a path that does not exist or cannot
    be sent."""
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
    """The path relative to the project; None if it is not below it."""
    for top in (project, project.resolve()):
        relative = os.path.relpath(path, top)
        if relative != "." and not is_below(relative, [".."]):
            return relative
    return None


def _link(path: str) -> str:
    name = shlex.quote(Path(path).resolve().name or "root")
    return f"ln -s {shlex.quote(path)} {name}, and then {name} with --include {name}: its target travels"


def _check_in_project(path: str, project: Path) -> None:
    clean = os.path.normpath(path)
    if is_below(clean, [".."]):
        exists = (project / clean).exists()
        hint = _link(path) if exists else did_you_mean(project / clean)
        raise UsageError(f"{path} is outside the project {project} and does not travel", hint=hint)
    if not (project / clean).exists():
        hint = did_you_mean(project / clean, project) or "check the path; a file on the host needs an absolute path"
        raise UsageError(f"{path}: no such file or folder in {project}", hint=hint)


def did_you_mean(path: Path, project: Path | None = None) -> str:
    """A hint with the most similar name in the same folder; empty if there is none."""
    try:
        names = sorted(os.listdir(path.parent))  # noqa: PTH208 - names alone
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    if not near:
        return ""
    found = path.parent / near[0]
    return f"did you mean {(project and inside_of(found, project)) or found}?"


def to_include(
    config: Config, project: Path, *, code: Scan, includes: Sequence[str], hidden: Collection[str] = ()
) -> dict[str, bool]:
    """The paths in the project that the config names and git's rules leave out: plain relative path -> whether all of
    it is needed, or only the files that the trainer reads.

    Raises UsageError for a path that `.deployignore` leaves out, because that file is written for launches. Also for
    the env file (`hidden`), a link out of the project, and a secret's name: a config may come from anybody.
    """
    found: dict[str, bool] = {}
    for path in named_paths(config, project):
        clean = os.path.normpath(path)
        if _is_hosts_own(path) or clean == "." or is_below(clean, [".."]) or is_below(clean, includes):
            continue
        target = check_stays(clean, project)
        is_link = target != clean and not travels(target, code, includes)
        if clean in hidden or target in hidden:
            raise UsageError(f"the config names {path}, which is the env file, and that does not travel")
        if not is_link and travels(clean, code, includes):
            pieces = (one for one in _pieces(clean, project, code) if one not in hidden)
            found |= {piece: False for piece in pieces if piece not in found}
        elif is_secret(clean) or is_secret(target):
            what = f"{path} is called as what should not leave by accident, and does not travel"
            raise UsageError(what, hint=f"--include {shlex.quote(clean)} sends it all the same")
        elif not is_link and _is_of_deployignore(clean, code):
            raise left_out(path, code, hint=f" (or files=[{path!r}] in the config)")
        else:
            found[clean] = True  # a link: what it leads to comes under its name
    return found


def check_stays(path: str, project: Path) -> str:
    """The real path of a path in the project, relative to it. Raises UsageError if a link leads out: only the user may
    send what is there."""
    real = (project / path).resolve()
    target = inside_of(real, project.resolve())
    if target is None:
        what = f"{path} is a link out of the project, to {real}, and does not travel"
        raise UsageError(what, hint=f"--include {shlex.quote(path)} sends what it leads to")
    return target


def keep_of(
    folder: str, *, whole: bool, project: Path, code: Scan, asked: Sequence[str], hidden: Collection[str]
) -> Keep:
    """Which files of a folder that a config names are sent. The user did not name each single file, so what a project
    leaves out without any rule is left out here too, and so is the env file (`hidden`). Unless `whole`, git's rules
    apply to files that no model and no data need. `asked`: paths that the user includes."""
    top = project.resolve()

    def keep(inner: bytes, real: bytes, is_dir: bool) -> bool:
        path = f"{folder}/{os.fsdecode(inner)}"
        if is_below(path, asked) or (is_dir and any(is_below(one, [path]) for one in asked)):
            return True
        target = inside_of(Path(os.fsdecode(real)), top)
        if path in hidden or target in hidden:
            return False
        reason = None if whole else code.why_ignored(path)
        tracked = not whole and reason is None
        if not tracked and (is_junk(inner, is_dir=is_dir) or (target and is_secret(target))):
            return False
        if not tracked and is_dir and os.path.exists(os.path.join(real, b"pyvenv.cfg")):
            return False
        if reason is not None and not (_is_of_git(reason.source) and (is_dir or is_needed(path))):
            return False
        if os.path.exists(real):
            check_stays(path, project)
        return True

    return keep


def is_needed(path: str) -> bool:
    """Whether the trainer reads files of this kind."""
    from trainer.config.rules import LOCAL_SUFFIXES

    return path.endswith((*LOCAL_SUFFIXES, *NEEDED))


def _pieces(folder: str, project: Path, code: Scan) -> list[str]:
    """The parts of a folder that git ignores but a model or data need, such as a model's weights."""
    ignored = code.ignored.paths.items()
    below = [path for path, reason in ignored if is_below(path, [folder]) and _is_of_git(reason.source)]
    pieces = [path for path in below if any(map(is_needed, _files_of(path, folder, project)))]
    for path in pieces:
        check_stays(path, project)
    return pieces if len(pieces) <= MOST_PIECES else [folder]


def _files_of(path: str, folder: str, project: Path) -> Iterator[str]:
    """The files of a part of a folder, without those that are left out without any rule."""
    inner = os.path.relpath(path, folder)
    is_dir = (project / path).is_dir()
    parts = inner.split("/")
    above = ("/".join(parts[: n + 1]) for n in range(len(parts) - 1))
    if is_junk(os.fsencode(inner), is_dir=is_dir) or any(is_junk(os.fsencode(one), is_dir=True) for one in above):
        return
    if not is_dir:
        yield path
        return
    try:
        inside = [f"{path}/{name}" for name in os.listdir(project / path)]  # noqa: PTH208 - names alone
    except OSError:
        return
    for one in inside:  # through no link: it may lead back
        yield from ([one] if (project / path).is_symlink() else _files_of(one, folder, project))


def _is_of_git(source: str) -> bool:
    return not source.startswith("built in") and ".deployignore" not in source


def _is_of_deployignore(path: str, code: Scan) -> bool:
    reason = code.why_ignored(path)
    return reason is not None and ".deployignore" in reason.source
