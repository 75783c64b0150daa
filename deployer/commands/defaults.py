"""Defaults from files: `[tool.torchferry]` in the project's pyproject.toml, and this user's `config.toml`.

Each may have a table per host.

The command line and the job's config override a default. click's default_map would override the config, and does not
know which host a config names, so this module combines the layers.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deployer.commands.values import parse_duration, parse_gpus, parse_path, parse_size
from deployer.errors import UsageError
from deployer.paths import config_dir, expanded

MAX_BYTES = 1 << 20
PROJECT, USER = "pyproject.toml", "config.toml"
HOSTS = "hosts"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Entry(NamedTuple):
    """A name that a table may contain. `key`: the config key; "" for an option without a config key."""

    key: str
    read: Callable[[Any], Any]
    """Parses the value. Raises ValueError with the expected form if the value is wrong."""
    of_host: bool = True
    """Whether it is also allowed in the table of a host."""


class Taken(NamedTuple):
    """A default, and the name of the table that contains it."""

    value: Any
    where: str


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a whole number, 0 or more")
    return value


def _path_list(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError('a list of paths, such as ["out"]')
    return [parse_path(one) for one in value]


def _gpus(value: Any) -> list[int | str]:
    if isinstance(value, str) and value:
        return parse_gpus(value)
    if not isinstance(value, list) or not value or not all(isinstance(one, (int, str)) for one in value):
        raise ValueError('GPUs as --gpus takes them, such as "0,1" or "auto:2"')
    return [gpu for one in value for gpu in parse_gpus(str(one))]


def _variables(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("a table of variables")
    for name, one in value.items():
        if not _NAME.fullmatch(name) or isinstance(one, bool) or not isinstance(one, (str, int, float)):
            raise ValueError(f"a table of variables with texts or numbers, unlike {name}")
    return {name: str(one) for name, one in value.items()}


def _by(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda value: parse(_text(value))


def _one_of(*words: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in words:
            raise ValueError(" or ".join(words))
        return value

    return read


ENTRIES: Mapping[str, Entry] = {
    "host": Entry("target.ssh", _text, of_host=False),
    "remote_root": Entry("target.root", _text),
    "python": Entry("target.python", _text),
    "gpus": Entry("target.gpu_ranks", _gpus),
    "device": Entry("target.device", _one_of("auto", "cuda", "cpu")),
    "env": Entry("target.env", _variables),
    "out": Entry("target.outputs", _path_list),
    "queue": Entry("target.queue", _flag),
    "max_restarts": Entry("target.max_restarts", _count),
    "max_runtime": Entry("target.max_runtime_s", _by(parse_duration)),
    "idle_timeout": Entry("target.idle_timeout_s", _by(parse_duration)),
    "stall_timeout": Entry("target.stall_timeout_s", _by(parse_duration)),
    "setup": Entry("target.setup", _text),
    "setup_timeout": Entry("target.setup_timeout_s", _by(parse_duration)),
    "log_max": Entry("target.log_max_gb", lambda value: parse_size(_text(value)) / 1e9),
    "requirements": Entry("", _text),
    "wheels": Entry("", _text),
    "ssh_key": Entry("", _text),
    "transport": Entry("", _one_of("auto", "fabric", "openssh")),
}
"""By the names of the options. It excludes options that are dangerous for all jobs at once: secrets, an env file, and
trust in an unknown host key."""


class Table(NamedTuple):
    """The checked tables of a file."""

    file: str
    place: str
    """The name of the top table in the file; empty if the whole file is meant."""
    general: Mapping[str, Any]
    hosts: Mapping[str, Mapping[str, Any]]

    def where(self, host: str = "") -> str:
        """The name of the file's table, or of its table for a host, in messages."""
        place = ".".join(filter(None, (self.place, f"{HOSTS}.{host}" if host else "")))
        return f"{self.file} [{place}]" if place else self.file


class Defaults(NamedTuple):
    """The tables of all files; an earlier one overrides the later ones."""

    tables: tuple[Table, ...] = ()

    @property
    def host(self) -> str | None:
        """The host of jobs that name no host; None: this machine."""
        return next((table.general["host"] for table in self.tables if "host" in table.general), None)

    def of(self, ssh: str | None) -> dict[str, Taken]:
        """The defaults for a host by name; `ssh`: the host as the user named it. A variable of `env` is env.NAME."""
        names = _names_of(ssh) if ssh is not None and any(table.hosts for table in self.tables) else ()
        layers = [(t.where(name), t.hosts[name]) for t in self.tables if (name := _first(names, t.hosts))]
        layers += [(table.where(), table.general) for table in self.tables]
        found: dict[str, Taken] = {}
        for where, values in layers:
            for name, value in values.items():
                for own, one in _parts(name, value):
                    found.setdefault(own, Taken(one, where))
        if ssh is None:  # these options are for connections to a host
            found = {name: taken for name, taken in found.items() if name not in ("ssh_key", "transport")}
        return found


def keys_of(defaults: Mapping[str, Taken]) -> dict[str, Any]:
    """The defaults that set a config key, by dotted key."""
    return {key: taken.value for name, taken in defaults.items() if (key := key_named(name))}


def key_named(name: str) -> str:
    """The config key that a default sets; empty if it sets none."""
    top, _, rest = name.partition(".")
    key = ENTRIES[top].key
    return f"{key}.{rest}" if rest else key


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name != "env":
        yield name, value
    else:
        yield from ((f"env.{variable}", one) for variable, one in value.items())


def _first(names: tuple[str, ...], hosts: Mapping[str, Any]) -> str:
    return next((name for name in names if name in hosts), "")


def _names_of(ssh: str) -> tuple[str, ...]:
    """The possible names of a host's table: the host as typed, then shorter and shorter forms of the address."""
    from deployer.transport.ssh.target import parse_target

    target = parse_target(ssh)
    user, port = target.user, target.port
    less = [f"{user}@{target.host}"] * bool(user) + [f"{target.host}:{port}"] * bool(port) + [target.host]
    return tuple(dict.fromkeys((ssh, target.address, *less)))


# --- the files --------------------------------------------------------------------------------------------------------


def read_defaults(project: Path) -> Defaults:
    """Reads the defaults of the project and of the user. Raises UsageError, with file and key, for an invalid one."""
    tables = []
    text = _read(project / PROJECT)
    if b"torchferry" in text:  # for most projects the parser is not needed
        tool = _parse(text, PROJECT).get("tool")
        own = tool.get("torchferry") if isinstance(tool, dict) else None
        if own is not None:
            tables.append(_table(own, PROJECT, "tool.torchferry", folder=project))
    path = config_dir() / USER
    if text := _read(path):
        tables.append(_table(_parse(text, str(path)), str(path), "", folder=path.parent))
    return Defaults(tuple(tables))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return b""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise UsageError(f"{path} is larger than 1 MB: that is no file of settings")
    return text


def _parse(text: bytes, file: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # from TOML or UTF-8 decoding
        raise UsageError(f"{file} is no TOML: {str(error)[:200] or 'too deep'}") from None
    return data


def _table(data: Any, file: str, place: str, *, folder: Path) -> Table:
    if not isinstance(data, dict):
        raise UsageError(f"{place} is no table", where=file)
    hosts = data.get(HOSTS, {})
    dotted = f"{place}." if place else ""
    if not isinstance(hosts, dict):
        raise UsageError(f"{dotted}{HOSTS} is no table", where=file, hint=f"[{dotted}{HOSTS}.NAME] is a host's own")
    general = {name: value for name, value in data.items() if name != HOSTS}
    own = {
        name: _values(values, f"{dotted}{HOSTS}.{name}", file, folder=folder, of_host=True)
        for name, values in hosts.items()
    }
    return Table(file, place, _values(general, place, file, folder=folder, of_host=False), own)


def _values(data: Any, place: str, file: str, *, folder: Path, of_host: bool) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{place} is no table", where=file)
    known = [name for name, entry in ENTRIES.items() if entry.of_host or not of_host]
    found = {}
    for name, value in data.items():
        key = f"{place}.{name}" if place else name
        if name not in known:
            raise UsageError(
                f"{key} is no default that can be given", where=file, hint=_near(name, known, of_host=of_host)
            )
        try:
            found[name] = ENTRIES[name].read(value)
        except ValueError as error:
            raise UsageError(f"{key} is {str(value)[:60]!r}, expected {error}", where=file) from None
        except UsageError as error:
            raise UsageError(f"{key}: {error.message}", where=file, hint=error.hint) from None
        if name in ("wheels", "ssh_key"):  # files on this machine; a relative path starts at the folder of this file
            found[name] = str(folder / expanded(value))
            if (
                name == "wheels"
                and file == PROJECT
                and not Path(found[name]).resolve().is_relative_to(folder.resolve())
            ):
                hint = f"--wheels, or your own {USER}, may name any folder"
                raise UsageError(f"{key} is {value[:60]}, which is outside the project", where=file, hint=hint)
    return found


def _near(name: str, known: list[str], *, of_host: bool) -> str:
    if name in ("ssh", "host"):
        return f"the table's name is the host, [{HOSTS}.NAME]" if of_host else "did you mean host?"
    if name in ("secrets", "secret", "env_file", "accept_new_host_key"):
        return f"--{name.replace('_', '-').removesuffix('s')} says it for each job"
    near = difflib.get_close_matches(name.replace("-", "_"), [*known, *([] if of_host else [HOSTS])], n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
