"""What a project's own files say that its job needs, gathered while they are read."""

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
"""Of one file. A lock of a large project has one or two."""
_SHOWN = 100


@dataclass(frozen=True)
class Tree:
    """The files that travel: relative path -> hash of the content."""

    root: Path
    digests: Mapping[str, str]

    def has(self, path: str) -> bool:
        return path in self.digests

    def below(self, folder: str) -> dict[str, str]:
        start = "" if folder == "." else folder + "/"
        return {path: digest for path, digest in self.digests.items() if path.startswith(start)}

    def read(self, path: str, place: str = "") -> bytes:
        """A file's bytes. UsageError for one that is not there, does not travel or is too large; `place` names it."""
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
        """A path of a file, in its plain form. UsageError for one outside of the project."""
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
    """What the interpreter must have, and from which file an environment is built where none has it."""

    lock: str | None = None
    requires: list[str] = field(default_factory=list)
    """PEP 508 texts in packaging's canonical form; addresses without users, passwords and what follows a `?`."""
    constraints: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """What no interpreter can be asked for, each with its place: it counts as unmet."""
    python: str = ""
    paths: list[str] = field(default_factory=list)
    """Folders of the project that a job imports from, as an editable install would have it."""
    variables: list[str] = field(default_factory=list)
    """Names in `${NAME}`."""
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
        """Something that a build reads: an environment is built anew when it changes."""
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
    """An address without what may be secret in it: it goes into the plan, and is shown."""
    return re.sub(r"[?#]\S*", "", re.sub(r"(?<=://)[^/@\s]*@", "", text))


def cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
