"""Commands and options of other tools (SkyPilot, dstack, submitit, Slurm, docker, kubectl, accelerate, rsync), and the
equivalent command line here. The line is only shown, to be typed: nothing is run.

To add a word, put it in a row of COMMANDS; to add an option, put it in OPTIONS.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import click

from deployer.agent.host.layout import JOB_ID

COMMANDS = {
    "ps": "list ls queue squeue qstat jobs",
    "ps --all": "sacct",
    "ps --watch": "watch",
    "status": "describe show info",
    "logs": "log output",
    "logs --follow": "attach tail",
    "plot": "graph chart curves",
    "stop": "cancel kill down scancel qdel terminate abort delete",
    "resume": "restart retry requeue",
    "repeat": "rerun relaunch",
    "run": "launch submit apply sbatch srun qsub start",
    "shell": "ssh connect login",
    "tunnel": "port-forward forward",
    "pull": "sync rsync cp scp download fetch get",
    "push": "put upload",
    "gpus": "nvidia-smi gpustat nvtop nvitop sinfo",
    "gc": "rm clean cleanup prune purge remove",
    "doctor": "check verify",
}
"""Our command, with an option if it needs one, and the words for it in other tools."""

OPTIONS = {
    "run": {
        "{}": "-f --file --config --config-yaml",
        "--fsdp-config {}": "--config-file",
        "--gpus auto:{}": "-n --num-gpus --ngpus --n-gpus --gpus-per-node --num-processes --nproc-per-node --gres",
        "--gpus {}": "--gpu --gpu-ids --device-ids",
        "--ssh {}": "--host --hostname --cluster -c --remote",
        "--name {}": "--job-name -J --run-name",
        "--env {}": "-e",
        "--out {}": "--outputs",
        "--max-runtime {}": "--time --timeout --walltime",
        "--max-restarts {}": "--retries --max-retries",
        "--detach": "-d --background",
        "model.name={}": "--model",
        "data.train={}": "--data --train-file",
        "train.micro_batch_size={}": "--per-device-batch-size --micro-batch-size",
        "train.precision=bf16": "--bf16",
        "lora.rank={}": "--lora-rank",
        "optim.warmup_steps={}": "--warmup",
    },
    "sft": {
        "--model {}": "--model-name-or-path --model-name --model-id --base-model",
        "--data {}": "--dataset-name --dataset --dataset-path --train-file",
        "--lora": "--use-peft --peft --use-lora",
    },
    "ps": {"--all": "-a", "--watch": "-f --follow"},
    "logs": {"--tail {}": "-n --lines"},
    "stop": {"--force": "-9 -KILL", "--grace {}": "-t --time --timeout --grace-period"},
    "gc": {"--yes": "-y -f"},
}
"""By our command: an option of ours, or a key of the config, and the same options in other tools (with `-` for `_`).
For other options, `run`, `sft` and `resume` look in the schema, which has the names of its keys in other tools; `sft`
also looks in the rows of `run`."""

ABSENT = {
    "--output-dir": "results are pulled to results/ID; deploy.py pull ID --to DIR puts them elsewhere",
    "--nodes": "a job runs on one host",
    "--nnodes": "a job runs on one host",
}
"""Options of other tools that `run` does not need, and why."""

GROUPS = ("jobs", "job", "trl")
"""Words that stand before a command in other tools, as in `sky jobs queue` and `trl sft`."""

COPIES = ("rsync", "scp", "cp", "sync", "copy")
"""Words of other tools for both directions: to a host if the last word names one."""

PROGRAMS = frozenset(("python", "python3", "torchrun", "accelerate", "deepspeed", "bash", "sh"))
"""First words that mean a program even if this machine lacks it; other words must be in PATH here."""

_OURS_OF = {word: ours for ours, words in COMMANDS.items() for word in words.split()}


def line_here(words: Sequence[str], commands: Mapping[str, click.Command]) -> str:
    """The line to type here for `words` of another tool; empty if the first word is not a word of another tool."""
    if words[0] in GROUPS and words[1:] and (words[1] in _OURS_OF or words[1] in commands):
        words = words[1:]
    ours = words[0] if words[0] in commands else _OURS_OF.get(words[0], "")
    if words[0] in COPIES and len(words) > 2 and ":" in words[-1] and ":" not in words[-2]:
        ours = "push"
    name, *options = ours.split() or [""]
    if name not in commands:
        return ""
    if words[0] == "ssh" and any("@" in word for word in words):  # a host, not a job
        return f"deploy.py shell --ssh {shlex.quote(words[1] if len(words) == 2 else shlex.join(words))}"
    return _Line(name, commands[name], options).of(words[1:])


def line_with_options(command: click.Command, option: str, words: Sequence[str]) -> str:
    """The line of our command with our options and keys instead of other tools' options. Empty if `option`, which the
    command does not have, is not an option of another tool."""
    name = command.name or ""
    known = _template(name, option) is not None or (name == "run" and _plain(option) in ABSENT)
    return _Line(name, command).of(words) if known else ""


@dataclass
class _Line:
    """Builds a line of ours."""

    name: str
    command: click.Command
    options: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    program: list[str] | None = None
    own: list[str] = field(default_factory=list)
    """The options that became `keys`, as they were given: if the line has a program, they go to the program."""
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of(self, words: Sequence[str]) -> str:
        """The line with these words after the command."""
        left = list(words)
        while left and self.program is None:
            word = left.pop(0)
            if word == "--":
                self.program = left
            elif word.startswith("-") and word != "-":
                self._take_option(word, left)
            elif self.name == "run" and not self.words and is_program(word):
                self.program = [*_STARTED_BY.get(Path(word).suffix, ()), word, *left]
            else:
                self.words.append(word)
        words_of = {"run": self._run_words, "sft": self._sft_words}.get(self.name, self._job_words)
        line = ["deploy.py", self.name, *words_of()]
        if self.name == "run" and self.program is None and self.words and _is_task_elsewhere(self.words[0]):
            line = ["deploy.py", "convert", self.words[0], "-o", "torchferry.yaml"]
            self.notes.insert(0, "then " + shlex.join(["deploy.py", "run", *self.options]))
            self.left_out += [*self.words[1:], *self.own]
        without = f" (without {shlex.join(self.left_out)})" if self.left_out else ""
        return shlex.join(line) + without + "".join(f"; {note}" for note in self.notes)

    def _take_option(self, word: str, left: list[str]) -> None:
        name, equals, value = word.partition("=")
        known = _option(self.command, name)
        if known is not None:
            takes = not (known.is_flag or equals or (known.metavar or "").startswith("["))
            if name not in known.opts or not set(known.opts) & set(self.options):  # else our command has it already
                self.options += [word, *left[: int(takes)]] if name != "--notify" else ["--notify", "URL"]
            del left[: int(takes)]
            return
        template = _template(self.name, name)
        absent = ABSENT.get(_plain(name), "") if self.name == "run" and template is None else ""
        if template is None and not absent:
            self.left_out.append(word)
            return
        given, takes = [word], "{}" in (template or "{}")
        if not equals and left and (not left[0].startswith("-") if takes else left[0].lower() in ("true", "false")):
            value = left.pop(0)
            given.append(value)
        if template is None:
            self.notes.append(absent)
        elif template == "{}":
            self.words.append(value or "CONFIG")
        elif template.startswith("-"):
            self.options += _filled(template, value)
        else:
            self.keys += _filled(template, value)
            self.own += given

    def _run_words(self) -> list[str]:
        if self.program is not None:
            return [*self.options, "--", *self.program, *self.own]
        return [*self.options, *(self.words or ["CONFIG"]), *self.keys]

    def _sft_words(self) -> list[str]:
        self.left_out += [word for word in self.words if "=" not in word]
        return [*self.options, *(word for word in self.words if "=" in word), *self.keys]

    def _job_words(self) -> list[str]:
        arguments = [param for param in self.command.params if isinstance(param, click.Argument)]
        words, options = list(self.words), self.options
        if not arguments:  # a command about a host; a word after an unknown option may be its value
            host = words[:1] if self.name != "gc" and not self.left_out and "--ssh" not in options else []
            self.left_out += words[len(host) :]
            return [*options, *(["--ssh", *host] if host else [])]
        if self.name == "push" and words and ":" in words[-1]:  # the target in scp and rsync
            name, _, folder = words.pop().partition(":")
            words, options = [name, *words], [*options, *(["--into", folder] if folder.strip("/.") else [])]
        if self.name == "pull" and words and ":" in words[0]:  # a file in scp, rsync and docker
            words[:1] = words[0].split(":", 1)
            options = [*options, "--to", words.pop()] if len(words) > 2 else options
        if "--all" in options:
            return options
        if len(words) == 2 and _IS_NUMBER.match(words[1]) and not _IS_NUMBER.match(words[0]):
            words = ["ID"]  # a job in SkyPilot: CLUSTER 3
        if arguments[0].nargs == -1:
            return [*options, *(list(filter(_is_id, words)) or ["ID"])]
        if len(arguments) == 1:
            self.left_out += words[1:]
        job_id = words[0] if words and _is_id(words[0]) else "ID"
        return [*options, job_id, *(words[1:] if len(arguments) > 1 else ()), *self.keys]


_IS_NUMBER = re.compile(r"\d{1,3}\Z")
_STARTED_BY = {".py": ("python",), ".sh": ("bash",)}


def _option(command: click.Command, name: str) -> click.Option | None:
    options = (param for param in command.params if isinstance(param, click.Option))
    return next((option for option in options if name in (*option.opts, *option.secondary_opts)), None)


def _is_id(word: str) -> bool:
    return JOB_ID.match(word.lower()) is not None


def _plain(option: str) -> str:
    return option.partition("=")[0].replace("_", "-")


def _template(name: str, option: str) -> str | None:
    """Our option or key for an option of another tool, with `{}` for its value; None if there is none."""
    plain = _plain(option)
    for template, options in OPTIONS.get("run" if name == "resume" else name, {}).items():
        if plain in options.split() and (name != "resume" or "=" in template):
            return template
    if name == "sft":
        found = _template("run", option)
        return found if found != "{}" else None  # sft takes no file
    is_key = name in ("run", "resume") and plain.startswith("--") and plain not in ABSENT
    return _keys().get(plain[2:].replace("-", "_")) if is_key else None


def said_here(option: str) -> str:
    """Our option or key for an option of another tool's launch; empty if it is unknown."""
    return " ".join(_filled(_template("sft", option) or "", "VALUE"))


def _is_task_elsewhere(word: str) -> bool:
    """Whether the word is a file with a task that `convert` takes."""
    if not Path(word).is_file():
        return False
    from trainer.config.kinds.recognise import DSTACK, SKYPILOT, read_kind
    from trainer.config.load import ConfigError

    try:
        return read_kind(word).kind in (SKYPILOT, DSTACK)
    except (ConfigError, OSError):
        return False


@cache
def _keys() -> dict[str, str]:
    """The template of a key by its last name, if no other key has that name, and by its names in other tools."""
    from trainer.config.keys import aliases, known_keys

    kinds = known_keys()
    named = [*((key.rpartition(".")[2], key) for key in kinds), *aliases().items()]
    last = [name for name, _ in named]
    return {name: f"{key}={'true' if kinds[key] is bool else '{}'}" for name, key in named if last.count(name) == 1}


def _filled(template: str, value: str) -> list[str]:
    """The words of a template with the value, or with a placeholder if the value is missing."""
    if template.startswith("--gpus auto"):
        count = re.search(r"\d+\Z", value)  # gpu:a100:2
        value = count[0] if count else "N"
    elif template.startswith("--max-runtime"):
        value = re.sub(r"\A(\d+):(\d\d):(\d\d)\Z", r"\1h\2m\3s", value)  # the format of Slurm
        value = value if re.fullmatch(r"(\d+[dhms])+", value) else "VALUE"
    elif value.lower() == "false":
        template = template.replace("=true", "=false")
    return [word.replace("{}", value or "VALUE") for word in template.split()]


def is_program(word: str) -> bool:
    """Whether a first word that is not a command means a program of the user, and not a config."""
    path = Path(word)
    if path.suffix == ".py":
        return path.is_file() and not re.search(r"^config\b.*=", _text(path), re.MULTILINE)
    is_config = "=" in word or path.suffix in (".yaml", ".yml")
    return not is_config and (path.suffix == ".sh" or word in PROGRAMS or shutil.which(word) is not None)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""
