"""pyproject.toml and uv.lock: the requirements in a project's metadata."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from deployer.environment.needs import Needs, Tree, cut
from deployer.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NOT_OF_A_BUILD = frozenset(
    ("ruff", "black", "isort", "mypy", "pyright", "ty", "pylint", "flake8", "codespell", "pytest", "coverage", "tox")
) | {"torchferry"}
"""Tables of `tool` that do not affect an environment: a change in them does not cause a rebuild."""


def read_toml(tree: Tree, path: str, place: str = "") -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(tree.read(path, place).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # from TOML or UTF-8
        raise UsageError(f"{path} is no TOML: {cut(str(error) or 'too deep')}") from None
    return data


def is_project(tree: Tree, path: str) -> bool:
    """Whether a pyproject.toml describes a project; False if it only holds settings of tools."""
    may_be = re.compile(rb"^[ \t]*\[?[ \t\"']*project[ \t\"']*[].=]", re.MULTILINE)  # most files need no parser
    return tree.has(path) and may_be.search(tree.read(path)) is not None and "project" in read_toml(tree, path)


def read_project(
    tree: Tree, folder: str, needs: Needs, *, place: str = "", extras: Sequence[str] = (), pins: Pins | None = None
) -> dict[str, Any]:
    """Adds the needs of a project in a folder of the tree, and its import path. Returns its pyproject.toml, {} if it
    has none.

    Facts that only a build knows (computed dependencies or entry points, a setup.py) cannot be checked.
    """
    path = _below(folder, "pyproject.toml")
    data = read_toml(tree, path, place) if tree.has(path) else {}
    project = table(data, "project", path)
    others = [name for name in ("setup.py", "setup.cfg") if tree.has(_below(folder, name))]
    needs.built_from(folder, _of_a_build(data), [tree.digests[_below(folder, name)] for name in others])
    dynamic = {"dependencies", "optional-dependencies", "entry-points"}.intersection(_texts(project, "dynamic", path))
    unknown = [f"dynamic {name}" for name in sorted(dynamic)]
    unknown += ["entry-points"] * ("entry-points" in project) + ["setup.py"] * ("setup.py" in others)
    if not project or unknown:
        needs.cannot_check(place or path, f"({', '.join(unknown) or 'no [project]'}: only a build tells what it needs)")
    src = _below(folder, "src")
    needs.import_from(src if tree.below(src) else folder)
    limit = project.get("requires-python", "")
    try:
        needs.limit_python(str(SpecifierSet(limit)))
    except (InvalidSpecifier, TypeError, AttributeError):
        raise UsageError(f"{path}: project.requires-python is {cut(repr(limit))}, no range of versions") from None
    for requirement in _dependencies(project, [e.strip() for e in extras if e.strip()], path):
        if pins is None or not pins.require(tree, requirement, needs):
            needs.require(requirement)
    return data


def _below(folder: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(folder, name))


def _of_a_build(data: dict[str, Any]) -> str:
    tools = data.get("tool")
    kept = (
        {name: table for name, table in tools.items() if name not in _NOT_OF_A_BUILD} if isinstance(tools, dict) else {}
    )
    return repr({**data, "tool": kept})


def _dependencies(project: dict[str, Any], extras: list[str], path: str) -> list[Requirement]:
    own, optional = canonicalize_name(str(project.get("name", ""))), table(project, "optional-dependencies", path)
    lists = {canonicalize_name(name): f"optional-dependencies.{name}" for name in optional}
    found = _requirements(_texts(project, "dependencies", path), f"{path}: project.dependencies")
    wanted, done = [canonicalize_name(extra) for extra in extras], set()
    while wanted:
        extra = wanted.pop()
        if extra in done:
            continue
        done.add(extra)
        if extra not in lists:
            raise UsageError(
                f"{path} has no optional dependencies {cut(extra)}", hint=f"it has: {', '.join(lists) or 'none'}"
            )
        name = lists[extra].partition(".")[2]
        for requirement in _requirements(_texts(optional, name, path), f"{path}: project.{lists[extra]}"):
            if canonicalize_name(requirement.name) == own:  # its own extras, requested by its own name
                wanted += map(canonicalize_name, requirement.extras)
            else:
                found.append(requirement)
    return found


def _requirements(texts: Sequence[str], place: str) -> list[Requirement]:
    found = []
    for number, text in enumerate(texts):
        try:
            found.append(Requirement(text))
        except InvalidRequirement as error:
            why = cut(str(error).splitlines()[0])
            raise UsageError(f"{place}[{number}]: {cut(text)} is no requirement: {why}") from None
    return found


def table(data: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    """A table of a TOML file, {} if it is missing. Raises UsageError if the name holds something else."""
    found = data.get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {name} is {cut(repr(found))}, not a table")
    return found


def _texts(data: dict[str, Any], name: str, path: str) -> list[str]:
    texts = data.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path}: {name} is {cut(repr(texts))}, not a list of texts")
    return texts


# --- uv.lock ----------------------------------------------------------------------------------------------------------


class Locked(NamedTuple):
    version: str
    source: dict[str, Any]


class Pins:
    """The versions that a uv.lock gives for the project's own dependencies: one each, unless it depends on the
    platform."""

    def __init__(self, tree: Tree, path: str) -> None:
        packages = read_toml(tree, path).get("package", [])
        if not isinstance(packages, list) or not all(
            isinstance(p, dict) and isinstance(p.get("source"), dict) for p in packages
        ):
            raise UsageError(f"{path} is no lock of uv", hint="uv lock writes it anew")
        self._folder = posixpath.dirname(path)
        self._seen: set[str] = set()
        self._packages: dict[str, list[Locked]] = {}
        for package in packages:
            locked = Locked(str(package.get("version", "")), package["source"])
            self._packages.setdefault(canonicalize_name(str(package.get("name", ""))), []).append(locked)

    def require(self, tree: Tree, requirement: Requirement, needs: Needs) -> bool:
        """Adds the version that the lock has chosen for a requirement. Returns False if it has no single one."""
        name = canonicalize_name(requirement.name)
        found = self._packages.get(name, [])
        if len(found) != 1:
            return False
        (version, source), extras = found[0], f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        if name in self._seen:
            return True
        if "registry" in source and version:
            pinned = f"{requirement.name}{extras}=={version}"
        elif "url" in source:
            pinned = f"{requirement.name}{extras} @ {source['url']}"
        elif "git" in source:
            address, _, commit = str(source["git"]).partition("#")
            pinned = f"{requirement.name}{extras} @ git+{address.partition('?')[0]}@{commit}"
        elif "editable" in source or "virtual" in source:
            self._seen.add(name)  # a workspace member
            member = tree.inside(
                posixpath.join(self._folder, str(source.get("editable", source.get("virtual")))), "uv.lock"
            )
            read_project(tree, member, needs, place="uv.lock", extras=sorted(requirement.extras), pins=self)
            return True
        else:
            needs.cannot_check("uv.lock", name)
            return True
        try:
            chosen = Requirement(pinned)
        except InvalidRequirement:
            return False
        chosen.marker = requirement.marker
        needs.require(chosen)
        return True
