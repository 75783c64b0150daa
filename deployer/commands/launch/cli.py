"""The commands that start and stop jobs: run, sft, pretrain, resume, repeat, stop."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from deployer.commands.defaults import read_defaults
from deployer.commands.key_options import JOB, ROOT, SSH, take_changes, with_keys
from deployer.commands.options import (
    ACCESS,
    CONTEXT,
    GIVE_UP,
    JSON,
    Command,
    WithKeys,
    WithProgram,
    at_a_place,
    entrance,
    find_host,
    hosts_of,
    id_of,
    name_one,
    with_access,
    with_limits,
    with_results,
)
from deployer.commands.values import Seconds, parse_size
from deployer.errors import UnknownJob, UsageError
from deployer.printable import shown
from deployer.terminal import invoked_as, notice

if TYPE_CHECKING:
    from deployer.jobs.registry import JobRecord

DEFAULT_FILES = ("torchferry.yaml", "torchferry.yml")
"""The files that `run` looks for if the command line names none."""
DRY_RUN = "Show what would run, and start nothing. =remote also asks the host."


def with_launch(command: Callable[..., Any], *, gpus: str | None = None) -> Callable[..., Any]:
    """Adds the options of a command that launches a job. `gpus`: see `with_keys`."""
    options = (
        SSH.option(),
        with_access,
        click.option("--fsdp-config", metavar="FILE", help="Take the FSDP options from a file of `accelerate config`."),
        with_keys(JOB, gpus=gpus),
        click.option(
            "--include",
            multiple=True,
            metavar="PATH",
            help="Send this path even if git ignores it; an unchanged path is not sent again. Repeatable.",
        ),
        click.option(
            "--requirements", metavar="FILE", help="File of packages for the job's Python; the word none: no packages."
        ),
        click.option("--wheels", metavar="DIR", help="Send the wheels in this folder, for a host without internet."),
        click.option("--dry-run", type=click.Choice(["local", "remote"]), metavar="[=remote]", help=DRY_RUN),
        with_results,
        with_limits(),
        GIVE_UP,
        click.option("--yes", is_flag=True, help="Send a very large project or a home folder without asking."),
        JSON,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=WithProgram, context_settings=CONTEXT)
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--as", "kind", metavar="KIND", help="Read the file as this kind if its keys do not tell: config, task.")
@click.option("--torchrun", is_flag=True, help="Start the program after -- under torchrun.")
@with_launch
def run(config: str | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Run a config, a task file, or any program after --.

    CONFIG is a config of the trainer or a task file; KEY=VALUE overrides a key of the config. Without CONFIG and
    program, the command runs torchferry.yaml of this folder. Without --ssh the job runs on this machine. Ctrl-C stops
    showing a started job; the job keeps running.

    A program runs in a copy of the project (the folder you are in); its run folder is $TORCHFERRY_RUN_DIR. Its
    metrics.jsonl, its export/ and what --out names are pulled. The last lines of output name what stays on the host.

    \b
    Examples:
      deploy.py run lora.yaml --ssh gpu train.steps=500
      deploy.py run --ssh gpu --out plots -- python my_train.py --lr 1e-4
      deploy.py run --ssh gpu --torchrun --gpus 0,1 -- my_train.py
    """
    meta, named = click.get_current_context().meta, config
    program = meta["program"]
    config, overrides = _file_of(config, overrides, program)
    if config is not None and config != named:  # for a later `repeat`
        meta["words"] = [config, *meta["words"]]
    if config is not None and not Path(config).exists():
        _check_no_program(config, overrides)
    _launch(config, overrides, program, **options)


def _launch(config: str | None, overrides: tuple[str, ...], program: tuple[str, ...], **options: Any) -> NoReturn:
    pull_limit = parse_size(options.pop("pull_max")) or None
    access = {name: options.pop(name) for name in ACCESS}
    keys = take_changes(options)
    defaults = read_defaults(Path.cwd())
    if keys.get("target.ssh") == "":
        keys["target.ssh"] = None  # this machine; overrides the defaults
    asked = keys.get("target.ssh", defaults.host if config is None else None)
    early = asked if options["dry_run"] is None else None
    enter = entrance(early, **access)  # connects while the rest is imported, and the config and the tree are read
    from deployer.commands.launch import run as command

    context = click.get_current_context()
    meta = context.meta
    how = {
        "enter": enter,
        "verb": context.info_name,
        "words": meta["words"],
        "like": meta.get(ANEW),
        "pull_limit": pull_limit,
    }
    sys.exit(command.run(config, overrides, program, keys=keys, defaults=defaults, **how, **options))


def _file_of(
    config: str | None, overrides: tuple[str, ...], program: tuple[str, ...]
) -> tuple[str | None, tuple[str, ...]]:
    """The file to run, and the overrides. If no file is named, torchferry.yaml in this folder is used."""
    if config is not None and "=" in config and not Path(config).exists():
        overrides, config = (config, *overrides), None
    if config is None and not program:
        config = next((name for name in DEFAULT_FILES if Path(name).is_file()), None)
        if config is not None:
            notice(shown(f"running {config} of this folder"))
    return config, overrides


def with_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options from which a config is made, and those of a launch."""
    options = (
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]..."),
        click.option("--model", metavar="NAME|DIR", help="The model: a Hugging Face name or a folder."),
        click.option(
            "--data",
            multiple=True,
            metavar="FILE",
            help="Training data: a file, a folder, or the name of a data set. Repeatable.",
        ),
        click.option("--write", "-o", metavar="FILE", help="Also write the config to this file."),
        click.option("--print", "prints", is_flag=True, help="Print the config and do nothing else."),
        partial(with_launch, gpus="auto:1"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=WithKeys, context_settings=CONTEXT)
@click.option("--lora", is_flag=True, help="Train small adapters; the model itself stays unchanged.")
@with_config
def sft(lora: bool, **options: Any) -> None:
    """Fine-tune a model on conversations, without a config file.

    The config is the one that `init` writes, with your model and data. KEY=VALUE sets any key. It is shown, and runs
    as with `run CONFIG`, on this machine unless --ssh names a host. The model's folder and the data are sent, even if
    git ignores them.

    \b
    Examples:
      deploy.py sft --model Qwen/Qwen2.5-0.5B-Instruct --data my.jsonl --lora
      deploy.py sft --model models/mine --data my.jsonl --ssh gpu train.steps=50
    """
    _run_made("lora" if lora else "sft", **options)


@click.command(cls=WithKeys, context_settings=CONTEXT)
@with_config
def pretrain(**options: Any) -> None:
    """Train a language model on plain text, without a config file.

    Without --model it trains a small new model. The command makes a config as `sft` does, shows it and runs it, on this
    machine unless --ssh names a host.

    \b
    Examples:
      deploy.py pretrain --data docs/ --ssh gpu
      deploy.py pretrain --data docs/ --model Qwen/Qwen2.5-0.5B --ssh gpu
    """
    _run_made("pretrain", **options)


def _run_made(
    kind: str,
    *,
    overrides: tuple[str, ...],
    model: str | None,
    data: tuple[str, ...],
    write: str | None,
    prints: bool,
    **options: Any,
) -> None:
    from deployer.commands.launch import sft as command

    name, dry_run = click.get_current_context().info_name, options["dry_run"] is not None
    if click.get_current_context().meta["program"]:
        raise UsageError(f"{name} starts the trainer, and takes no program after --", hint="deploy.py run -- PROGRAM")
    program = invoked_as()
    made = command.make_config(kind, model=model, data=data, overrides=overrides, program=program, file=write)
    to = "plain" if prints else "comments" if dry_run and not options["as_json"] else "stderr"
    command.show_config(made, overrides=overrides, to=to)
    if write is not None and not dry_run:
        command.write_config(made, write, overrides=overrides, program=program)
    if not prints:
        _launch(made.name, overrides, (), text=made.text, **options)


def _check_no_program(config: str, overrides: tuple[str, ...]) -> None:
    from deployer.commands.neighbours import is_program

    if is_program(config):
        words = shlex.join((config, *overrides))
        raise UsageError(f"config {config} does not exist", hint=f"put -- before a program: deploy.py run -- {words}")


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_id", metavar="[ID]", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@at_a_place
@with_keys(JOB, resume=True)
@with_results
@with_limits(resume=True)
@GIVE_UP
@JSON
def resume(job_id: str | None, overrides: tuple[str, ...], give_up_s: float, **options: Any) -> None:
    """Start an ended job again from its newest checkpoint.

    Use it after a failure, a stop or a reboot. The job keeps its ID and its code. The trainer continues from the
    newest complete checkpoint. Your own program starts from its beginning in the same run folder. Without ID, the
    command takes the newest job launched from this machine.

    \b
    Examples:
      deploy.py resume ID                     # after a failure or a stop
      deploy.py resume ID train.steps=4000    # continue after its end
      deploy.py resume ID --gpus 0,1          # on other GPUs
    """
    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    ways = {name: options.pop(name) for name in ("detach", "as_json", "notify")}
    ways.update(pulls=not options.pop("no_pull"), pull_limit=parse_size(options.pop("pull_max")) or None)
    changes = {"keys": take_changes(options), **options}
    if job_id is not None and "=" in job_id:  # an ID contains no =
        overrides, job_id = (job_id, *overrides), None
    host, record = find_host(job_id, **place)
    from deployer.commands.launch import resume as command

    sys.exit(
        command.resume(
            host,
            id_of(job_id, record),
            overrides=overrides,
            changes=changes,
            give_up_s=give_up_s,
            **ways,
        )
    )


@click.command(cls=WithProgram, context_settings=CONTEXT)
@click.argument("job_id", metavar="ID")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@at_a_place
@click.option("--with-changes", is_flag=True, help="Send the project as it is now, not the files that the job had.")
@with_keys([row for row in JOB if row is not ROOT], gpus="as the job was launched")
@click.option("--dry-run", type=click.Choice(["local", "remote"]), metavar="[=remote]", help=DRY_RUN)
@with_results
@with_limits()
@GIVE_UP
@click.option("--yes", is_flag=True, help="With --with-changes: send a very large project without asking.")
@JSON
def repeat(job_id: str, overrides: tuple[str, ...], with_changes: bool, give_up_s: float, **options: Any) -> None:
    """Launch a job again as a new job, whatever its state.

    The new job has the same files, arguments and options on the same host; what you give here replaces them. Nothing is
    sent, because the host has the files. With --with-changes the project (the folder you are in) is sent as it is now,
    and --ssh may name another host.

    Secrets come from this shell, --env values from the host. Not repeated are --after, --notify, and the changes of a
    later resume, except its --env values.

    \b
    Examples:
      deploy.py repeat ID train.steps=200 --gpus 2      # on the GPU of index 2
      deploy.py repeat ID --with-changes --ssh gpu2
    """
    context = click.get_current_context()
    if context.meta["program"]:
        raise UsageError("repeat takes no program", hint="a new one is launched by: deploy.py run -- PROGRAM …")
    words = _words_beside(context, job_id)
    place = {name: options.pop(name) for name in ("ssh", "root", *ACCESS)}
    record = _record_of(job_id, **place)
    if with_changes:
        _run_anew(record, words, place)
        return
    is_there = record is None or place["ssh"] in (None, record.ssh)
    if record is not None and not is_there:
        where = record.ssh or "this machine"
        raise UsageError(f"the files of {record.job_id} are on {where} alone", hint="--with-changes sends the project")
    ways = {name: options.pop(name) for name in ("detach", "as_json", "notify")}
    dry_run = options.pop("dry_run")
    ways.update(pulls=not options.pop("no_pull"), pull_limit=parse_size(options.pop("pull_max")) or None)
    changes = {"keys": take_changes(options), **options}
    host, _ = find_host(record.job_id if record else job_id, **place)
    from deployer.commands.launch import repeat as command

    how = {"overrides": overrides, "changes": changes, "words": words, "dry_run": dry_run, "give_up_s": give_up_s}
    sys.exit(command.repeat(host, record.job_id if record else job_id, record, **how, **ways))


ANEW = "anew"
"""The key in click's `meta` under which a launch finds the job that it repeats."""


def _record_of(job_id: str, ssh: str | None, root: str | None, **access: Any) -> JobRecord | None:
    """This client's record; None for a job from another machine, if its host is named."""
    from deployer.jobs.registry import find_record

    try:
        return find_record(job_id)
    except UnknownJob:
        if ssh is None and root is None:
            raise
        return None


def _words_beside(context: click.Context, job_id: str) -> list[str]:
    """The words that were typed beside the ID, in the form that `run` takes."""
    words = [word for word in context.meta["words"] if word != "--with-changes"]
    takes = {name for p in context.command.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
    takes -= {"--dry-run"}
    place = next(n for n, word in enumerate(words) if word == job_id and not (n and words[n - 1] in takes))
    return [*words[:place], *words[place + 1 :]]


def _run_anew(record: JobRecord | None, words: list[str], place: dict[str, Any]) -> None:
    if record is None:
        raise UsageError("--with-changes needs the words of the launch, and it was launched from elsewhere")
    from deployer.commands.launch.repeat import words_anew

    elsewhere = place["ssh"] not in (None, record.ssh) or place["root"] not in (None, record.root)
    anew = words_anew(record, words, elsewhere=elsewhere)
    command = next(one for one in (sft, pretrain, run) if one.name in (record.verb, "run"))
    with command.make_context(command.name, list(anew.words)) as context:
        context.meta[ANEW] = anew
        command.invoke(context)


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("job_ids", metavar="ID...", nargs=-1)
@at_a_place
@click.option("--all", "every", is_flag=True, help="Stop every job that has not ended, on --ssh or on all known hosts.")
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(min=0),
    metavar="S",
    help="Seconds the job gets to save before it is killed [120].",
)
@click.option("--force", is_flag=True, help="Kill at once; unsaved work is lost.")
@click.option("--yes", is_flag=True, help="With --all: do not ask.")
@JSON
def stop(job_ids: tuple[str, ...], every: bool, yes: bool, **options: Any) -> None:
    """Stop jobs after giving them time to save.

    Ranks get --grace seconds to save. Then Torchferry kills every process of the job and checks that the GPUs are free.

    \b
    Examples:
      deploy.py stop ID --grace 300
      deploy.py stop --all --ssh gpu --yes
    """
    from deployer.commands.launch import stop as command

    how = {name: options.pop(name) for name in ("grace_s", "force", "as_json")}
    if every == bool(job_ids):
        raise name_one("stop needs the ID of a job, or --all", "stop")
    if every:
        sys.exit(command.stop_all(hosts_of(**options), yes=yes, **how))
    found = [(job_id, *find_host(job_id, **options)) for job_id in dict.fromkeys(job_ids)]
    sys.exit(command.stop([(host, id_of(job_id, record)) for job_id, host, record in found], **how))


COMMANDS = (run, sft, pretrain, resume, repeat, stop)
