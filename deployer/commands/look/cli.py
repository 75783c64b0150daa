"""The commands that look at jobs and bring their files home."""

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


@click.command(cls=HostCommand, context_settings=CONTEXT)
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
    """Show one job: its true state, metrics, what to do next.

    Without ID the job that was launched last from here.
    """
    from deployer.commands.look import status as command

    host, record = find_host(job_id, **place)
    command.status(host, id_of(job_id, record), as_json=as_json)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@at_a_place
@JSON
def top(job_id: str | None, as_json: bool, **place: Any) -> None:
    """Watch a job live: GPUs, loss and speed, the end of its log.

    Without ID the job that was launched last from here. The arrow keys, or j and k, go to the other jobs, s stops a
    job, f fetches its results as pull does, q leaves. With --json one look, for a script.
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
@click.option("-f", "--follow/--no-follow", "follow", default=None, help="Go on until the job ends [when it runs].")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Begin at the last N lines of each rank.")
@click.option("--since", type=parse_since, metavar="10m|TIME", help="Begin where the log stood then, to the second.")
@click.option("--grep", metavar="RE", help="Only lines that match, chosen on the host (after --tail and --since).")
@click.option("--role", metavar="NAME", help="Only this role's processes.")
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="Only this node's processes.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="A", help="Only this attempt [from the latest on].")
@click.option("--raw", is_flag=True, help="One rank's bytes, unchanged for a file or a pipe.")
@click.option("--launcher", is_flag=True, help="Show torchrun's own words too.")
@GIVE_UP
@JSON
def logs(job_id: str | None, give_up_s: float, **options: Any) -> None:
    """Show a job's log, and follow it while it runs.

    Without ID of the job that was launched last from here.
    """
    from deployer.commands.look import logs as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    host, record = find_host(job_id, **place)
    wanted = command.Wanted(**options)
    sys.exit(command.logs(host, id_of(job_id, record), wanted, give_up_s=give_up_s))


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("runs", metavar="[ID|PATH]...", nargs=-1)
@at_a_place
@click.option("--key", "keys", multiple=True, metavar="NAME", help="What to draw; several in turn [loss, eval_loss].")
@click.option("--x", "along", type=click.Choice(("step", "time", "tokens")), default="step", help="Along what [step].")
@click.option("--smooth", type=click.IntRange(min=1), default=1, metavar="N", help="Draw the mean of N values [1].")
@click.option("--png", metavar="FILE", help="Write a picture instead; needs matplotlib (torchferry[plot]).")
@click.option("--html", metavar="FILE", help="Write one HTML file instead, which needs nothing else.")
@JSON
def plot(runs: tuple[str, ...], **options: Any) -> None:
    """Draw the metrics of runs: jobs of any hosts, and folders here.

    Without ID those of the job that was launched last from here. A job that has ended and is home is read there,
    else its host is asked, and where that cannot be asked what is home is drawn. PATH is the folder of a run, as
    train.py makes it, or a metrics.jsonl.
    """
    from deployer.commands.look import plot as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    sys.exit(command.plot(runs, lambda job_id: find_host(job_id, **place), command.Wanted(**options)))


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("run", metavar="[ID|PATH]", required=False)
@at_a_place
@click.option("-o", "--output", metavar="FILE", help="Where to write it [report-ID.html].")
@JSON
def report(run: str | None, output: str | None, as_json: bool, **place: Any) -> None:
    """Write all that is known of a run into one HTML file.

    Without ID of the job that was launched last from here.
    Its verdict and causes, curves, samples, config, attempts, environment, where a step goes, and how to do it again.
    The file loads nothing from elsewhere. A job that runs is told as it is now; of one whose host cannot be asked
    what is home. PATH is the folder of a run, as train.py makes it.
    """
    from deployer.commands.look import report as command

    command.report(run, lambda job_id: find_host(job_id, **place), output=output, as_json=as_json)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@at_a_place
@click.option("--checkpoints", is_flag=True, help="Every complete checkpoint too.")
@click.option("--checkpoint", metavar="STEP|latest", help="This checkpoint too.")
@click.option("--pull-max", metavar="SIZE", help=f"Limit of the whole; 0: none [{PULL_MAX}; with PATH none].")
@click.option("--to", "target", metavar="DIR", help="Folder for the results [results/ID].")
@click.option("--watch", is_flag=True, help="Bring what is new again and again, until the job has ended.")
@click.option("--every", "every_s", type=parse_duration, default="10s", metavar="10s", help="How often, with --watch.")
@click.option("--streams", type=click.IntRange(1, 16), metavar="N", help="Connections [4 for more than 32 MB].")
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
    """Bring a job's results home, or what PATH names.

    Without ID those of the job that was launched last from here; before a PATH the ID must stand.
    Results are metrics, logs, the exported model, and what --out named.
    A pull that was broken off goes on where it stopped, every byte is compared with the host's by its hash, and a
    checkpoint appears whole or not at all.

    PATH is a file or folder that a job wrote into its folder ($TORCHFERRY_RUN_DIR) or its copy of the project. It lands
    as it lies there: results/ID/PATH, of the project results/ID/code/PATH. Nothing of your own folder is written over.
    In quotes it may be a pattern: 'plots/*.png', '**/*.pt'.
    """
    from deployer.commands.look import pull as command
    from deployer.pull.choice import Wish

    if checkpoints and checkpoint:
        raise UsageError("give --checkpoints or --checkpoint, not both")
    wish = Wish(
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
            wish=wish,
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
@click.option("--into", metavar="DIR", default="", help="A folder below the job's folder [the job's folder].")
@click.option("--force", is_flag=True, help="Write over files that are there with other content.")
@GIVE_UP
@JSON
def push(
    job_id: str, files: tuple[str, ...], into: str, force: bool, give_up_s: float, as_json: bool, **place: Any
) -> None:
    """Bring files or folders into a job's folder on its host.

    They lie in $TORCHFERRY_RUN_DIR under their own names, and appear there whole. The job's copy of the project and
    what Torchferry keeps beside it are never changed. A push that was broken off sends what is not there yet.
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
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port here [6006, else any free one].")
@click.option(
    "--every", "every_s", type=parse_duration, default="10s", metavar="10s", help="How often what is new comes."
)
@click.option("--on-host", is_flag=True, help="Run it on the host, with the job's Python [where this one lacks it].")
@click.option("--to", "target", metavar="DIR", help="Folder for the results [results/ID].")
@JSON
def tensorboard(job_id: str | None, target: str | None, **options: Any) -> None:
    """Show a job's curves live in TensorBoard, until Ctrl-C.

    Without ID those of the job that was launched last from here.
    The event files that a job writes with run.trackers=[tensorboard], or a program of your own to
    $TORCHFERRY_RUN_DIR/tensorboard, come home again and again while it runs, and TensorBoard of this Python reads them.
    Where it lacks TensorBoard the job's Python runs it on its host, and a tunnel leads there. Without ID the job that
    was launched last from here.
    """
    from deployer.commands.look import tensorboard as command

    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    host, record = find_host(job_id, **place)
    folder = target or (record.results if record else None)
    sys.exit(command.tensorboard(host, id_of(job_id, record), target=Path(folder) if folder else None, **options))


@click.command(cls=Command, context_settings=CONTEXT)
@click.option("--last", type=click.IntRange(min=0), default=20, metavar="N", help="The last N; 0: all [20].")
@JSON
def history(last: int, as_json: bool) -> None:
    """List what was launched from here, with the words, newest first.

    When, on which host, by which words, and the state that the host told last; no host is asked. Values of --env are
    not kept, their names are. `repeat ID` launches one of them again, `forget ID` drops it.
    """
    from deployer.commands.look import history as command

    command.history(last=last, as_json=as_json)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_ids", metavar="ID...", nargs=-1)
@SSH.option()
@ROOT.option("root")
@click.option("--yes", is_flag=True, help="Also what may still run.")
@JSON
def forget(job_ids: tuple[str, ...], ssh: str | None, root: str | None, yes: bool, as_json: bool) -> None:
    """Forget jobs on this client, or with --ssh all of a host.

    No host is asked, and nothing there changes: a job that runs goes on, its files stay. What a host still has, ps
    shows again when it asks that host.
    """
    from deployer.commands.look import forget as command

    if bool(job_ids) == (ssh is not None or root is not None):
        raise name_one("forget takes ids of jobs, or --ssh HOST", "forget")
    if job_ids:
        command.forget_jobs(job_ids, yes=yes, as_json=as_json)
    else:
        command.forget_host(ssh, root, yes=yes, as_json=as_json)


COMMANDS = (ps, top, history, status, logs, plot, report, tensorboard, pull, push, forget)
