"""The generation settings of an export: the end tokens that the run trained, and its model's sampling values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.tokenize.ends import end_of_turn
from trainer.errors import ModelError
from trainer.files import expanded
from trainer.models.generation import ids_of, read_generation
from trainer.schema import Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_of(
    config: Config, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, *, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The generation_config.json of a run's export: that of its original model, with the trained end token.

    The trained end token comes first, the model's stay: transformers stops at each. `tell` is called with a line if the
    original model's values cannot be read any more.
    """
    said = _said_by_model(config, tell)
    if config.data.tokenizer not in ("auto", config.model.name):  # in another vocabulary these ids are other tokens
        said = {name: value for name, value in said.items() if name not in SPECIAL}
    for name in ("bos_token_id", "pad_token_id"):
        own = getattr(tokenizer, name, None)
        if own is not None:
            said[name] = own
    ends = [*_trained_ends(config, tokenizer), *ids_of(said.get("eos_token_id"))]
    ends.append(getattr(tokenizer, "eos_token_id", None))
    known = [end for end in dict.fromkeys(ends) if end is not None and 0 <= end < vocab_size]
    said["eos_token_id"] = known[0] if len(known) == 1 else known or None
    return {name: value for name, value in said.items() if value is not None}


def _trained_ends(config: Config, tokenizer: Any) -> list[int | None]:
    if tokenizer is None:
        return []
    return [tokenizer.eos_token_id if config.recipe == "pretrain" else end_of_turn(tokenizer)]


def _said_by_model(config: Config, tell: Callable[[str], None]) -> dict[str, Any]:
    if config.model.name is None:
        return {}
    folder = _folder_of(config.model.name)
    try:
        if folder is not None:
            return read_generation(folder)
        reason = "its folder is not here"
    except ModelError as error:  # it could be read at the start; the export is worth more than these sampling values
        reason = error.message
    tell(f"note: the export has no sampling values of {config.model.name}: {reason}")
    return {}


def _folder_of(name: str) -> Path | None:
    """The folder with the small files of a model; None if they are gone."""
    folder = expanded(name)
    if folder.is_dir() or folder.is_absolute():
        return folder if folder.is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json"], local_files_only=True))
    except (OSError, ValueError):
        return None
