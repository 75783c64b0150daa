"""The commands that are about a host: exec, shell, doctor, gpus, gc."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from deployer.commands.options import CONTEXT, JSON, Command, HostCommand, WithProgram, at_a_place, find_host, host_of
from deployer.commands.values import parse_duration, parse_size
from deployer.errors import UsageError


@click.command(
    "exec",
    cls=WithProgram,
    short_help="Run a command on a job's host, in its code folder.",
    context_settings={**CONTEXT, "ignore_unknown_options": True},
)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("words", metavar="-- COMMAND...", nargs=-1)
@at_a_place
@JSON
def execute(job_id: str | None, words: tuple[str, ...], as_json: bool, **place: Any) -> None:
    """Run a command on a job's host, in the job's code folder: exec ID -- cmd…, or exec --ssh HOST -- cmd…

    Without an ID and a host it runs on this machine, in the home folder.
    """
    from deployer.commands.host import exec as command

    program = click.get_current_context().meta["program"]
    if words:
        raise UsageError("the command comes after --", hint=f"deploy.py exec {job_id} -- {shlex.join(words)}")
    if not program:
        raise UsageError("no command given", hint="deploy.py exec ID -- nvidia-smi")
    host, record = find_host(job_id, **place)
    sys.exit(command.execute(host, record.job_id if record else job_id, program, as_json=as_json))


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
def shell(job_id: str | None, **place: Any) -> None:
    """Open a shell on a job's host, in the job's code folder."""
    from deployer.commands.host import exec as command

    host, record = find_host(job_id, **place)
    sys.exit(command.shell(host, record.job_id if record else job_id))


@click.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@JSON
def doctor(as_json: bool, **place: Any) -> None:
    """Check a host, or this machine, and say what to do.

    Python, torch, GPUs, disk, limits, environment; each with what to do.
    """
    from deployer.commands.host import doctor as command

    sys.exit(command.doctor(host_of(**place), as_json=as_json))


@click.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@JSON
def gpus(as_json: bool, **place: Any) -> None:
    """Show a host's GPUs and who holds, uses and waits for them.

    Without --ssh this machine's.
    """
    from deployer.commands.host import gpus as command

    command.gpus(host_of(**place), as_json=as_json)


@click.command(cls=HostCommand, context_settings=CONTEXT)
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
    from deployer.commands.host import gc as command

    limits = {"older_than_s": older_than_s, "max_bytes": max_bytes, "keep_jobs": keep_jobs}
    command.gc(host_of(**place), limits=limits, dry_run=dry_run, yes=yes, as_json=as_json)


COMMANDS = (execute, shell, doctor, gpus, gc)
