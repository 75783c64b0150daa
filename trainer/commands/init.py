"""`train.py init`: a config of one's own to begin with, short and explained. No torch."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trainer.console import write_line
from trainer.errors import UserError
from trainer.schema.first_config import DATA, KINDS, MODEL, TEXT, TRAIN, look_at, render

HELP = """Write a short, explained YAML config to begin with.

KIND is `lora` (small adapters on a model that stays as it is), `sft` (the whole model learns) or `pretrain` (plain
text). It is written to KIND.yaml, or to --out; `-` is the terminal. A file that is there is left alone.

\b
  python train.py init lora --model Qwen/Qwen2.5-0.5B-Instruct --data my.jsonl
  python train.py lora.yaml --inspect              # what would be trained on and how
  python deploy.py lora.yaml --ssh HOST            # train there, and bring the adapter home

Exit codes: 0 written, 2 the file is there already or cannot be written.
"""


class InitError(UserError):
    """The config could not be written."""

    exit_code = 2


@click.command("init", help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--model", metavar="NAME", help=f"The model, a name or a folder [{MODEL}; pretrain: a small new one].")
@click.option("--data", metavar="FILE", help=f"What it learns from [{DATA}; pretrain: {TEXT}].")
@click.option("--out", "-o", metavar="FILE", help="Where to; - is the terminal [KIND.yaml].")
@click.option("--debug", is_flag=True, help="Show stack traces.")
def init(kind: str, model: str | None, data: str | None, out: str | None, debug: bool) -> None:
    file = out or f"{kind}.yaml"
    called = click.get_current_context().command_path.removesuffix(" init")
    program = TRAIN if called in ("init", "train.py") else called
    text = render(kind, file if file != "-" else f"{kind}.yaml", model=model, data=data, program=program)
    if file == "-":
        write_line(sys.stdout, text.rstrip("\n"))
        return
    try:
        with Path(file).open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise InitError(f"{file} is there already", hint="name another one with --out") from None
    write_line(sys.stdout, f"{file} is written. Next: {look_at(program, file)}")
