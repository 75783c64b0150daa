"""`train.py init`: writes a short, explained config to start from. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from trainer.commands.help import CONTEXT, Command
from trainer.console import write_line
from trainer.errors import UserError
from trainer.schema.first_config import DATA, KINDS, MODEL, TEXT, TRAIN, as_yaml, look_at, render

HELP = """Write a short file to start from: lora, sft, pretrain or task.

KIND is `lora` (small adapters over an unchanged model), `sft` (the whole model) or `pretrain` (plain text). The file is
a config of the trainer, KIND.yaml.

Or KIND is `task`. The file then describes how your own program runs: torchferry.yaml, which `run` takes without a name.
An existing file is not changed.

\b
Examples:
  python train.py init lora --model Qwen/Qwen2.5-0.5B-Instruct --data my.jsonl
  python train.py lora.yaml --inspect  # what it would train on, and how
  python deploy.py lora.yaml --ssh gpu  # train there, pull the adapter
  python train.py init task  # next: python deploy.py run --ssh gpu

Exit codes: 0 written; 2 the file exists already or cannot be written.
"""

TASK = """\
# How a program of yours runs, on any machine that you can ssh to. Look at it first: {look}
run: {run}  # with && or lines a shell's command; as a list, [python, a.py, --lr, 1e-4], words
gpus: auto:1  # auto:4: the four freest; 0,1: these; on a machine without: device: cpu
# torchrun: true  # one process for each of gpus
# host: me@gpu-box  # or an alias of ~/.ssh/config; `--ssh` says it too, and without it this machine is the host
# env: {{HF_HOME: /data/hf}}
# secrets: [HF_TOKEN]  # taken from your shell at the launch, and kept nowhere
# setup: pip install -r requirements.txt  # on the host, once for what it names
# include: [data]  # what git ignores and the program needs
# outputs: [out]  # is pulled afterwards too: paths in the job's copy of the project
# max_restarts: 3  # after a failure, by the host itself
# max_runtime: 12h  # then it is told to save and stop
# queue: true  # wait for the GPUs
"""
TASK_FILE = "torchferry.yaml"
PROGRAMS = ("train.py", "main.py")
"""File names that count as the program of a folder: the first that exists, else its only program."""
EVERY_KIND = (*KINDS, "task")


class InitError(UserError):
    """The config could not be written."""

    exit_code = 2


@click.command("init", cls=Command, help=HELP, context_settings=CONTEXT)
@click.argument("kind", type=click.Choice(EVERY_KIND))
@click.option("--model", metavar="NAME", help=f"The model: a name or a folder [{MODEL}; pretrain: a new one].")
@click.option("--data", metavar="FILE", help=f"Training data [{DATA}; pretrain: {TEXT}].")
@click.option("--out", "-o", metavar="FILE", help="File to write; - prints it [KIND.yaml; task: torchferry.yaml].")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def init(kind: str, model: str | None, data: str | None, out: str | None, debug: bool) -> None:
    usual = TASK_FILE if kind == "task" else f"{kind}.yaml"
    file = out or usual
    called = click.get_current_context().command_path.removesuffix(" init")
    program = TRAIN if called in ("init", "train.py") else called
    name = file if file != "-" else usual
    if kind == "task":
        if model or data:
            raise click.UsageError("--model and --data are of a config: a task runs a program, which has its own")
        look = _look_at_task(program, name)
        text = TASK.format(look=look, run=f"python {as_yaml(_program_here())}")
    else:
        look = look_at(program, name)
        text = render(kind, name, model=model, data=data, program=program)
    if file == "-":
        write_line(sys.stdout, text.rstrip("\n"))
        return
    try:
        with Path(file).open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise InitError(f"{file} is there already", hint="name another one with --out") from None
    write_line(sys.stdout, f"{file} is written. Next: {look}")


def _program_here() -> str:
    usual = next((name for name in PROGRAMS if Path(name).is_file()), None)
    there = sorted(path.name for path in Path().glob("*.py"))
    return usual or (there[0] if len(there) == 1 else PROGRAMS[0])


def _look_at_task(program: str, file: str) -> str:
    runner = "python deploy.py" if program == TRAIN else program
    named = "" if file == TASK_FILE else f" {shlex.quote(' '.join(file.splitlines()))}"
    return f"{runner} run{named} --dry-run"
