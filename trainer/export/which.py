"""Finds the model for a folder or a name: a run's export or checkpoint, an adapter, any Hugging Face folder."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.folders import is_complete, newest_complete
from trainer.errors import ModelError
from trainer.export.checkpoint import Source, find_source
from trainer.files import expanded
from trainer.models.adapter_files import CONFIG_FILE as ADAPTER_CONFIG
from trainer.models.hf import CONFIG_FILE
from trainer.schema import ADAPTER_DIR, CHECKPOINTS_DIR, EXPORT_DIR
from trainer.typed import InvalidData, read_json

RESULTS = Path("results")
"""The folder for `deploy.py`'s results of jobs, below the project's folder."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Meant:
    """One of three: a model of transformers (a folder or a name on the Hub), an adapter's folder, a checkpoint."""

    model: str | None = None
    adapter: Path | None = None
    checkpoint: Source | None = None


@dataclass(frozen=True)
class OverBase:
    """The adapter's base model, from an adapter_config.json."""

    base_model_name_or_path: str | None = None


def find_model(said: str, step: str | None) -> Meant:
    """The model for `said`. `step`: chooses one of a run's checkpoints. Raises ModelError if there is none."""
    folder = expanded(said)
    if not folder.is_dir() and (RESULTS / said).is_dir():  # a job's id
        folder = RESULTS / said
    if not folder.is_dir():
        if step is None and HUB_NAME.fullmatch(said) and not Path(said).parent.is_dir():
            return Meant(model=said)
        raise ModelError(f"there is no run or model folder {folder.absolute()}", hint=_near(folder))
    if step is not None or is_complete(folder):
        return Meant(checkpoint=find_source(folder, step))
    for place in (folder, folder / EXPORT_DIR, folder / EXPORT_DIR / ADAPTER_DIR, folder / ADAPTER_DIR):
        if (place / CONFIG_FILE).is_file():
            return Meant(model=str(place.absolute()))
        if (place / ADAPTER_CONFIG).is_file():
            return Meant(adapter=place.absolute())
    if newest_complete(folder / CHECKPOINTS_DIR) is not None:
        return Meant(checkpoint=find_source(folder, None))
    raise ModelError(
        f"{folder.absolute()} holds no model: no {CONFIG_FILE}, no {EXPORT_DIR}/, no complete checkpoint",
        hint="`deploy.py pull ID --checkpoint latest` brings a job's checkpoint; a run exports at its end (run.export)",
    )


def _near(folder: Path) -> str:
    try:
        names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    except OSError:
        names = []
    near = difflib.get_close_matches(folder.name, names, n=1)
    return f"did you mean {folder.parent / near[0]}?" if near else "a run's first line names its folder"


def base_of(adapter: Path, given: str | None) -> str:
    """An adapter's base model: `given`, else the one in the adapter's config. Raises ModelError if its folder is
    missing."""
    name = given
    if name is None:
        try:
            name = read_json(adapter / ADAPTER_CONFIG, OverBase).base_model_name_or_path
        except (OSError, InvalidData) as error:
            raise ModelError(f"{adapter / ADAPTER_CONFIG} cannot be read: {error}") from None
    if not name:
        raise ModelError(f"{adapter} does not say which model it is of", hint="name it with --base")
    folder = expanded(name)
    if not folder.is_dir() and (folder.is_absolute() or not HUB_NAME.fullmatch(name) or name.startswith(".")):
        raise ModelError(f"{adapter} is of {name}, and that folder is not here", hint="--base DIR names another place")
    return str(folder.absolute()) if folder.is_dir() else name
