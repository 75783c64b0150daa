"""The trainer's commands under this program's name: each replaces this process by the trainer, on this machine."""

from __future__ import annotations

import os
import sys

import click

from deployer.errors import FerryError
from deployer.paths import CLIENT_ROOT
from deployer.terminal import invoked_as

PROGRAM_ENV = "TORCHFERRY_PROGRAM"
"""The environment variable with the name under which the trainer was called, for its messages."""
TRAINER = CLIENT_ROOT / "train.py"
"""Called by its path, because the project in the current folder may have its own folder `trainer`."""
FORWARDED = {
    "train": ("Train on this machine from a config file.", ()),
    "inspect": ("Show what a config would train on, and how; needs no GPU.", ("--inspect",)),
    "calibrate": ("Find the fastest micro-batch size on these GPUs in two minutes.", ("--calibrate",)),
    "init": ("Write a short file to start from: lora, sft, pretrain or task.", ()),
    "convert": ("Convert a SkyPilot or dstack task into a task file.", ()),
    "keys": ("Show the keys of a config and what they mean.", ()),
    "export": ("Write a run's checkpoint in Hugging Face format.", ()),
    "generate": ("Generate text with a trained model.", ()),
    "tokenize": ("Write text as a token file for pretraining.", ()),
}
"""By name: the first line of its help, and the options of `train.py` that it adds. The first three run
`train.py CONFIG`."""
OF_A_CONFIG = ("train", "inspect", "calibrate")


class Forwarded(click.Command):
    """Passes every word after its name to the trainer, also `--help`."""

    section = "On this machine, without a job"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["words"] = args
        return []


def _become(name: str, words: list[str]) -> None:
    program = invoked_as()
    is_of_config = name in OF_A_CONFIG
    os.environ[PROGRAM_ENV] = f"{program} {name}" if is_of_config else program
    options = FORWARDED[name][1]
    argv = [sys.executable, str(TRAINER), *([] if is_of_config else [name]), *words, *options]
    sys.stdout.flush()
    try:
        os.execv(sys.executable, argv)
    except OSError as error:
        hint = "its command line may be too long"
        raise FerryError(f"the trainer cannot be started: {error.strerror}", hint=hint) from None


def _command(name: str) -> click.Command:
    short = FORWARDED[name][0]
    words = click.Argument(["words"], nargs=-1, metavar="FILE")  # for shell completion
    return Forwarded(name, params=[words], help=short, short_help=short, callback=lambda words: _become(name, words))


COMMANDS = tuple(map(_command, FORWARDED))
