"""Common parts of the command line: how words are parsed, the options that several commands have, and the host that
these select: the named one, or the one on which a job was launched. A command about one job takes the newest job if
none is named.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.commands.formatter import Context, write_options
from deployer.commands.key_options import DEFAULT_ROOT, LIMITS, ROOT, SSH, Decorator, with_keys
from deployer.commands.usage import Option, nearest
from deployer.commands.values import Seconds, parse_duration
from deployer.errors import UnknownJob, UsageError
from deployer.exit_codes import UNREAD, as_rows
from deployer.printable import shown
from deployer.terminal import as_invoked, invoked_as, notice

if TYPE_CHECKING:
    from deployer.connection.host import Host
    from deployer.jobs.registry import JobRecord

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
PULL_MAX = "2GB"
PULL_LIMIT = (
    "Limit for all results together. Beyond it, files that you name, export, traces and checkpoints stay on the host; "
    "logs and metrics always come. 0: no limit"
)
MOST_JOBS = 30
"""Jobs through which `top` can step."""
WAYS = ("auto", "fabric", "openssh")
"""The values of --transport, also in a job's record."""


class Command(click.Command):
    """A command whose help names the program as it was called and groups the options. For an unknown option it suggests
    ours if another tool has an option of that name."""

    context_class = Context

    def __init__(self, name: str | None, help: str | None = None, **options: Any) -> None:
        super().__init__(name, help=as_invoked(help or ""), **options)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click does not set it for an option without its value
            if not isinstance(error, click.NoSuchOption):
                raise
            from deployer.commands.neighbours import line_with_options

            program = ctx.meta.get("program")
            given += ["--", *program] if program else []
            if line := line_with_options(self, error.option_name, given):
                raise UsageError(f"no such option: {error.option_name}", hint=f"did you mean: {line}") from None
            raise


class Commands(Command, click.Group):
    """If the first word is not a command, it is a config: `deploy.py CONFIG …` means `deploy.py run CONFIG …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        first = next((i for i, a in enumerate(args) if a not in own), None)
        if first is not None and args[first] not in self.commands:
            if not ctx.resilient_parsing:
                _check_no_slip(args[first:], self.commands)
            args = [*args[:first], "run", *args[first:]]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands, and those with a `section` below the others."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in sorted(self.commands.items()):
            rows = sections.setdefault(getattr(command, "section", "Commands"), [])
            rows.append((name, command.get_short_help_str(limit=formatter.width)))
        for title, rows in sorted(sections.items()):
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl(as_rows())

    def invoke(self, ctx: click.Context) -> Any:
        """Exits with 141, as with SIGPIPE, if the reader of the output has gone (click would exit with 1)."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            for number in (sys.stdout.fileno(), sys.stderr.fileno()):
                os.dup2(null, number)  # buffered output causes no error at exit
            sys.exit(UNREAD)


class HostCommand(Command):
    """A command about a host, which --ssh names: a word beside the options is probably that host."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        words = super().parse_args(ctx, args)
        if words:
            raise UsageError(
                f"{self.name} takes options only, not {words[0]!r}", hint=f"did you mean --ssh {words[0]}?"
            )
        return words


def _check_no_slip(words: list[str], commands: Mapping[str, click.Command]) -> None:
    """Raises UsageError for a first word that names no file, if it is a command of another tool, or consists of letters
    and is not a program. Other words are taken for a config."""
    word = words[0]
    if any(Path(word + ending).is_file() for ending in ("", ".py", ".yaml", ".yml")):
        return
    from deployer.commands.neighbours import is_program, line_here

    line = line_here(words, commands)
    if not line and word.isalpha() and (close := difflib.get_close_matches(word, commands, n=1, cutoff=0.7)):
        line = line_here([*close, *words[1:]], commands)
    if not line and (not word.isalpha() or is_program(word)):
        return
    hint = f"did you mean: {line}" if line else f"{invoked_as()} --help lists the commands"
    raise UsageError(f"{word} is neither a command nor a config file", hint=hint)


class WithProgram(Command):
    """A command whose words after `--` are a program of the user; click does not parse them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = tuple(args)
        program: tuple[str, ...] = ()
        if "--" in args:
            cut = args.index("--")
            args, program = args[:cut], tuple(args[cut + 1 :])
        ctx.meta["program"] = program
        # click would take the next word as the optional value
        args = ["--dry-run=local" if a == "--dry-run" else a for a in args]
        try:
            left = super().parse_args(ctx, args)
            ctx.meta["words"] = words
            return left
        except click.NoSuchOption as error:
            hint = "" if program else self.hint_of(error)
            if not hint:
                raise
            raise UsageError(f"no such option: {error.option_name}", hint=hint) from None

    def hint_of(self, error: click.NoSuchOption) -> str:
        """The hint for an unknown option; empty if `nearest` finds a similar option."""
        return "" if nearest(error) else "put -- before your own program: deploy.py run -- PROGRAM …"


class WithKeys(WithProgram):
    """A command that makes a config: an unknown option is probably a key."""

    def hint_of(self, error: click.NoSuchOption) -> str:
        from deployer.commands.neighbours import said_here

        if line := said_here(error.option_name):
            return f"did you mean {line}?"
        return "" if nearest(error) else "KEY=VALUE sets a key of the config; deploy.py keys WORD finds it"


# --- options -------------------------------------------------------------------------------------------------------

SSH_KEY = click.option("--ssh-key", metavar="FILE", help="Private key for this connection.")
ACCEPT = click.option(
    "--accept-new-host-key", is_flag=True, help="Trust the key of an unknown host. A changed key is always refused."
)
TRANSPORT = click.option(
    "--transport",
    type=click.Choice(WAYS),
    help="How to connect [auto: openssh (the ssh program) if your ssh_config or key needs it, else fabric].",
)
CONNECT_TIMEOUT = click.option(
    "--connect-timeout",
    "connect_timeout_s",
    type=Seconds(min=0, min_open=True),
    metavar="S",
    help="Seconds to connect and log in [ConnectTimeout of ssh_config, or 10].",
)
ACCESS = ("ssh_key", "accept_new_host_key", "transport", "connect_timeout_s")
"""The parameters of a command that say how to connect and log in."""


def with_access(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say how to connect and log in."""
    for option in (CONNECT_TIMEOUT, TRANSPORT, ACCEPT, SSH_KEY):
        command = option(command)
    return command


def at_a_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options for the host and for the connection; the command gets them as `**place`."""
    return SSH.option()(with_access(ROOT.option("root")(command)))


NOTIFY = click.option(
    "--notify",
    multiple=True,
    metavar="URL|CMD",
    help="Report start, failure, restart and end: with a URL the host posts to it, with a command this client runs it. "
    "Repeatable [$TORCHFERRY_NOTIFY].",
)


def with_results(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options about this client's part in a job: detach, pull, and --notify."""
    detach = click.option(
        "--detach", is_flag=True, help="Return once the host has accepted the job, even if it is queued."
    )
    no_pull = click.option("--no-pull", is_flag=True, help="Leave the results on the host.")
    pull_max = click.option(
        "--pull-max",
        default=PULL_MAX,
        metavar="SIZE",
        help=f"{PULL_LIMIT} [{PULL_MAX}].",
    )
    return detach(no_pull(pull_max(NOTIFY(command))))


def with_limits(*, resume: bool = False) -> Decorator:
    """Adds the options for rules that the host applies to a job without the client."""
    allow_busy = click.option("--allow-busy", is_flag=True, help="Use GPUs even if other jobs or processes use them.")

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        return allow_busy(with_keys(LIMITS, resume=resume)(command))

    return decorate


JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")

GIVE_UP = click.option(
    "--give-up",
    "give_up_s",
    cls=Option,
    type=parse_duration,
    default="10m",
    metavar="10m",
    help="Give up after this long without a connection; the job keeps running [10m].",
)

# --- the host that they name ------------------------------------------------------------------------------------------


def host_of(ssh: str | None, root: str | None, *, project: Path | None = None, **access: Any) -> Host:
    """The host of this name, with the connection options of ACCESS and the defaults for this host. The defaults are
    those of the project, else of the current folder."""
    root, access = _with_defaults(ssh, root, access, project)
    return _host(ssh, root, **access)


def _with_defaults(
    ssh: str | None, root: str | None, access: dict[str, Any], project: Path | None = None
) -> tuple[str | None, dict[str, Any]]:
    """Completes the folder and the connection options from the defaults. A mistake in a file of defaults gives only a
    notice, so that a job can still be stopped; a launch reads them earlier, and fails."""
    from deployer.commands.defaults import Defaults, read_defaults

    try:
        defaults = read_defaults(project or Path())
    except UsageError as error:
        places = "".join(f", in {place}" for place in error.where)
        notice(shown(f"no defaults are used: {error.message}{places}"))
        defaults = Defaults()
    given = {name: taken.value for name, taken in defaults.of(ssh).items()}
    own = {name: access[name] or given.get(name) for name in ("ssh_key", "transport")}
    return root or given.get("remote_root"), {**access, **own}


def _host(ssh: str | None, root: str | None, **access: Any) -> Host:
    from deployer.connection.host import Host

    return Host(ssh, root or DEFAULT_ROOT, **{**access, "transport": access["transport"] or "auto"})


def entrance(ssh: str | None, **access: Any) -> Callable[[str | None, str], Host]:
    """`host_of` for a command that knows the host and folder only later. If `ssh` is given, it is that host's name, and
    a connection begins in the background now."""
    if ssh is None:
        return partial(host_of, **access)
    from deployer.connection.host import load_link, make_transport

    _, access = _with_defaults(ssh, None, access)
    how = {name: value for name, value in access.items() if name != "transport"}
    begun = make_transport(ssh, way=access["transport"] or "auto", **how)
    load_link(begun)
    return partial(host_of, begun=begun, **access)


def hosts_of(ssh: str | None, root: str | None, **access: Any) -> list[Host]:
    """The named host; else every host in the records, and this machine, which needs no key."""
    from deployer.jobs.registry import noted_places, read_records

    if ssh is not None or root is not None:
        return [host_of(ssh, root, **access)]
    damages: list[str] = []
    records = read_records(damages.append)
    if damages:
        notice(*map(shown, damages))
        records = [*noted_places(), *records]  # a damaged record no longer names its host
    places = {(r.ssh, r.root): r for r in records}
    here = {**access, "ssh_key": None}
    hosts = [_host(*place, **_access(r, **(access if r.ssh else here))) for place, r in places.items()]
    return hosts if (None, DEFAULT_ROOT) in places else [*hosts, _host(None, DEFAULT_ROOT, **here)]


def find_host(job_id: str | None, ssh: str | None, root: str | None, **access: Any) -> tuple[Host, JobRecord | None]:
    """A job's host and record from this client's records; with --ssh or --remote-root the host that they name, and no
    record.

    Without an ID: those of the newest job on the named host, or on any host. A notice shows the ID of that job.
    """
    from deployer.jobs.registry import find_record

    if job_id is None:
        record = newest_job(ssh, root)
        notice(shown(f"the newest job: {record.job_id}"))
    elif ssh is not None or root is not None:
        return host_of(ssh, root, **access), None
    else:
        record = find_record(job_id)
    return _host(record.ssh, record.root, **_access(record, **access)), record


def id_of(job_id: str | None, record: JobRecord | None) -> str:
    """The ID to send to a host, after `find_host`: the complete ID in the record, else the ID as it was typed."""
    assert record is not None or job_id is not None  # without an ID there is a record
    return record.job_id if record is not None else str(job_id)


def newest_job(ssh: str | None = None, root: str | None = None) -> JobRecord:
    """The job that this client launched last, on the named host or in the named folder. Raises UnknownJob if there is
    none."""
    from deployer.jobs.registry import read_records, written_at

    damages: list[str] = []
    records = read_records(damages.append)
    notice(*map(shown, damages))  # a damaged record may be the newest
    meant = [r for r in records if ssh in (None, r.ssh) and root in (None, r.root)]
    if not meant:
        where = (f" on {ssh}" if ssh else "") + (f" in {root}" if root else "")
        asked = f"deploy.py ps --ssh {shlex.quote(ssh)}" if ssh else "deploy.py ps"
        raise UnknownJob(
            f"no job was launched from this machine{where}", hint=f"give the id of one; {asked} lists the jobs"
        )
    latest = [record for record in meant if record.created == meant[-1].created]  # in whole seconds
    return max(latest, key=written_at)


def known_jobs(ssh: str | None, root: str | None, **access: Any) -> list[tuple[Host, JobRecord]]:
    """The newest jobs that this client launched, on the named host or in the named folder, newest first."""
    from deployer.jobs.registry import newest_records

    records = newest_records("", MOST_JOBS)
    meant = [r for r in records if ssh in (None, r.ssh) and root in (None, r.root)]
    newest = sorted(meant, key=lambda record: record.created, reverse=True)
    here = {**access, "ssh_key": None}
    return [(_host(r.ssh, r.root, **_access(r, **(access if r.ssh else here))), r) for r in newest]


def name_one(what: str, command: str) -> UsageError:
    """The error for a command that stops or forgets jobs, and therefore needs their names. The hint has the line for
    the newest job."""
    try:
        newest = newest_job().job_id
    except UnknownJob:
        return UsageError(what, hint="deploy.py ps lists the jobs")
    return UsageError(what, hint=f"for the newest job: deploy.py {command} {newest}; deploy.py ps lists the others")


def _access(record: JobRecord, **access: Any) -> dict[str, Any]:
    """The connection options of the command line, else those of the job's launch."""
    remembered = {"ssh_key": record.ssh_key, "transport": record.transport}
    return {**access, **{name: access[name] or value for name, value in remembered.items()}}
