"""The specification of a launch: the command line together with its config or task file and the defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from deployer import terminal
from deployer.commands.defaults import Defaults, Taken, key_named, keys_of
from deployer.connection.host import Host
from deployer.errors import UsageError
from deployer.plan.options import LaunchSpec, Options, read_config, with_defaults
from deployer.printable import shown


def tell_note(note: str) -> None:
    """Shows a note, for example about a setting without effect."""
    terminal.notice(shown(f"note: {note}"))


def choose(
    config: str | None, overrides: tuple[str, ...], program: tuple[str, ...], kind: str | None, options: dict[str, Any]
) -> Options:
    """The options of a launch: of a config, a task file, or a program."""
    if config is None:
        if overrides:
            what = f"{overrides[0]!r} is an override; the config file comes first"
            raise UsageError(what, hint="deploy.py CONFIG a.b=c …")
        if options["fsdp_config"] is not None:
            raise UsageError("--fsdp-config goes with a config; a program of your own reads its own")
        if kind is not None:
            raise UsageError("--as says what a file is, and there is none")
        return Options(command=program, **options)
    if options.get("text") is not None:  # a config that the command itself has made
        return Options(config=config, overrides=overrides, **options)
    from deployer.commands.launch.task import options_of  # not needed for a program

    params = click.get_current_context().command.params
    return options_of(config, overrides, program, kind=kind, params=params, options=options)


def ask_for(
    given: Options, defaults: Defaults, *, tell: Callable[[str], None] = tell_note
) -> tuple[LaunchSpec, Options, dict[str, Taken]]:
    """The specification of the launch, its options, and the defaults that they contain, by name."""
    if given.config is None:
        found = defaults.of(given.keys.get("target.ssh", defaults.host))
        keys = keys_of(found)
        spec = read_config(replace(given, keys={**keys, **given.keys}), tell=tell)
        used = {key for key in keys if key not in given.keys}
        given = replace(given, keys={**keys, **given.keys})
    else:
        spec = read_config(given, tell=tell)
        ssh = spec.config.target.ssh if "target.ssh" in spec.given else defaults.host
        found = defaults.of(ssh)
        spec, used = with_defaults(spec, keys_of(found))
    options = {name: found[name].value for name in ("wheels", "requirements") if name in found}
    options = {name: value for name, value in options.items() if not getattr(given, name)}
    taken = {name: one for name, one in found.items() if key_named(name) in used or name in (*options, *WAYS_IN)}
    return spec, replace(given, **options), taken


WAYS_IN = ("ssh_key", "transport")


def places(taken: dict[str, Taken], host: Host) -> dict[str, str]:
    """The place of each default that the launch uses; ssh_key and transport only if the host uses that value."""
    is_used = {name: name not in WAYS_IN or getattr(host, name) == one.value for name, one in taken.items()}
    return {name: one.where for name, one in taken.items() if is_used[name]}
