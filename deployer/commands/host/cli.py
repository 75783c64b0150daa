"""The commands that are about a host: exec, shell, tunnel, doctor, gpus, gc."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from deployer.commands.options import (
    CONTEXT,
    GIVE_UP,
    JSON,
    Command,
    HostCommand,
    WithProgram,
    at_a_place,
    find_host,
    host_of,
    id_of,
)
from deployer.commands.values import parse_duration, parse_ports, parse_size
from deployer.errors import UsageError

if TYPE_CHECKING:
    from deployer.connection.host import Host

BARE = click.option("--bare", is_flag=True, help="Without the job's environment.")


@click.command(
    "exec",
    cls=WithProgram,
    short_help="Run a command on a job's host, in its code folder.",
    context_settings={**CONTEXT, "ignore_unknown_options": True},
)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("words", metavar="-- COMMAND...", nargs=-1)
@at_a_place
@BARE
@JSON
def execute(job_id: str | None, words: tuple[str, ...], bare: bool, as_json: bool, **place: Any) -> None:
    """Run a command on a job's host, in the job's code folder: exec ID -- cmd…, or exec --ssh HOST -- cmd…

    It has the job's environment: its interpreter as `python`, its GPUs, its --env values, and the job's folder in
    $TORCHFERRY_RUN_DIR. Secrets of the job come from this shell, as far as they are set here: they are kept nowhere.
    The command is no part of the job: a stop leaves it alone.

    With a host and no ID it runs in the home folder there; without both beside the job that was launched last from
    here.
    """
    from deployer.commands.host import exec as command

    program = click.get_current_context().meta["program"]
    if words:
        raise UsageError("the command comes after --", hint=f"deploy.py exec {job_id} -- {shlex.join(words)}")
    if not program:
        raise UsageError("no command given", hint="deploy.py exec ID -- nvidia-smi")
    host, found, secrets = _find_place(job_id, **place)
    sys.exit(command.execute(host, found, program, bare=bare, secrets=secrets, as_json=as_json))


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
@BARE
def shell(job_id: str | None, bare: bool, **place: Any) -> None:
    """Open a shell on a job's host, in the job's code folder.

    It has the job's environment, as a command of exec has. With a host and no ID it opens in the home folder there;
    without both beside the job that was launched last from here.
    """
    from deployer.commands.host import exec as command

    host, found, secrets = _find_place(job_id, **place)
    sys.exit(command.shell(host, found, bare=bare, secrets=secrets))


def _find_place(job_id: str | None, **place: Any) -> tuple[Host, str | None, tuple[str, ...]]:
    """A host, the job beside which something runs there (none where a host alone is named), and the names of the
    secrets that this client gave it."""
    if job_id is None and (place["ssh"] is not None or place["root"] is not None):
        return host_of(**place), None, ()
    host, record = find_host(job_id, **place)
    return host, id_of(job_id, record), record.secrets if record else ()


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]")
@click.argument("ports", metavar="PORT[:PORT]", required=False)
@at_a_place
@GIVE_UP
@JSON
def tunnel(job_id: str, ports: str | None, give_up_s: float, as_json: bool, **place: Any) -> None:
    """Reach a port of a job's host from here, until Ctrl-C.

    \b
      deploy.py tunnel ID 8888          127.0.0.1:8888 here is 127.0.0.1:8888 on the job's host
      deploy.py tunnel ID 9000:8888     9000 here, 8888 there
      deploy.py tunnel ID 0:8888        any free port here
      deploy.py tunnel 8888             of the job that was launched last from here
      deploy.py tunnel --ssh HOST 8888  without a job

    It listens on the loopback interface alone, takes many connections at once, and connects again when the network
    breaks. The SSH server need not allow port forwarding. --json prints one line with the ports once it is up.
    """
    from deployer.commands.host import tunnel as command

    if ports is None and not job_id.replace(":", "").isdigit():
        raise UsageError("which port?", hint=f"deploy.py tunnel {job_id} 8888")
    wanted = parse_ports(job_id if ports is None else ports)
    host, found, _ = _find_place(None if ports is None else job_id, **place)
    sys.exit(command.tunnel(host, found, wanted, give_up_s=give_up_s, as_json=as_json))


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


COMMANDS = (execute, shell, tunnel, doctor, gpus, gc)
