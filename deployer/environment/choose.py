"""Chooses the project file that lists what its job needs."""

from __future__ import annotations

import posixpath

from deployer.agent.python.foreign import advice
from deployer.environment.needs import Needs, Tree
from deployer.errors import UsageError

NONE = "none"


def read_needs(tree: Tree, named: str | None) -> Needs:
    """The requirements in the named file, else in requirements.txt, else in a pyproject.toml that describes a project.

    Raises UsageError, with a hint, if the named file belongs to an unsupported tool. Files that were not named are
    ignored.
    """
    needs = Needs()
    path = tree.inside(named, "--requirements") if named not in (None, NONE) else named
    if path is None:
        path = "requirements.txt" if (tree.root / "requirements.txt").is_file() else _project(tree)
    if path in (None, NONE):
        return needs
    if what := advice(path):
        raise UsageError(f"{path} is {what[0]}, which is not read here", hint=what[1])
    folder, name = posixpath.split(path)
    if name in ("pyproject.toml", "uv.lock"):
        _read_project(tree, folder, needs)
    else:
        from deployer.environment.requirements_txt import read_requirements

        needs.lock = path
        read_requirements(tree, path, needs)
    return needs


def _project(tree: Tree) -> str | None:
    if not tree.has("pyproject.toml"):
        return None
    from deployer.environment.project import is_project

    return "pyproject.toml" if is_project(tree, "pyproject.toml") else None


def _read_project(tree: Tree, folder: str, needs: Needs) -> None:
    """Reads pyproject.toml, and uv.lock if there is one. As with uv, a project without a build system is not installed;
    its dependencies are."""
    from deployer.environment import project

    path, lock = posixpath.join(folder, "pyproject.toml"), posixpath.join(folder, "uv.lock")
    pins = project.Pins(tree, lock) if tree.has(lock) else None
    if not project.is_project(tree, path):
        tree.read(path)
        raise UsageError(f"{path} has no [project], so it says nothing of what a job needs")
    data = project.read_project(tree, folder or ".", needs, pins=pins)
    sources = project.table(project.table(project.table(data, "tool", path), "uv", path), "sources", path)
    if pins is not None:
        needs.built_from(tree.digests[lock])
        needs.lock = lock
    elif sources:
        raise UsageError(
            f"{path} takes {', '.join(sorted(sources)[:3])} from tool.uv.sources, which only uv reads",
            hint=f"run uv lock{' --project ' + folder if folder else ''}: the lock is built with uv on the host",
        )
    elif "build-system" in data:
        needs.lock = path
