"""`deploy.py sft` and `pretrain`: make the config that `init` would write from a few options, show it and run it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deployer import terminal
from deployer.errors import UsageError
from deployer.paths import expanded
from deployer.plan.named_paths import did_you_mean, inside_of
from deployer.printable import shown
from trainer.schema.first_config import MODEL, render

LOCAL = ("./", "../", "~")
DATA_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".gz", ".bz2", ".xz", ".zst", ".txt", ".md")
ADAPTER = "adapter_config.json"


class Made(NamedTuple):
    """A config that is not in a file."""

    name: str
    """Its name in errors."""
    text: str


def make_config(
    kind: str, *, model: str | None, data: Sequence[str], overrides: Sequence[str], program: str, file: str | None
) -> Made:
    """The config for these options. Raises UsageError if an option or a file is missing, before a host is asked."""
    project = Path.cwd()
    command = "pretrain" if kind == "pretrain" else "sft"
    if stray := next((word for word in overrides if "=" not in word), None):
        hint = f"--data {shlex.quote(stray)}, or KEY=VALUE for a key of the config"
        raise UsageError(f"{command} takes options and KEY=VALUE, not {stray!r}", hint=hint)
    if model is None and kind != "pretrain":
        raise UsageError("--model is missing", hint=f"--model {MODEL}, or a folder with config.json and safetensors")
    if not data:
        raise UsageError("--data is missing", hint="--data my.jsonl, or a Hugging Face data set")
    sources = [_data(source, project) for source in data]
    base = None if model is None else _model(model, project, lora=kind == "lora")
    first = "" if file else "Made by this command; with -o FILE it is kept as a file, to change and to run again."
    text = render(kind, file or f"{kind}.yaml", model=base, data=sources, program=program, first=first)
    return Made(file or f"the config of {command}", text)


def show_config(made: Made, *, overrides: Sequence[str], to: str) -> None:
    """Shows the config. `to`: `stderr`, `comments` (before a plan on stdout) or `plain` (unchanged on stdout)."""
    if to == "plain":
        terminal.say_script(made.text.rstrip("\n"))
        return
    say, mark, head = (terminal.say, "#   ", "# ") if to == "comments" else (terminal.notice, "  ", "")
    lines = [*made.text.rstrip("\n").split("\n"), *(f"# and of the command line: {word}" for word in overrides)]
    say(
        shown(f"{head}config (options such as --gpus are added for the job, and not shown here):"),
        *(shown(f"{mark}{line}") for line in lines),
    )


def write_config(made: Made, file: str, *, overrides: Sequence[str], program: str) -> None:
    """Writes the config to a file that can be run again. Raises UsageError if the file exists with other content."""
    path = expanded(file)
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(made.text)
    except FileExistsError:
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != made.text:
            hint = f"{program} {shlex.quote(file)} runs it; another name keeps both"
            raise UsageError(f"{file} is there already and says something else", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from None
    terminal.notice(shown(f"{file} is written; again: {program} {shlex.join((file, *overrides))}"))


def _data(source: str, project: Path) -> str:
    """The source as the config names it: a file or folder here (see `_in_project`), or the name of a data set."""
    path = project / expanded(source)
    if path.exists():
        return _in_project(source, path, project)
    if source.startswith(("builtin:", "/")) or "://" in source or any(char in source for char in "*?["):
        return source  # an absolute path may be one of the host
    looks_local = source.startswith(LOCAL) or source.endswith(DATA_ENDINGS)
    hint = did_you_mean(path, project)
    if looks_local or (hint and "/" not in source):
        raise UsageError(f"--data {source}: no such file or folder", hint=hint or "a data set of the Hub is user/name")
    return source


def _model(model: str, project: Path, *, lora: bool) -> str:
    """The model as the config names it: its folder here, or its name."""
    path = project / expanded(model)
    if not path.exists():
        hint = did_you_mean(path, project)
        if model.startswith(LOCAL) or (hint and "/" not in model):
            raise UsageError(
                f"--model {model}: no such folder", hint=hint or f"a model of the Hub is user/name: {MODEL}"
            )
        return model
    if path.is_file():
        folder = os.path.dirname(model) or "."  # noqa: PTH120 - as it was written
        raise UsageError(f"--model {model} is a file", hint=f"name the folder with its config.json: {folder}")
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        goes_on = f"--model BASE lora.adapter={shlex.quote(model)} goes on with it"
        hint = f"without --lora: {goes_on}" if lora else goes_on
        raise UsageError(f"--model {model} is an adapter, not a model", hint=hint)
    if not (path / "config.json").is_file():
        inner = sorted(entry.parent.name for entry in path.glob("*/config.json"))
        near = f"did you mean {Path(model) / inner[0]}?" if inner else ""
        hint = near or "a model's folder has one, beside safetensors"
        raise UsageError(f"--model {model} has no config.json", hint=hint)
    return _in_project(model, path, project)


def _in_project(given: str, path: Path, project: Path) -> str:
    """Makes an absolute path below the project relative, so that it is sent."""
    if not given.startswith(("/", "~")):
        return given
    return inside_of(path, project) or given
