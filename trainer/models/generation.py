"""The generation settings in a model's folder: sampling values, and the tokens that begin and end a text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ModelError
from trainer.models.hf import CONFIG_FILE
from trainer.typed import InvalidData, from_json, read_json

GENERATION_FILE = "generation_config.json"
Ids = int | tuple[int, ...] | None


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the special tokens of a tokenizer, a config.json or a generation_config.json."""

    bos_token_id: Ids = None
    eos_token_id: Ids = None
    pad_token_id: Ids = None


def read_generation(folder: Path) -> dict[str, Any]:
    """The values of generation_config.json, and special tokens from config.json that are missing there; empty without
    either file.

    Raises ModelError with file and key for a damaged file.
    """
    said: dict[str, Any] = {}
    for name in (CONFIG_FILE, GENERATION_FILE):
        try:
            found: dict[str, Any] = read_json(folder / name, dict[str, Any])
            special = {key: ids for key, ids in asdict(from_json(found, SpecialTokens)).items() if ids is not None}
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"{folder / name} cannot be read: {error.strerror}") from error
        except InvalidData as damage:
            raise ModelError(f"{folder / name}: {damage}") from None
        said |= (found if name == GENERATION_FILE else {}) | special
    return {key: value for key, value in said.items() if key not in ("transformers_version", "_from_model_config")}


def ids_of(ids: Ids) -> list[int]:
    """The ids as a list: the value may be one id, a list or None."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
