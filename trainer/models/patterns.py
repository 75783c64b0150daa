"""Patterns of Hugging Face's names: the names that match, and a helpful error if none does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from trainer.errors import ConfigError
from trainer.words import first_few

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def matching(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """The names that match a pattern (`*`, `?`, `[0-3]`). Raises ConfigError that names `key` if none does."""
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise no_match(pattern, names, key)
    return found


def no_match(pattern: str, names: Iterable[str], key: str) -> ConfigError:
    """The error for a pattern without a match, with the most similar names."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    near = get_close_matches(re.sub(r"\.\d+\.", ".*.", pattern), kinds, n=3, cutoff=0.5)
    if fnmatchcase(HEAD, pattern) and HEAD not in kinds:
        near = [EMBEDDING + " (a tied head is the embedding)"]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {first_few(kinds, 20)}"
    return ConfigError(f"{key} has {pattern!r}, which matches nothing in this model", hint=hint)
