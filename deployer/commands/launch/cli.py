"""The commands that start a job and end it: run, resume, stop."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from deployer.commands.key_options import JOB, SSH, take_changes, with_keys
from deployer.commands.options import (
    ACCESS,
    CONTEXT,
    GIVE_UP,
    JSON,
    Command,
    WithProgram,
    at_a_place,
    entrance,
    find_host,
    hosts_of,
    with_access,
    with_limits,
    with_results,
)
from deployer.commands.values import Seconds, parse_size
from deployer.errors import UsageError


@click.command(cls=WithProgram, context_settings=CONTEXT)
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@SSH.option()
@with_access
@click.option("--fsdp-config", metavar="FILE", help="Options of FSDP from a YAML as `accelerate config` writes it.")
@click.option("--torchrun", is_flag=True, help="Start the program after -- under torchrun.")
@with_keys(JOB)
@click.option("--include", multiple=True, metavar="PATH", help="Ship an ignored data set or model, once, by hash.")
@click.option("--requirements", metavar="FILE", help="What the job's Python must have; none: whatever it has.")
@click.option("--wheels", metavar="DIR", help="Ship wheels for a host without internet.")
@click.option("--dry-run", type=click.Choice(["local", "remote"]), metavar="[=remote]", help="Show what would run.")
@with_results
@with_limits()
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
    there comes home: metrics.jsonl and export/, and checkpoints/ on request (`pull`). With --out PATH what it writes to
    PATH in its copy comes home too, to results/ID/code/PATH; a line names what stays.
    """
    if config is not None and "=" in config:
        raise UsageError(f"{config!r} is an override; the config file comes first", hint="deploy.py CONFIG a.b=c …")
    program = click.get_current_context().meta["program"]
    if program and config is not None:
        raise UsageError("give a config or a program after --, not both")
    if options["fsdp_config"] is not None and config is None:
        raise UsageError("--fsdp-config goes with a config; a program of your own reads its own")
    if config is not None and not Path(config).exists():
        _check_no_program(config, overrides)
    pull_limit = parse_size(options.pop("pull_max")) or None
    access = {name: options.pop(name) for name in ACCESS}
    keys = take_changes(options)
    early = keys.get("target.ssh") if options["dry_run"] is None else None
    enter = entrance(early, **access)  # connects while the rest is imported, and the config and the tree are read
    from deployer.commands.launch import run as command

    sys.exit(command.run(config, overrides, program, enter=enter, pull_limit=pull_limit, keys=keys, **options))


def _check_no_program(config: str, overrides: tuple[str, ...]) -> None:
    from deployer.commands.neighbours import is_program

    if is_program(config):
        words = shlex.join((config, *overrides))
        raise UsageError(f"config {config} does not exist", hint=f"put -- before a program: deploy.py run -- {words}")


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@at_a_place
@with_keys(JOB, resume=True)
@with_results
@with_limits(resume=True)
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
    ways = {name: options.pop(name) for name in ("detach", "as_json", "notify")}
    ways.update(pulls=not options.pop("no_pull"), pull_limit=parse_size(options.pop("pull_max")) or None)
    changes = {"keys": take_changes(options), **options}
    host, record = find_host(job_id, **place)
    from deployer.commands.launch import resume as command

    sys.exit(
        command.resume(
            host,
            record.job_id if record else job_id,
            overrides=overrides,
            changes=changes,
            give_up_s=give_up_s,
            **ways,
        )
    )


@click.command(cls=Command, context_settings=CONTEXT)
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
    from deployer.commands.launch import stop as command

    how = {name: options.pop(name) for name in ("grace_s", "force", "as_json")}
    if every == bool(job_ids):
        raise UsageError("name the jobs to stop, or give --all", hint="deploy.py ps lists them")
    if every:
        sys.exit(command.stop_all(hosts_of(**options), yes=yes, **how))
    found = [(job_id, *find_host(job_id, **options)) for job_id in dict.fromkeys(job_ids)]
    sys.exit(command.stop([(host, record.job_id if record else job_id) for job_id, host, record in found], **how))


COMMANDS = (run, resume, stop)
