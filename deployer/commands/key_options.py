"""The options that set config keys, one row each. A new option needs two edits: a field in the schema and a row here.

A row's `type` parses the word to the type of the key in the schema. The schema is not loaded here, so that commands
connect to their host without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from deployer.commands.usage import Option
from deployer.commands.values import parse_assignment, parse_duration, parse_gpus, parse_path, parse_size

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
DEFAULT_ROOT = "~/.torchferry"


class KeyOption(Option):
    def __init__(self, *words: Any, key: str, **how: Any) -> None:
        super().__init__(*words, **how)
        self.key = key

    def changes(self, value: Any) -> dict[str, Any]:
        """The changes that the option makes to the config, by dotted key; empty if it was not given."""
        if value is None or value is False or value == ():
            return {}
        if not self.multiple:
            return {self.key: value}
        if isinstance(value[0], tuple):  # entries of a mapping
            return {f"{self.key}.{name}": entry for name, entry in value}
        return {self.key: list(value)}


class Row(NamedTuple):
    """One of these options. `at_resume`: differences of the option for `resume`; None: `resume` does not have it."""

    flag: str
    key: str
    help: str
    how: Mapping[str, Any]
    at_resume: Mapping[str, Any] | None

    def option(self, *names: str, resume: bool = False) -> Decorator:
        how = {"help": self.help, **self.how, **((self.at_resume or {}) if resume else {})}
        return click.option(self.flag, *names, cls=KeyOption, key=self.key, **how)


def _row(flag: str, key: str, help: str, *, at_resume: Mapping[str, Any] | None = None, **how: Any) -> Row:
    return Row(flag, key, help, how, at_resume)


SSH = _row("--ssh", "target.ssh", "The host: an address or an alias of ~/.ssh/config.", metavar="[USER@]HOST[:PORT]")
ROOT = _row("--remote-root", "target.root", f"Torchferry's folder on the host [{DEFAULT_ROOT}].", metavar="DIR")
GPUS = "GPUs by nvidia-smi index or UUID (2 is the third GPU), or auto:N for the N freest"
JOB = (
    _row(
        "--gpus",
        "target.gpu_ranks",
        f"{GPUS}. Without it a config uses its target.gpu_ranks, and a program sees all GPUs.",
        type=parse_gpus,
        metavar="0,2 or auto:2",
        at_resume={
            "metavar": "0,2",
            "help": "Run on these GPUs instead; a job under torchrun gets one process for each.",
        },
    ),
    _row(
        "--device",
        "target.device",
        "auto and cuda are the same: run on GPUs. Without a GPU it is an error, except for a program without --gpus. "
        "cpu: run without GPUs; --gpus 0,1 then means two processes.",
        type=click.Choice(["auto", "cuda", "cpu"]),
    ),
    _row("--name", "run.name", "Name of the run; the job's ID begins with it.", metavar="NAME"),
    _row(
        "--env",
        "target.env",
        "Set an environment variable of the job. Repeatable.",
        type=parse_assignment,
        multiple=True,
        metavar="K=V",
        at_resume={},
    ),
    _row(
        "--secret",
        "target.secrets",
        "Pass this variable of your shell to the job; its value is stored nowhere. Repeatable.",
        multiple=True,
        metavar="NAME",
        at_resume={},
    ),
    _row(
        "--env-file",
        "target.env_file",
        "Set the job's variables from a file like .env; their values are stored nowhere.",
        metavar="FILE",
        at_resume={},
    ),
    _row(
        "--out",
        "target.outputs",
        "Also pull this file or folder, which the job writes in its copy of the project. Repeatable.",
        type=parse_path,
        multiple=True,
        metavar="PATH|GLOB",
        at_resume={},
    ),
    ROOT,
    _row(
        "--python", "target.python", "The job's Python interpreter on the host [found or built there].", metavar="PATH"
    ),
    _row(
        "--setup",
        "target.setup",
        "Run this shell command on the host before the job, once: later jobs with the same command and files reuse "
        "what it made.",
        metavar="CMD",
    ),
)
"""The settings of a job. For `resume`, --ssh and --remote-root only find the job and do not change it."""
LIMITS = (
    _row(
        "--after",
        "target.after",
        "Start once that job on the host has succeeded; never start if it fails. Repeatable.",
        multiple=True,
        metavar="ID",
        at_resume={},
    ),
    _row(
        "--queue",
        "target.queue",
        "Wait on the host until the GPUs are free, first in, first out.",
        is_flag=True,
        at_resume={},
    ),
    _row(
        "--max-restarts",
        "target.max_restarts",
        "Start the job again after a failure, at most N times.",
        type=click.IntRange(min=0),
        metavar="N",
        at_resume={},
    ),
    _row(
        "--max-runtime",
        "target.max_runtime_s",
        "Save and stop after this long.",
        type=parse_duration,
        metavar="1h30m",
        at_resume={},
    ),
    _row(
        "--stall-timeout",
        "target.stall_timeout_s",
        "End the attempt as failed after this long without a step; for your own program: without output.",
        type=parse_duration,
        metavar="10m",
        at_resume={},
    ),
    _row(
        "--setup-timeout",
        "target.setup_timeout_s",
        "Fail the job if --setup takes longer than this [1h].",
        type=parse_duration,
        metavar="1h",
        at_resume={},
    ),
    _row(
        "--idle-timeout",
        "target.idle_timeout_s",
        "End the attempt as failed if it uses none of its GPUs for this long.",
        type=parse_duration,
        metavar="30m",
        at_resume={},
    ),
    _row(
        "--log-max",
        "target.log_max_gb",
        "Keep the newest part of each rank's log up to this size [10GB]; 0: keep all.",
        type=lambda text: parse_size(text) / 1e9,
        metavar="SIZE",
    ),
)
"""The rules that the host applies to a job without the client."""


def with_keys(rows: Sequence[Row], *, resume: bool = False, gpus: str | None = None) -> Decorator:
    """The options of these rows; for a resume only the allowed ones. `gpus`: the default of --gpus, for its help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(rows):
            if not resume or row.at_resume is not None:
                help = f"{GPUS} [{gpus}]." if gpus and row.flag == "--gpus" else row.help
                command = row._replace(help=help).option(resume=resume)(command)
        return command

    return decorate


def take_changes(options: dict[str, Any]) -> dict[str, Any]:
    """The config changes of this command line, by dotted key; their options are removed from `options`."""
    own = [option for option in click.get_current_context().command.params if isinstance(option, KeyOption)]
    given = [option.changes(options.pop(option.name)) for option in own if option.name in options]
    return {key: value for changes in given for key, value in changes.items()}
