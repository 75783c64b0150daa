"""The command line. Heavy imports wait inside the commands, so that `--help` is instant."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from deployer.errors import FerryError, LostConnection, UsageError
from deployer.render import invoked_as, notice, show_error
from deployer.words import (
    ACCESS,
    CONTEXT,
    JSON,
    PULL_MAX,
    ROOT,
    SSH,
    Command,
    Commands,
    HostCommand,
    Seconds,
    WithProgram,
    at_a_place,
    find_host,
    host_of,
    hosts_of,
    parse_duration,
    parse_since,
    parse_size,
    with_access,
    with_limits,
    with_results,
    with_values,
)

GIVE_UP = click.option(
    "--give-up",
    "give_up_s",
    type=parse_duration,
    default="10m",
    metavar="10m",
    help="Stop following after so long without a connection; the job runs on [10m].",
)


@click.group(cls=Commands, context_settings=CONTEXT, invoke_without_command=True)
@click.version_option(package_name="torchferry", prog_name="torchferry")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Run a training config on any machine you can ssh to, watch it, and bring the results home.

    \b
      deploy.py configs/02_debug_sft_fsdp.py --ssh root@host:port    ship, launch, stream, bring results home
      deploy.py configs/02_debug_sft_fsdp.py --dry-run               show the torchrun command; no network
      deploy.py configs/01_debug_sft.py target.device=cpu            run one on this machine, without a GPU
      deploy.py run --ssh gpu --gpus 0,1 -- python my_train.py …     a program of your own

    `deploy.py CONFIG` means `deploy.py run CONFIG`. A job goes on when this client, its network or its terminal
    ends; `ps`, `logs`, `stop` and `pull` find it again by its id.

    Exit codes of a followed run: the job's own; 143 it was stopped; 124 it stalled (--stall-timeout); 125 could
    not deploy, or it is lost; 75 it runs on without this client; 2 usage or config; 130 interrupted, 1 a question
    answered with no, and nothing was started.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(cls=WithProgram, context_settings=CONTEXT)
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@SSH
@with_access
@click.option("--fsdp-config", metavar="FILE", help="Options of FSDP from a YAML as `accelerate config` writes it.")
@click.option("--gpus", metavar="0,2|auto:2", help="GPU indices (nvidia-smi), UUIDs, or the freest; one process each.")
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), help="cpu: as many CPU processes as --gpus names."
)
@click.option("--torchrun", is_flag=True, help="Start the program after -- under torchrun.")
@click.option("--name", metavar="NAME", help="Name of the run; begins its id.")
@with_values
@ROOT
@click.option("--python", metavar="PATH", help="The job's interpreter on the host.")
@click.option("--include", multiple=True, metavar="PATH", help="Ship an ignored data set or model, once, by hash.")
@click.option("--wheels", metavar="DIR", help="Ship wheels for a host without internet.")
@click.option("--dry-run", type=click.Choice(["local", "remote"]), metavar="[=remote]", help="Show what would run.")
@with_results
@with_limits
@click.option(
    "--log-max", "log_max_bytes", type=parse_size, metavar="SIZE", help="Keep this much of a rank's log [10GB]; 0: all."
)
@GIVE_UP
@click.option("--yes", is_flag=True, help="Ship a surprisingly large tree or a home folder without asking.")
@JSON
def run(config: str | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Run a config, or any program after --.

    \b
      deploy.py CONFIG [a.b=c …]              the trainer with this config
      deploy.py run -- python my_train.py …   a program of your own
      deploy.py run --torchrun --gpus 0,1 -- my_train.py …

    A program of your own runs in a copy of this folder, and $TORCHFERRY_RUN_DIR names the job's folder. What it writes
    there comes home: metrics.jsonl and export/, and checkpoints/ on request (`pull`). Its other files stay on the host.
    """
    if config is not None and "=" in config:
        raise UsageError(f"{config!r} is an override; the config file comes first", hint="deploy.py CONFIG a.b=c …")
    program = click.get_current_context().meta["program"]
    if program and config is not None:
        raise UsageError("give a config or a program after --, not both")
    if options["fsdp_config"] is not None and config is None:
        raise UsageError("--fsdp-config goes with a config; a program of your own reads its own")
    if config is not None and not Path(config).exists() and shutil.which(config):
        words = shlex.join((config, *overrides))
        raise UsageError(f"config {config} does not exist", hint=f"put -- before a program: deploy.py run -- {words}")
    pull_limit = parse_size(options.pop("pull_max")) or None
    access = {name: options.pop(name) for name in ACCESS}
    host = host_of(options["ssh"], options["root"], **access)
    begins = options["ssh"] is not None and options["dry_run"] is None
    if begins:
        host.prefetch()  # while the rest is imported and the tree is read
    from deployer.commands import run as command

    if begins:
        host.load()
    sys.exit(command.run(config, overrides, program, host=host, pull_limit=pull_limit, **options))


@cli.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@at_a_place
@click.option("--gpus", metavar="0,2", help="Other GPUs than before; one process each.")
@with_values
@with_results
@with_limits
@GIVE_UP
@JSON
def resume(job_id: str, overrides: tuple[str, ...], give_up_s: float, **options: Any) -> None:
    """Start a job that has ended again, from its newest checkpoint.

    Same id, same code, from its newest complete checkpoint; a program of your own as it is.

    \b
      deploy.py resume ID                     after a failure, a stop, a reboot
      deploy.py resume ID train.steps=4000    go on after its end
      deploy.py resume ID --gpus 0,1          on other GPUs
    """
    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    ways = {name: options.pop(name) for name in ("detach", "as_json")}
    ways.update(pulls=not options.pop("no_pull"), pull_limit=parse_size(options.pop("pull_max")) or None)
    host, record = find_host(job_id, **place)
    from deployer.commands import resume as command

    sys.exit(
        command.resume(
            host,
            record.job_id if record else job_id,
            overrides=overrides,
            changes=options,
            give_up_s=give_up_s,
            **ways,
        )
    )


@cli.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@click.option("--all", "show_all", is_flag=True, help="Ended jobs too (the last 20 otherwise).")
@click.option(
    "-w",
    "--watch",
    "every_s",
    is_flag=False,
    flag_value=2.0,
    type=Seconds(min=0.2),
    metavar="[S]",
    help="Draw the table anew every S seconds [2].",
)
@JSON
def ps(show_all: bool, every_s: float | None, as_json: bool, **place: Any) -> None:
    """List the jobs of all hosts used from here, or of one."""
    from deployer.commands import look

    if every_s is None:
        look.ps(hosts_of(**place), show_all=show_all, as_json=as_json)
    elif as_json:
        raise UsageError("ps --json is for scripts and --watch for the eye", hint="give one of the two")
    else:
        look.watch(hosts_of(**place), show_all=show_all, every_s=every_s)


@cli.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@at_a_place
@JSON
def status(job_id: str, as_json: bool, **place: Any) -> None:
    """Show one job: its true state, metrics, what to do next."""
    from deployer.commands import look

    host, record = find_host(job_id, **place)
    look.status(host, record.job_id if record else job_id, as_json=as_json)


@cli.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@at_a_place
@click.option("-f", "--follow/--no-follow", "follow", default=None, help="Go on until the job ends [when it runs].")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Begin at the last N lines of each rank.")
@click.option("--since", type=parse_since, metavar="10m|TIME", help="Begin where the log stood then, to the second.")
@click.option("--grep", metavar="RE", help="Only lines that match, chosen on the host (after --tail and --since).")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="Only this node's ranks.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="A", help="Only this attempt [from the latest on].")
@click.option("--raw", is_flag=True, help="One rank's bytes, unchanged.")
@click.option("--launcher", is_flag=True, help="Show torchrun's own words too.")
@GIVE_UP
def logs(job_id: str, give_up_s: float, **options: Any) -> None:
    """Show a job's log, and follow it while it runs."""
    from deployer.commands import logs as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    host, record = find_host(job_id, **place)
    wanted = command.Wanted(**options)
    sys.exit(command.logs(host, record.job_id if record else job_id, wanted, give_up_s=give_up_s))


@cli.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_ids", metavar="ID...", nargs=-1)
@at_a_place
@click.option("--all", "every", is_flag=True, help="Every job that has not ended, of --ssh or of all known hosts.")
@click.option("--grace", "grace_s", type=Seconds(min=0), metavar="S", help="Seconds to save in [120].")
@click.option("--force", is_flag=True, help="Kill at once; what is not saved is lost.")
@click.option("--yes", is_flag=True, help="With --all: do not ask.")
@JSON
def stop(job_ids: tuple[str, ...], every: bool, yes: bool, **options: Any) -> None:
    """Stop jobs; first they are asked to save.

    Then they get time, every process of them is ended, and the GPUs are looked at: are they free?
    """
    from deployer.commands import stop as command

    how = {name: options.pop(name) for name in ("grace_s", "force", "as_json")}
    if every == bool(job_ids):
        raise UsageError("name the jobs to stop, or give --all", hint="deploy.py ps lists them")
    if every:
        sys.exit(command.stop_all(hosts_of(**options), yes=yes, **how))
    found = [(job_id, *find_host(job_id, **options)) for job_id in dict.fromkeys(job_ids)]
    sys.exit(command.stop([(host, record.job_id if record else job_id) for job_id, host, record in found], **how))


@cli.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@at_a_place
@click.option("--checkpoints", is_flag=True, help="Every complete checkpoint too.")
@click.option("--checkpoint", metavar="STEP|latest", help="This checkpoint too.")
@click.option("--pull-max", default=PULL_MAX, metavar="SIZE", help=f"Limit of the whole; 0: none [{PULL_MAX}].")
@click.option("--to", "target", metavar="DIR", help="Folder for the results [results/ID].")
@click.option("--watch", is_flag=True, help="Bring what is new again and again, until the job has ended.")
@click.option("--every", "every_s", type=parse_duration, default="10s", metavar="10s", help="How often, with --watch.")
@click.option("--streams", type=click.IntRange(1, 16), metavar="N", help="Connections [4 for more than 32 MB].")
@JSON
def pull(
    job_id: str,
    checkpoints: bool,
    checkpoint: str | None,
    pull_max: str,
    target: str | None,
    watch: bool,
    every_s: float,
    streams: int | None,
    as_json: bool,
    **place: Any,
) -> None:
    """Bring a job's metrics, logs and exported model home.

    A pull that was broken off goes on where it stopped, every byte is compared with the host's by its hash, and a
    checkpoint appears whole or not at all.
    """
    from deployer.choice import Wish
    from deployer.commands import pull as command

    if checkpoints and checkpoint:
        raise UsageError("give --checkpoints or --checkpoint, not both")
    wish = Wish("all" if checkpoints else checkpoint, parse_size(pull_max) or None, may_lack=watch, streams=streams)
    host, record = find_host(job_id, **place)
    job_id, folder = (record.job_id, target or record.results) if record else (job_id, target)
    command.pull_job(
        host,
        job_id,
        target=Path(folder) if folder else None,
        wish=wish,
        every_s=every_s if watch else None,
        as_json=as_json,
    )


@cli.command(
    "exec",
    cls=WithProgram,
    short_help="Run a command on a job's host, in its code folder.",
    context_settings={**CONTEXT, "ignore_unknown_options": True},
)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("words", metavar="-- COMMAND...", nargs=-1)
@at_a_place
def execute(job_id: str | None, words: tuple[str, ...], **place: Any) -> None:
    """Run a command on a job's host, in the job's code folder: exec ID -- cmd…, or exec --ssh HOST -- cmd…

    Without an ID and a host it runs on this machine, in the home folder.
    """
    from deployer.commands import beside

    program = click.get_current_context().meta["program"]
    if words:
        raise UsageError("the command comes after --", hint=f"deploy.py exec {job_id} -- {shlex.join(words)}")
    if not program:
        raise UsageError("no command given", hint="deploy.py exec ID -- nvidia-smi")
    host, record = find_host(job_id, **place)
    sys.exit(beside.execute(host, record.job_id if record else job_id, program))


@cli.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
def shell(job_id: str | None, **place: Any) -> None:
    """Open a shell on a job's host, in the job's code folder."""
    from deployer.commands import beside

    host, record = find_host(job_id, **place)
    sys.exit(beside.shell(host, record.job_id if record else job_id))


@cli.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@JSON
def doctor(as_json: bool, **place: Any) -> None:
    """Check a host, or this machine, and say what to do.

    Python, torch, GPUs, disk, limits, environment; each with what to do.
    """
    from deployer.commands import machine

    sys.exit(machine.doctor(host_of(**place), as_json=as_json))


@cli.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@click.option("--older-than", "older_than_s", type=parse_duration, metavar="30d", help="Also jobs that ended before.")
@click.option("--max-size", "max_bytes", type=parse_size, metavar="SIZE", help="Also the oldest jobs, down to this.")
@click.option("--keep-jobs", type=click.IntRange(min=0), metavar="N", help="Also ended jobs, but not the newest N.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@JSON
def gc(
    older_than_s: float | None,
    max_bytes: int | None,
    keep_jobs: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **place: Any,
) -> None:
    """Remove from a host what no job needs any more.

    That is old files, data sets, environments, agents and leftovers.
    Jobs go only when a limit is given, and only ended ones: --older-than those that ended before, --max-size the
    oldest until all takes no more, and of these never the newest --keep-jobs. Results that were not pulled go with
    them. What another job began from, or still needs, stays.
    """
    from deployer.commands import machine

    limits = {"older_than_s": older_than_s, "max_bytes": max_bytes, "keep_jobs": keep_jobs}
    machine.gc(host_of(**place), limits=limits, dry_run=dry_run, yes=yes, as_json=as_json)


@cli.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@JSON
def gpus(as_json: bool, **place: Any) -> None:
    """Show a host's GPUs and who holds, uses and waits for them.

    Without --ssh this machine's.
    """
    from deployer.commands import gpus as command

    command.gpus(host_of(**place), as_json=as_json)


def main() -> None:
    """Entry of `deploy.py` and of the console script."""
    _open_standard_streams()
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in own
    if debug:
        words.remove("--debug")
    try:
        cli(words, prog_name=invoked_as(), standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        known = error if isinstance(error, FerryError) else _unforeseen(error)
        _show(known)
        sys.exit(known.exit_code)


def _open_standard_streams() -> None:
    """A stream that was closed before we came becomes /dev/null, so that no file or socket takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _unforeseen(error: Exception) -> FerryError:
    """One error for what no code here expects: this machine's disk, an answer of another shape, a mistake of ours."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return FerryError(f"this machine: {where}{error.strerror or error}")
    return FerryError(f"Torchferry failed: {error!r}", hint="--debug shows where; please report it")


def _show(error: FerryError) -> None:
    show_error(error)
    if isinstance(error, LostConnection):
        notice(f"The job, if it was started, runs on: {invoked_as()} ps shows it.")
