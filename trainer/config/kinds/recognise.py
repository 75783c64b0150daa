"""The kind of a YAML file, by its keys: ours, or another tool's. All commands use this decision.

Pure: a table decides. To add a kind, add a row to KINDS.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from trainer.config.fields import Word
from trainer.config.files import YAML_SUFFIXES, read_yaml
from trainer.config.keys import Places, field_kinds, is_section, nearest_keys
from trainer.config.kinds.task_keys import BY_NAME, RUN, TASK_KEYS, is_given, is_program
from trainer.errors import COMMAND_LINE, ConfigError
from trainer.schema import Config

Tree = Mapping[str, object]
CONFIG, TASK, SKYPILOT, DSTACK, ACCELERATE = "config", "task", "skypilot", "dstack", "accelerate"
MOST_KEYS = 8
"""An error names at most this many of a file's keys."""


class Kind(NamedTuple):
    """A kind of file. `marks` returns the keys that show that a file is of this kind; if empty, it is not."""

    name: str
    what: str
    needs: str
    """The keys that a file of this kind has, in words."""
    marks: Callable[[Tree], list[str]]
    hint: str
    """What to do with such a file where another kind is expected; `{file}` is the file, `{program}` the deployer."""


class Found(NamedTuple):
    """A file and the kind that it was recognised as."""

    kind: str
    tree: Tree
    places: Places


# --- marks ------------------------------------------------------------------------------------------------------------

_TASKS_OWN = {row.name for row in TASK_KEYS} - {"run", "name", "setup", "secrets", "config"}
_SKY_OWN = ("resources", "workdir", "num_nodes", "envs", "file_mounts", "storage_mounts", "volumes", "service", "pool")
_DSTACK_TYPES = ("task", "dev-environment", "service", "fleet", "volume", "gateway")
_ACCELERATES = ("compute_environment", "distributed_type", "main_training_function", "fsdp_config")
_OF_TRANSFORMERS = ("dataset_name", "output_dir", "per_device_train_batch_size", "num_train_epochs", "learning_rate")
_LLAMA_FACTORYS = ("stage", "finetuning_type", "template")


def _of_config(tree: Tree) -> list[str]:
    sections = [name for name, kind in field_kinds(Config).items() if is_section(kind)]
    marks = [name for name in ("recipe", "script") if name in tree]
    marks += [name for name in sections if isinstance(tree.get(name), Mapping)]
    if marks or (RUN in tree and not isinstance(tree[RUN], Mapping)):
        return marks
    return [*tree, "nothing"][: len(tree) or 1] if tree.keys() <= field_kinds(Config).keys() else []


def _of_task(tree: Tree) -> list[str]:
    if not is_program(tree) or (_of_skypilot(tree) and not _TASKS_OWN & tree.keys()):
        return []
    return ["run"]


def _of_skypilot(tree: Tree) -> list[str]:
    if "type" in tree or not {"run", "setup", "resources", "service"} & tree.keys():
        return []
    marks = [name for name in _SKY_OWN if name in tree]
    return [*marks, *(["secrets"] if isinstance(tree.get("secrets"), Mapping) else [])]


def _of_dstack(tree: Tree) -> list[str]:
    return ["type"] if text_of(tree.get("type")) in _DSTACK_TYPES else []


def _of_accelerate(tree: Tree) -> list[str]:
    return [name for name in _ACCELERATES if name in tree]


def _of_axolotl(tree: Tree) -> list[str]:
    return ["base_model"] if "base_model" in tree else []


def _of_llama_factory(tree: Tree) -> list[str]:
    return [name for name in _LLAMA_FACTORYS if "model_name_or_path" in tree and name in tree]


def _of_trl(tree: Tree) -> list[str]:
    if "model_name_or_path" not in tree or _of_llama_factory(tree):
        return []
    return ["model_name_or_path", *(name for name in _OF_TRANSFORMERS if name in tree)]


def text_of(value: object) -> str:
    """The text of a scalar; empty for null, a list or a mapping."""
    return value.text if isinstance(value, Word) else value if isinstance(value, str) else ""


_CONVERT = "{program} convert {file} -o torchferry.yaml makes a task file of it, which {program} run takes"
_KEYS = "{program} keys WORD says what a key of it is called here; {program} init sft writes a config to begin with"
KINDS = (
    Kind(
        CONFIG, "a config of the trainer", "recipe, model, data, …", _of_config, "{program} run {file} trains with it"
    ),
    Kind(TASK, "a task file, which runs a program", "run", _of_task, "{program} run {file} runs it"),
    Kind(SKYPILOT, "a SkyPilot task", "resources, workdir, envs, …", _of_skypilot, _CONVERT),
    Kind(DSTACK, "a dstack configuration", "type", _of_dstack, _CONVERT),
    Kind(
        ACCELERATE,
        "a file of `accelerate config`",
        "distributed_type",
        _of_accelerate,
        "it goes beside a config: {program} run CONFIG --fsdp-config {file}",
    ),
    Kind("axolotl", "an axolotl config", "base_model", _of_axolotl, _KEYS),
    Kind("llama-factory", "a LLaMA-Factory config", "model_name_or_path, stage", _of_llama_factory, _KEYS),
    Kind("trl", "a config of TRL's or transformers' scripts", "model_name_or_path", _of_trl, _KEYS),
)
NAMES = tuple(kind.name for kind in KINDS)
_BY_NAME = {kind.name: kind for kind in KINDS}


# --- the answer -------------------------------------------------------------------------------------------------------


def fitting(tree: Tree) -> dict[str, list[str]]:
    """The kinds that a file may be, each with the keys that indicate it."""
    found = {kind.name: kind.marks(tree) for kind in KINDS}
    return {name: marks for name, marks in found.items() if marks}


def read_kind(path: str | Path, *, named: str | None = None) -> Found:
    """The kind of the file, or `named` from the command line, and the file's content.

    A file that is not YAML is a config, and is not read here. Raises ConfigError for a file that fits no kind, or
    several.
    """
    path = Path(path)
    if named is not None and named not in NAMES:
        near = get_close_matches(named, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"kinds: {', '.join(NAMES)}"
        raise ConfigError(f"--as {named}: no such kind of file", where=COMMAND_LINE, hint=hint)
    if path.suffix not in YAML_SUFFIXES:
        if named not in (None, CONFIG):
            raise ConfigError(
                f"{path} is no YAML, so it cannot be read as {named}", hint="only a config may be a .py file"
            )
        return Found(CONFIG, {}, Places(str(path)))
    tree, places = read_yaml(path)
    if named is not None:
        return Found(named, tree, places)
    fits = fitting(tree)
    if len(fits) == 1:
        return Found(next(iter(fits)), tree, places)
    raise _several(path, fits, places) if fits else _none(path, tree, places)


def expect(found: Found, path: str | Path, *wanted: str, program: str = "deploy.py") -> Found:
    """The file, if it is of an accepted kind. Otherwise raises ConfigError, which names the command for this kind.

    `program`: the deployer's name on the command line.
    """
    if found.kind not in wanted:
        kind = _BY_NAME[found.kind]
        hint = kind.hint.format(file=shlex.quote(str(path)), program=program)
        raise ConfigError(f"{path} is {kind.what}", where=str(path), hint=hint)
    return found


def _several(path: Path, fits: Mapping[str, list[str]], places: Places) -> ConfigError:
    said = ", or ".join(f"{_BY_NAME[name].what} (it has {_named(marks[:3])})" for name, marks in fits.items())
    where = places.of(max(fits.values(), key=lambda marks: _line(places.of(marks[0])))[0])
    decides = " or ".join(f"--as {name}" for name in fits)
    return ConfigError(
        f"{path} may be {len(fits)} things: {said}", where=where, hint=f"remove the keys of one, or add {decides}"
    )


def _named(keys: list[str]) -> str:
    return f"the key{'s' * (len(keys) > 1)} {', '.join(keys)}"


def _line(place: str) -> int:
    number = place.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _none(path: Path, tree: Tree, places: Places) -> ConfigError:
    keys = ", ".join(list(tree)[:MOST_KEYS]) + (", …" if len(tree) > MOST_KEYS else "")
    kinds = "; ".join(f"{kind.name} ({kind.needs})" for kind in KINDS)
    first = next(iter(tree))
    hint = f"--as NAME decides: {kinds}"
    if tree.keys() & BY_NAME.keys() and not is_given(tree.get("run")):
        hint = f"a task file needs run, the program; else {hint}"
    elif near := _nearest(first):
        hint = f"did you mean {near} instead of {first}? Else {hint}"
    return ConfigError(f"{path} is no kind of file that is known: it has {keys}", where=places.of(first), hint=hint)


def _nearest(name: str) -> str:
    near = get_close_matches(name, BY_NAME, n=1) or nearest_keys(name, sections=True)
    return near[0] if near else ""
