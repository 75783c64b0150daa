"""The commands that show jobs and copy their files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from deployer.commands.key_options import ROOT, SSH
from deployer.commands.options import (
    ACCESS,
    CONTEXT,
    GIVE_UP,
    JSON,
    PULL_LIMIT,
    PULL_MAX,
    Command,
    HostCommand,
    at_a_place,
    find_host,
    hosts_of,
    id_of,
    known_jobs,
    name_one,
)
from deployer.commands.values import Seconds, parse_duration, parse_path, parse_since, parse_size
from deployer.errors import UsageError

EVERY = click.option(
    "--every", "every_s", type=parse_duration, default="10s", metavar="10s", help="Time between two pulls [10s]."
)


@click.command(cls=HostCommand, context_settings=CONTEXT)
@at_a_place
@click.option("--all", "show_all", is_flag=True, help="Show all ended jobs, not only the last 20.")
@click.option(
    "-w",
    "--watch",
    "every_s",
    is_flag=False,
    flag_value=2.0,
    type=Seconds(min=0.2),
    metavar="[S]",
    help="Draw the table again every S seconds [2].",
)
@JSON
def ps(show_all: bool, every_s: float | None, as_json: bool, **place: Any) -> None:
    """List the jobs on all hosts used from this machine, or on one.

    \b
    Examples:
      deploy.py ps --watch 5
      deploy.py ps --ssh gpu --all
    """
    from deployer.commands.look import ps as command

    if every_s is None:
        command.ps(hosts_of(**place), show_all=show_all, as_json=as_json)
    elif as_json:
        raise UsageError("ps --json is for scripts and --watch for the eye", hint="give one of the two")
    else:
        command.watch(hosts_of(**place), show_all=show_all, every_s=every_s)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
@JSON
def status(job_id: str | None, as_json: bool, **place: Any) -> None:
    """Show one job: its state, its metrics and what to do next.

    Without ID, the command takes the newest job launched from this machine.

    \b
    Examples:
      deploy.py status
      deploy.py status ID --json
    """
    from deployer.commands.look import status as command

    host, record = find_host(job_id, **place)
    command.status(host, id_of(job_id, record), as_json=as_json)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
@JSON
def top(job_id: str | None, as_json: bool, **place: Any) -> None:
    """Watch a job live: GPUs, loss, speed and the end of its log.

    Without ID, the command takes the newest job launched from this machine.

    Keys: the arrow keys or j and k change to another job, s stops the job, f pulls its results, q quits. With --json
    the command prints the current state once, for a script.

    \b
    Examples:
      deploy.py top
      deploy.py top ID --json
    """
    host, record = find_host(job_id, **place)
    from deployer.commands.top import show as command

    first = command.Entry(host, id_of(job_id, record), record.results if record else None)
    if as_json:
        command.snapshot(first)
        return
    others = [command.Entry(at, r.job_id, r.results) for at, r in known_jobs(**place) if r.job_id != first.job_id]
    command.top([first, *others])


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
@click.option("-f", "--follow/--no-follow", "follow", default=None, help="Follow until the job ends [if it runs].")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Start at the last N lines of each rank.")
@click.option(
    "--since", type=parse_since, metavar="10m|TIME", help="Start this long ago or at this time (exact to one second)."
)
@click.option("--grep", metavar="RE", help="Show matching lines only; the host applies it after --tail and --since.")
@click.option("--role", metavar="NAME", help="Show only this role (today a job has one).")
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="Show only this node (today a job has one).")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Show only this rank.")
@click.option(
    "--attempt", type=click.IntRange(min=1), metavar="A", help="Show only this attempt [the latest, then later ones]."
)
@click.option("--raw", is_flag=True, help="Print one rank's bytes unchanged, for a file or a pipe.")
@click.option("--launcher", is_flag=True, help="Also show torchrun's own messages.")
@GIVE_UP
@JSON
def logs(job_id: str | None, give_up_s: float, **options: Any) -> None:
    """Show a job's log, and follow it while the job runs.

    Without ID, the command takes the newest job launched from this machine.

    \b
    Examples:
      deploy.py logs ID --follow --tail 50
      deploy.py logs ID --since 10m --grep 'loss|error'
    """
    from deployer.commands.look import logs as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    host, record = find_host(job_id, **place)
    wanted = command.LogsRequest(**options)
    sys.exit(command.logs(host, id_of(job_id, record), wanted, give_up_s=give_up_s))


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("runs", metavar="[ID|PATH]...", nargs=-1)
@at_a_place
@click.option("--key", "keys", multiple=True, metavar="NAME", help="Metric to draw. Repeatable [loss, eval_loss].")
@click.option("--x", "along", type=click.Choice(("step", "time", "tokens")), default="step", help="The x axis [step].")
@click.option("--smooth", type=click.IntRange(min=1), default=1, metavar="N", help="Draw the mean of N values [1].")
@click.option("--png", metavar="FILE", help="Write a PNG file instead; needs matplotlib (torchferry[plot]).")
@click.option("--html", metavar="FILE", help="Write one HTML file instead; it needs no other file.")
@JSON
def plot(runs: tuple[str, ...], **options: Any) -> None:
    """Draw the metrics of runs: jobs on any host, or folders here.

    PATH is a run folder as `deploy.py train` makes it, or a metrics.jsonl file. Without ID or PATH, the command takes
    the newest job launched from this machine.

    For an ended job whose results were pulled, the command reads those. For any other job it asks the host. If the
    host cannot be asked, it draws what was pulled.

    \b
    Examples:
      deploy.py plot ID1 ID2 --key eval_loss --smooth 20
      deploy.py plot runs/big --png curves.png
    """
    from deployer.commands.look import plot as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    sys.exit(command.plot(runs, lambda job_id: find_host(job_id, **place), command.PlotRequest(**options)))


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("run", metavar="[ID|PATH]", required=False)
@at_a_place
@click.option("-o", "--output", metavar="FILE", help="File to write [report-ID.html].")
@JSON
def report(run: str | None, output: str | None, as_json: bool, **place: Any) -> None:
    """Write all that is known about a run to one HTML file.

    The file has the state and its causes, curves, samples, config, attempts, environment, the time of each part of a
    step, and the commands to run it again. It loads nothing from elsewhere.

    PATH is a run folder as `deploy.py train` makes it. Without ID or PATH, the command takes the newest job launched
    from this machine. A running job is shown as it is now. If its host cannot be asked, the file has what was pulled.

    \b
    Examples:
      deploy.py report ID
      deploy.py report runs/big --output big.html
    """
    from deployer.commands.look import report as command

    command.report(run, lambda job_id: find_host(job_id, **place), output=output, as_json=as_json)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@at_a_place
@click.option("--checkpoints", is_flag=True, help="Also pull every complete checkpoint.")
@click.option("--checkpoint", metavar="STEP|latest", help="Also pull this checkpoint.")
@click.option("--pull-max", metavar="SIZE", help=f"{PULL_LIMIT} [{PULL_MAX}; with PATH: 0].")
@click.option("--to", "target", metavar="DIR", help="Folder for the results [results/ID].")
@click.option("--watch", is_flag=True, help="Pull new files repeatedly until the job has ended.")
@EVERY
@click.option(
    "--streams", type=click.IntRange(1, 16), metavar="N", help="Connections at once [4 for more than 32 MB, else 1]."
)
@JSON
def pull(
    job_id: str | None,
    paths: tuple[str, ...],
    checkpoints: bool,
    checkpoint: str | None,
    pull_max: str | None,
    target: str | None,
    watch: bool,
    every_s: float,
    streams: int | None,
    as_json: bool,
    **place: Any,
) -> None:
    """Copy a job's results, or what PATH names, to this machine.

    Results are metrics, logs, the exported model and what --out named. An interrupted pull continues where it stopped.
    Every file is checked by hash, and a checkpoint appears whole or not at all. Without ID, the command takes the
    newest job launched from this machine.

    PATH comes after an ID. It is a file, a folder or a quoted pattern below the job's run folder ($TORCHFERRY_RUN_DIR)
    or its copy of the project. It goes to results/ID/PATH or results/ID/code/PATH; your project's files are never
    overwritten.

    \b
    Examples:
      deploy.py pull ID --checkpoint latest
      deploy.py pull ID 'plots/*.png' weights.pt --to results/best
    """
    from deployer.commands.look import pull as command
    from deployer.pull.choice import PullRequest

    if checkpoints and checkpoint:
        raise UsageError("give --checkpoints or --checkpoint, not both")
    request = PullRequest(
        "all" if checkpoints else checkpoint,
        parse_size(pull_max or ("0" if paths else PULL_MAX)) or None,
        may_lack=watch,
        streams=streams,
        paths=tuple(map(_path_of_job, paths)),
    )
    host, record = find_host(job_id, **place)
    folder = target or (record.results if record else None)
    words = ["" if record or not place["ssh"] else f"--ssh {shlex.quote(place['ssh'])}"]
    words += ["" if record or not place["root"] else f"--remote-root {shlex.quote(place['root'])}"]
    words += [f"--to {shlex.quote(target)}" if target else ""]
    sys.exit(
        command.pull_job(
            host,
            id_of(job_id, record),
            target=Path(folder) if folder else None,
            request=request,
            every_s=every_s if watch else None,
            as_json=as_json,
            words=" ".join(filter(None, words)),
        )
    )


def _path_of_job(text: str) -> str:
    from deployer.pull.listing import is_path

    path = parse_path(text)
    if not is_path(path):
        raise UsageError(
            f"{text!r} is not a path below the job's folder",
            hint="a path as the job's program writes it: out/weights.pt",
        )
    return path


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@at_a_place
@click.option("--into", metavar="DIR", default="", help="Folder below the job's run folder [the run folder].")
@click.option("--force", is_flag=True, help="Overwrite existing files that have other content.")
@GIVE_UP
@JSON
def push(
    job_id: str, files: tuple[str, ...], into: str, force: bool, give_up_s: float, as_json: bool, **place: Any
) -> None:
    """Copy files or folders to a job's run folder on its host.

    They keep their names and appear whole in $TORCHFERRY_RUN_DIR. The job's copy of the project and Torchferry's own
    files there are never changed. After an interruption, the same push sends only what is missing.

    \b
    Examples:
      deploy.py push ID prompts.txt
      deploy.py push ID eval/ --into data --force
    """
    from deployer.commands.look import push as command

    host, record = find_host(job_id, **place)
    into = _path_of_job(into.rstrip("/")) if into else ""
    command.push(
        host, record.job_id if record else job_id, files, into=into, force=force, give_up_s=give_up_s, as_json=as_json
    )


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", help="Local port [6006, else any free one].")
@EVERY
@click.option("--on-host", is_flag=True, help="Run it on the host with the job's Python [if this Python lacks it].")
@click.option("--to", "target", metavar="DIR", help="Folder for the results [results/ID].")
@JSON
def tensorboard(job_id: str | None, target: str | None, **options: Any) -> None:
    """Show a job's curves live in TensorBoard, until Ctrl-C.

    Without ID, the command takes the newest job launched from this machine. The trainer writes event files only
    with run.trackers=[tensorboard]; your own program writes them to $TORCHFERRY_RUN_DIR/tensorboard.

    While the job runs, its event files are pulled repeatedly, and TensorBoard of this Python shows them. If this Python
    has no TensorBoard, the job's Python runs it on the host, and a tunnel connects to it.

    \b
    Examples:
      deploy.py tensorboard ID --port 6007
      deploy.py tensorboard ID --on-host
    """
    from deployer.commands.look import tensorboard as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    host, record = find_host(job_id, **place)
    folder = target or (record.results if record else None)
    sys.exit(command.tensorboard(host, id_of(job_id, record), target=Path(folder) if folder else None, **options))


@click.command(cls=Command, context_settings=CONTEXT)
@click.option("--last", type=click.IntRange(min=0), default=20, metavar="N", help="Show the last N; 0: all [20].")
@JSON
def history(last: int, as_json: bool) -> None:
    """List the jobs launched from this machine, newest first.

    The list shows when, on which host and with which words each job was launched, and the last state that its host
    reported. No host is asked. The values of --env are not kept, only the names.

    `repeat ID` launches a job again, `forget ID` removes it from the list.

    \b
    Examples:
      deploy.py history --last 50
      deploy.py history --json
    """
    from deployer.commands.look import history as command

    command.history(last=last, as_json=as_json)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_ids", metavar="ID...", nargs=-1)
@SSH.option()
@ROOT.option("root")
@click.option("--yes", is_flag=True, help="Forget without asking, even jobs that may still run.")
@JSON
def forget(job_ids: tuple[str, ...], ssh: str | None, root: str | None, yes: bool, as_json: bool) -> None:
    """Remove jobs from this machine's list; nothing on a host changes.

    With --ssh and no ID, all jobs of that host are removed from the list. No host is asked: a running job continues,
    and its files stay. `ps` shows a job again when it asks a host that still has it.

    \b
    Examples:
      deploy.py forget ID
      deploy.py forget --ssh gpu --yes
    """
    from deployer.commands.look import forget as command

    if bool(job_ids) == (ssh is not None or root is not None):
        raise name_one("forget takes ids of jobs, or --ssh HOST", "forget")
    if job_ids:
        command.forget_jobs(job_ids, yes=yes, as_json=as_json)
    else:
        command.forget_host(ssh, root, yes=yes, as_json=as_json)


COMMANDS = (ps, top, history, status, logs, plot, report, tensorboard, pull, push, forget)
