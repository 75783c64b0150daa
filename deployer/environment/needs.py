"""The requirements of a job, collected from the project's files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deployer.agent.host.files import blake2b
from deployer.agent.python.spec import PythonSpec
from deployer.errors import UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MOST_BYTES = 16 * 10**6
"""Limit for one file. The lock of a large project has 1 to 2 MB."""
_SHOWN = 100


@dataclass(frozen=True)
class Tree:
    """The files that are sent: relative path -> hash of the content."""

    root: Path
    digests: Mapping[str, str]

    def has(self, path: str) -> bool:
        return path in self.digests

    def below(self, folder: str) -> dict[str, str]:
        start = "" if folder == "." else folder + "/"
        return {path: digest for path, digest in self.digests.items() if path.startswith(start)}

    def read(self, path: str, place: str = "") -> bytes:
        """The file's bytes. Raises UsageError if it is missing, is not sent or is too large; `place` is named in the
        error."""
        named = f"{place}: {path}" if place else path
        if not self.has(path):
            self._missing(path, named)
        try:
            with (self.root / path).open("rb") as f:
                data = f.read(MOST_BYTES + 1)
        except OSError as error:
            raise UsageError(f"{named} cannot be read: {error.strerror}") from None
        if len(data) > MOST_BYTES:
            raise UsageError(f"{named} is larger than {MOST_BYTES // 10**6} MB, which no list of requirements is")
        return data

    def inside(self, path: str, place: str) -> str:
        """A path from a file, normalized. Raises UsageError if it is outside of the project."""
        plain = os.path.normpath(path)
        if plain.startswith("/"):
            plain = os.path.relpath(plain, self.root)
        if plain == ".." or plain.startswith("../"):
            raise UsageError(
                f"{place}: {cut(path)} is outside of the project and does not travel",
                hint="copy it into the project, or link it there (ln -s) and --include the link",
            )
        return plain

    def _missing(self, path: str, named: str) -> NoReturn:
        if (self.root / path).is_file():
            raise UsageError(f"{named} is left out of what is sent", hint=f"--include {path} sends it all the same")
        raise UsageError(f"{named} does not exist in {self.root}")


@dataclass
class Needs:
    """The requirements for the interpreter, and the file from which an environment is built if no interpreter meets
    them."""

    lock: str | None = None
    requires: list[str] = field(default_factory=list)
    """PEP 508 texts in packaging's canonical form; addresses without users, passwords and everything after `?`."""
    constraints: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Requirements that cannot be checked in an interpreter, each with its place; they count as unmet."""
    python: str = ""
    paths: list[str] = field(default_factory=list)
    """Folders of the project that a job imports from, as with an editable install."""
    variables: list[str] = field(default_factory=list)
    """The names in `${NAME}`."""
    _read: list[Any] = field(default_factory=list)

    def require(self, requirement: Requirement, *, constraint: bool = False) -> None:
        kept = self.constraints if constraint else self.requires
        if requirement.url:
            requirement.url = without_secrets(requirement.url)
        if (text := str(requirement)) not in kept:
            kept.append(text)

    def cannot_check(self, place: str, text: str) -> None:
        self.unchecked.append(f"{place} {cut(without_secrets(text))}")

    def built_from(self, *what: Any) -> None:
        """Records an input of a build: if it changes, the environment is built again."""
        self._read.append(what)

    def limit_python(self, specifier: str) -> None:
        if specifier and specifier not in self.python.split(","):
            self.python = ",".join(filter(None, (self.python, specifier)))

    def import_from(self, path: str) -> None:
        if path not in self.paths:
            self.paths.append(path)

    def spec(self) -> PythonSpec:
        read = json.dumps([self.lock, self._read]).encode("ascii")
        requires = tuple(self.requires)
        return PythonSpec(
            requires=() if self.lock else requires,
            lock=self.lock,
            locked=requires if self.lock else (),
            constraints=tuple(self.constraints),
            unchecked=tuple(self.unchecked),
            python=self.python,
            paths=tuple(self.paths),
            variables=tuple(self.variables),
            key=blake2b(read, digest_size=10).hexdigest() if self.lock else "",
        )


def without_secrets(text: str) -> str:
    """The text without parts of an address that may be secret: it goes into the plan, and is shown."""
    return re.sub(r"[?#]\S*", "", re.sub(r"(?<=://)[^/@\s]*@", "", text))


def cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
