"""The words that complete an argument or option: jobs and hosts in this client's records, files, keys. No host is
asked, and a file that cannot be read gives no completions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from deployer.errors import FerryError

if TYPE_CHECKING:
    from deployer.jobs.registry import JobRecord

    Items = list[CompletionItem[str]]  # CompletionItem takes a type argument only in newer versions of click

MOST_JOBS = 50
MOST_FILES = 10_000
CONFIG_ENDINGS = (".py", ".yaml", ".yml")

FILE = CompletionItem("", type="file")
FOLDER = CompletionItem("", type="dir")


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """IDs of jobs that were launched from here, newest first."""
    given = ctx.params.get(param.name or "") or ()
    taken = (given,) if isinstance(given, str) else given
    return [
        CompletionItem(record.job_id, help=f"{record.ssh or 'this machine'}, {record.created[:16].replace('T', ' ')}")
        for record in _records(incomplete.lower())
        if record.job_id not in taken
    ]


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Jobs that were launched from here, else files."""
    return jobs(ctx, param, incomplete) or [FILE]


def hosts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Hosts in ssh_config, and hosts of earlier jobs; for `user@h` the hosts that begin with `h`."""
    from deployer.transport.ssh.config_file import host_aliases

    user, at, _ = incomplete.rpartition("@")
    known = [record.ssh for record in _records("") if record.ssh]
    names = [*known, *(f"{user}{at}{alias}" for alias in host_aliases())]
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(incomplete) and " " not in name]


def _records(beginning: str) -> list[JobRecord]:
    from deployer.jobs.registry import newest_records

    with suppress(FerryError, OSError):
        return newest_records(beginning, MOST_JOBS)
    return []


def configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Files that may be configs, and folders that may contain configs."""
    if incomplete.startswith("~"):
        return [FILE]
    folder, slash, beginning = incomplete.rpartition("/")
    found: Items = []
    with suppress(OSError), os.scandir(f"{folder}{slash}" or ".") as entries:
        for entry in islice(entries, MOST_FILES):
            hidden = entry.name.startswith((".", "__")) and not beginning
            if hidden or not entry.name.startswith(beginning):
                continue
            path = f"{folder}{slash}{entry.name}"
            with suppress(OSError):
                if entry.is_dir():
                    found.append(CompletionItem(f"{path}/", type="open"))
                elif entry.name.endswith(CONFIG_ENDINGS):
                    found.append(CompletionItem(path))
    return sorted(found, key=lambda item: (item.type == "open", item.value))


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    return [FILE]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    return [FOLDER]


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Keys of a config, one section at a time; after `KEY=` the allowed values."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        words = dict(_keys()).get(key) or []
        return [CompletionItem(f"{key}={word}") for word in words if f"{key}={word}".startswith(incomplete)] or [FILE]
    names = [f"{name}." if words is None else f"{name}=" for name, words in _keys()]
    if "." not in key:
        names = [f"{name.partition('.')[0]}." if "." in name else name for name in names]
    return [CompletionItem(name, type="open") for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _keys() -> Iterator[tuple[str, list[str] | None]]:
    """Every key of the schema with its allowed words, if it takes only fixed words; None: further keys follow it.

    Only the schema is loaded, which is faster than the code that reads a config.
    """
    from trainer.schema import Config

    config = Config()
    for field in fields(config):
        section = getattr(config, field.name)
        if not is_dataclass(section):
            yield field.name, _words(field.type)
            continue
        for inner in fields(section):
            is_mapping = isinstance(getattr(section, inner.name), dict)
            yield f"{field.name}.{inner.name}", None if is_mapping else _words(inner.type)


def _words(kind: Any) -> list[str]:
    """The allowed words in the text of a field's type."""
    return ["true", "false"] if str(kind).startswith("bool") else re.findall(r"'([^']*)'", str(kind))
