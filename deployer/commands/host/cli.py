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

BARE = click.option("--bare", is_flag=True, help="Run without the job's environment.")


@click.command(
    "exec",
    cls=WithProgram,
    context_settings={**CONTEXT, "ignore_unknown_options": True},
)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("words", metavar="-- COMMAND...", nargs=-1)
@at_a_place
@BARE
@JSON
def execute(job_id: str | None, words: tuple[str, ...], bare: bool, as_json: bool, **place: Any) -> None:
    """Run a command on a job's host, in the job's copy of the project.

    The command has the job's environment: its interpreter as `python`, its GPUs, its --env values and
    $TORCHFERRY_RUN_DIR, the run folder. The job's secrets are stored nowhere: they come from this shell if it has them.
    The command is not part of the job, so `stop` does not end it.

    With --ssh and no ID, the command runs in the home folder on that host. With neither, it runs beside the newest job
    launched from this machine.

    \b
    Examples:
      deploy.py exec ID -- nvidia-smi
      deploy.py exec --ssh gpu -- df -h
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
    """Open a shell on a job's host, in the job's copy of the project.

    The shell has the job's environment, as with `exec`. With --ssh and no ID, it opens in the home folder on that host.
    With neither, it opens beside the newest job launched from this machine.

    \b
    Examples:
      deploy.py shell ID
      deploy.py shell --ssh gpu
    """
    from deployer.commands.host import exec as command

    host, found, secrets = _find_place(job_id, **place)
    sys.exit(command.shell(host, found, bare=bare, secrets=secrets))


def _find_place(job_id: str | None, **place: Any) -> tuple[Host, str | None, tuple[str, ...]]:
    """The host, the job whose environment is used (None if only a host is named), and the names of the secrets that
    this client passed to that job."""
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
    """Forward a port of this machine to a job's host, until Ctrl-C.

    PORT 9000:8888 forwards port 9000 here to port 8888 there; 0:8888 takes any free port here. Without ID, the
    command takes the newest job launched from this machine; with --ssh it needs no job.

    The tunnel listens on 127.0.0.1 only and ends at 127.0.0.1 on the host. It takes many connections at once and
    reconnects when the network breaks. The SSH server need not allow port forwarding. --json prints one line with the
    ports once the tunnel is up.

    \b
    Examples:
      deploy.py tunnel ID 8888
      deploy.py tunnel --ssh gpu 9000:8888
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
    """Check that a host, or this machine, can run jobs.

    The checks cover Python, torch, GPUs, disk, limits and the environment. Each finding comes with what to do. Without
    --ssh the command checks this machine.

    \b
    Examples:
      deploy.py doctor --ssh gpu
      deploy.py doctor --json
    """
    from deployer.commands.host import doctor as command

    sys.exit(command.doctor(host_of(**place), as_json=as_json))


@click.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@JSON
def gpus(as_json: bool, **place: Any) -> None:
    """Show a host's GPUs and who holds, uses or waits for them.

    Without --ssh the command shows this machine's GPUs.

    \b
    Examples:
      deploy.py gpus
      deploy.py gpus --ssh gpu --json
    """
    from deployer.commands.host import gpus as command

    command.gpus(host_of(**place), as_json=as_json)


@click.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@click.option(
    "--older-than",
    "older_than_s",
    type=parse_duration,
    metavar="30d",
    help="Also remove jobs that ended longer ago than this.",
)
@click.option(
    "--max-size",
    "max_bytes",
    type=parse_size,
    metavar="SIZE",
    help="Remove the oldest ended jobs until all that Torchferry keeps on the host fits in SIZE.",
)
@click.option(
    "--keep-jobs",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the newest N ended jobs. Without another limit, all older ended jobs are removed.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
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

    These are copies of files and data sets that were sent, environments that Torchferry built, earlier versions of
    its program, caches and leftovers. Without --ssh the command cleans this machine.

    Ended jobs are removed only with a limit: --older-than, --max-size or --keep-jobs. Their results are lost if you did
    not pull them. A job is kept if another job needs its files.

    \b
    Examples:
      deploy.py gc --ssh gpu --dry-run
      deploy.py gc --ssh gpu --older-than 30d --keep-jobs 5
    """
    from deployer.commands.host import gc as command

    limits = {"older_than_s": older_than_s, "max_bytes": max_bytes, "keep_jobs": keep_jobs}
    command.gc(host_of(**place), limits=limits, dry_run=dry_run, yes=yes, as_json=as_json)


COMMANDS = (execute, shell, tunnel, doctor, gpus, gc)
