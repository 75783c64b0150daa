"""From the words of a command line to values: command classes, shared options, sizes, and which host is meant."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.errors import UsageError
from deployer.render import as_invoked
from deployer.transport.choose import WAYS

if TYPE_CHECKING:
    from deployer.host import Host
    from deployer.registry import JobRecord

DEFAULT_ROOT = "~/.torchferry"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


PULL_MAX = "2GB"


class Command(click.Command):
    """A command whose help names this program as it was called."""

    def __init__(self, name: str | None, help: str | None = None, **options: Any) -> None:
        super().__init__(name, help=as_invoked(help or ""), **options)


class Commands(Command, click.Group):
    """A first word that is no command is a config: `deploy.py CONFIG …` means `deploy.py run CONFIG …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        first = next((i for i, a in enumerate(args) if a not in own), None)
        if first is not None and args[first] not in self.commands:
            _check_no_slip(args[first], list(self.commands))
            args = [*args[:first], "run", *args[first:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Ends with 141, as by SIGPIPE, once nobody reads the output any more (click would say 1)."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(null, stream.fileno())  # what is still buffered leaves no complaint at the end
            sys.exit(141)


class HostCommand(Command):
    """A command about a host, which is named by --ssh: a word beside the options is most likely that host."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        words = super().parse_args(ctx, args)
        if words:
            raise UsageError(
                f"{self.name} takes options only, not {words[0]!r}", hint=f"did you mean --ssh {words[0]}?"
            )
        return words


def _check_no_slip(word: str, commands: list[str]) -> None:
    """UsageError for what looks like a command and is none; a config's name has a point or is there, but for that."""
    if not word.isalpha() or any(Path(word + ending).exists() for ending in ("", ".py", ".yaml", ".yml")):
        return
    close = difflib.get_close_matches(word, commands, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(sorted(commands))}; --help explains them"
    raise UsageError(f"{word} is neither a command nor a config file", hint=hint)


class Seconds(click.FloatRange):
    """A span of time that a clock can wait for: a number, and no more than a year."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not seconds <= 365 * 86400:  # not a number neither
            self.fail(f"{seconds:g} is not a number of seconds up to a year.", param, ctx)
        return seconds


class WithProgram(Command):
    """A command whose words after `--` are a program of the user's, kept apart and untouched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        program: tuple[str, ...] = ()
        if "--" in args:
            cut = args.index("--")
            args, program = args[:cut], tuple(args[cut + 1 :])
        ctx.meta["program"] = program
        # an option with an optional value would take the next word for it
        args = ["--dry-run=local" if a == "--dry-run" else a for a in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if program or error.possibilities:
                raise
            raise UsageError(
                error.format_message(), hint="before a program of your own comes --: deploy.py run -- PROGRAM …"
            ) from None


# --- options -------------------------------------------------------------------------------------------------------

SSH = click.option("--ssh", metavar="[USER@]HOST[:PORT]", help="Where: an address or an alias of ~/.ssh/config.")
SSH_KEY = click.option("--ssh-key", metavar="FILE", help="Private key for this connection.")
ACCEPT = click.option(
    "--accept-new-host-key", is_flag=True, help="Trust a host seen for the first time (a changed key is refused)."
)
ROOT = click.option("--remote-root", "root", metavar="DIR", help=f"Torchferry's folder on the host [{DEFAULT_ROOT}].")
TRANSPORT = click.option(
    "--transport",
    type=click.Choice(WAYS),
    help="How to connect [auto: openssh, the ssh program, where a host's options need it; else fabric].",
)
CONNECT_TIMEOUT = click.option(
    "--connect-timeout",
    "connect_timeout_s",
    type=Seconds(min=0, min_open=True),
    metavar="S",
    help="Seconds to connect and log in [ConnectTimeout of ssh_config, or 10].",
)
ACCESS = ("ssh_key", "accept_new_host_key", "transport", "connect_timeout_s")
"""The options that say how to get in, as they reach a command."""


def with_access(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how to get in."""
    for option in (CONNECT_TIMEOUT, TRANSPORT, ACCEPT, SSH_KEY):
        command = option(command)
    return command


def at_a_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which host is meant and how to get in; they reach the command as `**place`."""
    return SSH(with_access(ROOT(command)))


def with_values(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that give a job its environment."""
    env = click.option("--env", multiple=True, metavar="K=V", help="Environment variable of the job. Repeatable.")
    secret = click.option(
        "--secret", "secrets", multiple=True, metavar="NAME", help="Pass on a variable; its value is kept nowhere."
    )
    return env(secret(command))


def with_results(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how long this client stays with a job, and what it brings home."""
    detach = click.option("--detach", is_flag=True, help="Return once the job has started.")
    no_pull = click.option("--no-pull", is_flag=True, help="Leave the results on the host.")
    pull_max = click.option(
        "--pull-max", default=PULL_MAX, metavar="SIZE", help=f"Bring an export home up to this size [{PULL_MAX}]."
    )
    return detach(no_pull(pull_max(command)))


def with_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what the host does with a job by itself."""
    for option in (
        click.option(
            "--stall-timeout",
            "stall_timeout_s",
            type=parse_duration,
            metavar="10m",
            help="Fail without a step for so long.",
        ),
        click.option(
            "--max-runtime", "max_runtime_s", type=parse_duration, metavar="1h30m", help="Then save and stop."
        ),
        click.option(
            "--max-restarts", type=click.IntRange(min=0), metavar="N", help="Start again after a failure, N times."
        ),
        click.option("--queue", is_flag=True, help="Wait for the GPUs on the host, first in, first out."),
        click.option("--allow-busy", is_flag=True, help="Use GPUs that other processes are using."),
    ):
        command = option(command)
    return command


JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


# --- from words to values ---------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Bytes of `500MB`, `2GB`, `1.5G`, `1000`; for a limit 0 means none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)[bB]?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint=f"for example 500MB or {PULL_MAX}")
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}[match.group(2).lower()]
    size = float(match.group(1)) * factor
    if size >= 1 << 63:
        raise UsageError(f"{text!r} is more than any disk holds", hint="for a limit 0 means none")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h30m`, `2d`; of `0` too, any other number needs its unit."""
    text = text.strip()
    if re.fullmatch(r"[1-9]\d*(\.\d+)?|0+\.\d+", text):
        raise UsageError(f"{text!r} has no unit", hint=f"{text}s, {text}m, {text}h or {text}d")
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", "0s" if text == "0" else text)
    if match is None or not any(match.groups()):
        raise UsageError(f"{text!r} is not a duration", hint="for example 90s, 10m, 1h30m or 2d")
    seconds = sum(float(number or 0) * unit for number, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True))
    if seconds > 36500 * 86400:
        raise UsageError(f"{text!r} is longer than a hundred years")
    return seconds


def parse_since(text: str, *, now: datetime | None = None) -> dict[str, float]:
    """A moment for the host: `ago_s` of a duration (`10m`), `unix_s` of a time (`14:30`, `2026-01-31T14:30`, `…Z`)."""
    if re.fullmatch(r"[\d.]+[dhms\d.]*", text.strip()):
        return {"ago_s": parse_duration(text)}
    now = now or datetime.now().astimezone()
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text.strip()):
            moment = datetime.combine(now, time.fromisoformat(text.strip().zfill(5)), now.tzinfo)
            return {"unix_s": (moment if moment <= now else moment - timedelta(days=1)).timestamp()}
        return {"unix_s": datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()}
    except ValueError:
        hint = "for example 10m, 2h, 14:30 or 2026-01-31T14:30"
        raise UsageError(f"--since {text!r} is neither a duration nor a time", hint=hint) from None


def host_of(
    ssh: str | None,
    root: str | None,
    *,
    ssh_key: str | None,
    accept_new_host_key: bool,
    transport: str | None,
    connect_timeout_s: float | None,
) -> Host:
    from deployer.host import Host

    return Host(ssh, root or DEFAULT_ROOT, ssh_key, accept_new_host_key, transport or "auto", connect_timeout_s)


def hosts_of(ssh: str | None, root: str | None, **access: Any) -> list[Host]:
    """The named host, or every host that the records name and this machine."""
    from deployer.registry import read_records

    if ssh is not None or root is not None:
        return [host_of(ssh, root, **access)]
    places = {(r.ssh, r.root): r for r in read_records()}
    hosts = [host_of(where, folder, **_access(record, **access)) for (where, folder), record in places.items()]
    return hosts if (None, DEFAULT_ROOT) in places else [*hosts, host_of(None, DEFAULT_ROOT, **access)]


def find_host(job_id: str | None, ssh: str | None, root: str | None, **access: Any) -> tuple[Host, JobRecord | None]:
    """The host of a job by this client's records; with --ssh or --remote-root (or no id) the host that they name."""
    from deployer.registry import find_record

    if job_id is None or ssh is not None or root is not None:
        return host_of(ssh, root, **access), None
    record = find_record(job_id)
    return host_of(record.ssh, record.root, **_access(record, **access)), record


def _access(record: JobRecord, **access: Any) -> dict[str, Any]:
    """As the command line says, else as the job was launched."""
    remembered = {"ssh_key": record.ssh_key, "transport": record.transport}
    return {**access, **{name: access[name] or value for name, value in remembered.items()}}
