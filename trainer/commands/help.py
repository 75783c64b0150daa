"""The `--help` of the trainer's commands: one format, with the program's name as it was called."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
TRAIN = "python train.py"
_NAMED = re.compile(rf"{TRAIN} (?=(?:init|convert|keys|export|generate|tokenize|inspect|calibrate)\b)")


class Verb(NamedTuple):
    """Another program's name for a command with one of its options: `torchferry inspect` is `train.py --inspect`."""

    help: str
    without: tuple[str, ...]
    """Parameters that have no meaning there."""
    helps: Mapping[str, str]
    """The help texts of parameters there."""


class Command(click.Command):
    """A command of the trainer. `verbs`: its help if the last word of its name is one of these."""

    def __init__(self, *args: Any, verbs: Mapping[str, Verb] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.verbs = verbs or {}

    def get_help(self, ctx: click.Context) -> str:
        program, _, name = ctx.command_path.rpartition(" ")
        verb = self.verbs.get(name)
        if verb is None:
            return as_called(super().get_help(ctx), program)
        params = [copy.copy(param) for param in self.params if param.name not in verb.without]
        for option in params:
            if isinstance(option, click.Option):
                option.help = verb.helps.get(option.name or "", option.help)
        return as_called(click.Command(self.name, params=params, help=verb.help).get_help(ctx), program)


def as_called(text: str, program: str) -> str:
    """A help text with the name of the program that started the trainer; train.py's name stays if none did."""
    if program in ("", "train.py"):
        return text
    text = _NAMED.sub(lambda _: f"{program} ", text)
    return text.replace(TRAIN, f"{program} train").replace("python deploy.py", program)


# --- of train.py CONFIG ----------------------------------------------------------------------------------------------

TRAINING = """Train on this machine from a config file.

CONFIG is a .py or YAML file, and KEY=VALUE overrides one of its keys. With several entries in target.gpu_ranks the
command starts itself again under torchrun, one process for each, unless a launcher has started it. On several nodes
start it on each with NNODES, NODE_RANK and MASTER_ADDR (the address of node 0).

Checkpoints, metrics.jsonl, config.yaml, outcome.json and the exported model go to the run folder: --run-dir, or
run.dir/NAME-DATE-TIME. Ctrl-C, SIGTERM or a file control/stop.json in that folder saves a checkpoint and stops.
The next start with that folder resumes from its newest checkpoint.

\b
Examples:
  python train.py my.yaml target.device=cpu
  python train.py my.yaml target.gpu_ranks=0,1
  python train.py my.yaml --run-dir runs/big  # a second start resumes

\b
Other commands, each with --help:
{commands}

Exit codes: 0 trained, or stopped when asked; 1 failed; 2 a mistake in the config, the command or the data; 128+N ended
by signal N.
"""
INSPECTION = """Show what a config would train on, and how; needs no GPU.

The command prints samples with each token's label, the plan, the memory and the schedule. It trains nothing and makes
no run folder. KEY=VALUE overrides a key of CONFIG.

\b
Examples:
  python train.py inspect my.yaml --samples 10
  python train.py inspect my.yaml train.micro_batch_size=8 --card-gib 80

Exit codes: 0 shown; 1 failed; 2 a mistake in the config, the command or the data; 128+N ended by signal N.
"""
CALIBRATION = """Find the fastest micro-batch size on these GPUs in two minutes.

The command times micro-batch sizes for at most two minutes and names the best one. It trains nothing and makes no run
folder. KEY=VALUE overrides a key of CONFIG.

\b
Examples:
  python train.py calibrate my.yaml
  python train.py calibrate my.yaml target.gpu_ranks=0,1 --json

Exit codes: 0 found; 1 failed; 2 a mistake in the config, the command or the data; 128+N ended by signal N.
"""
HELPS = {
    "samples": "Rows to show [3].",
    "card_gib": "GiB of GPU memory to plan for [this GPU's, or 80].",
    "as_json": "Print the result as one JSON object.",
}
VERBS = {
    "inspect": Verb(INSPECTION, ("run_dir", "inspect", "calibrate"), HELPS),
    "calibrate": Verb(CALIBRATION, ("run_dir", "inspect", "calibrate", "samples", "card_gib"), HELPS),
}
