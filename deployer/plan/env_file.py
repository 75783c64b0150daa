"""A file of variables, such as .env: reads only the syntax that all of its many dialects share.

A line's text is never part of a message: it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, NoReturn

from deployer.errors import UsageError
from deployer.paths import expanded

MAX_BYTES = 1 << 20
MAX_VALUE_BYTES = 100_000
"""Maximum bytes of a value: the kernel starts no program with more than 128 KiB of `NAME=VALUE`."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(r"\s*(?:export\s+)?([^=\s]*)\s*(=?)\s*(.*?)\s*\Z", re.DOTALL)
_QUOTED = re.compile(r"""(?:'([^']*)'|"((?:[^"\\]|\\.)*)")(\s+\#.*|)\Z""", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}
_QUOTE = "put the value in single quotes"


class EnvFile(NamedTuple):
    named: str
    """The path as the user wrote it."""
    variables: dict[str, str]
    project: Path | None = None
    """The folder for a relative path; None: the current folder."""

    def without(self, names: Collection[str]) -> EnvFile:
        return self._replace(variables={name: value for name, value in self.variables.items() if name not in names})

    @property
    def kept_path(self) -> str:
        """The absolute path for a later resume; empty for a pipe."""
        path = (self.project or Path()) / expanded(self.named)
        return str(path.absolute()) if path.is_file() else ""

    def paths_below(self, project: Path) -> list[str]:
        """The project's paths, relative to it, under which the file would be sent: its name, and the target of a
        link."""
        path, top = project / expanded(self.named), project.resolve()
        absolute = (path.parent.resolve() / path.name, path.resolve())
        return sorted({str(one.relative_to(top)) for one in absolute if one.is_relative_to(top)})


def env_file_of(named: str | None, project: Path | None = None) -> EnvFile | None:
    """The file that --env-file or target.env_file names; a relative path is below the project, else below the current
    folder.

    Raises UsageError with the line of a mistake.
    """
    if named is None:
        return None
    from trainer.config.target import LAUNCHER_NAMES  # hardly any job waits for the rules

    variables = _read(named, project)
    for name in variables:
        reason = "it is the launcher's own" if name.startswith("TORCHFERRY_") else LAUNCHER_NAMES.get(name)
        if reason:
            raise UsageError(f"the env file {named} may not set {name}: {reason}")
    return EnvFile(named, variables, project)


def _read(named: str, project: Path | None) -> dict[str, str]:
    path = (project or Path()) / expanded(named)
    try:
        with path.open("rb") as file:  # a pipe too: --env-file <(decrypt …)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        hint = "--env-file names a file of NAME=VALUE lines on this machine"
        raise UsageError(f"the env file {named} cannot be read: {error.strerror}", hint=hint) from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"the env file {named} is larger than 1 MB: that is no list of variables")
    return parse_env(data, named)


def parse_env(data: bytes, file: str) -> dict[str, str]:
    """The variables of an env file's content."""
    variables: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{file}:{number}"
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            _refuse("is not UTF-8", where)
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        name, value = _parse_line(text, where)
        if name in lines:
            _refuse(f"sets {name} again, which line {lines[name]} has set", where, "keep one of them")
        if len(value.encode()) > MAX_VALUE_BYTES:
            _refuse(f"gives {name} more than {MAX_VALUE_BYTES // 1000} kB, with which no program can be started", where)
        variables[name], lines[name] = value, number
    return variables


def _parse_line(text: str, where: str) -> tuple[str, str]:
    match = _LINE.match(text)
    assert match is not None  # all of it may be empty
    name, equals, value = match.groups()
    if not equals:
        _refuse("has no =", where, "write NAME=VALUE, or # before a remark")
    if not _NAME.fullmatch(name):
        _refuse("names no variable before =", where, "a name has letters, digits and _, and begins with no digit")
    if "\0" in value:
        _refuse(f"has a NUL byte in {name}", where)
    return name, _read_value(value, name, where)


def _read_value(text: str, name: str, where: str) -> str:
    if text[:1] not in ("'", '"'):
        return _read_plain(text, name, where)
    match = _QUOTED.match(text)
    if match is None:
        hint = r"a value ends on its line, in the quote that it began with; \n in double quotes is a line's end"
        _refuse(f"has no end of the quote around {name}, or something behind it", where, hint)
    single, double, _ = match.groups()
    if single is not None:
        if re.search(r"\\\\|\\\Z", single):
            _refuse(rf"has a \\ in the single quotes around {name}, which tools read differently", where)
        return str(single)
    _check_expansion(re.sub(r"\\.", "", double), name, where)
    unknown = next((c for c in re.findall(r"\\(.)", double, re.DOTALL) if c not in _ESCAPES), None)
    if unknown is not None:
        _refuse(f"has a \\ in {name} before a letter that it does not go with", where, rf"{_QUOTE}, or write \\ twice")
    return re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], double, flags=re.DOTALL)


def _read_plain(text: str, name: str, where: str) -> str:
    if text.startswith("#"):
        _refuse(f"begins the value of {name} with #, which tools read differently", where, _QUOTE)
    value = re.sub(r"\s+#.*", "", text, flags=re.DOTALL)
    if re.search(r"['\"]", value):
        _refuse(f"has a quote inside the value of {name}, which tools read differently", where, _QUOTE)
    _check_expansion(value, name, where)
    return value


def _check_expansion(value: str, name: str, where: str) -> None:
    if re.search(r"\$[A-Za-z_{(]|`", value):
        what = "has a $ or ` in the value of"
        _refuse(f"{what} {name}, which some tools put another value for", where, f"{_QUOTE}: nothing is put in there")


def _refuse(what: str, where: str, hint: str = "") -> NoReturn:
    raise UsageError(f"this line {what}", where=where, hint=hint)
