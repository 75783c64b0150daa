"""What a key of the config is besides its type and its default: which numbers it takes, and its names elsewhere.

It stands beside the field, and who needs it asks the field: the rules, the errors, docs/config.md, the deployer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import Field, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
FACTS = "facts"
"""Where a field's metadata holds them."""


class Limit(NamedTuple):
    """Which values a key takes, numbers as a rule; `words` completes `KEY is VALUE, must be …`."""

    words: str
    holds: Callable[[Any], bool]

    def broken_by(self, value: Any) -> list[Any]:
        """Those of a key's values that it does not take."""
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [one for one in values if not self.holds(one)]


AT_LEAST_0 = Limit("0 or more", lambda v: v >= 0)
AT_LEAST_1 = Limit("1 or more", lambda v: v >= 1)
AT_LEAST_2 = Limit("2 or more", lambda v: v >= 2)
ABOVE_0 = Limit("more than 0", lambda v: v > 0)
SAMPLE_TOKENS = Limit("1 to 1024", lambda v: 1 <= v <= 1024)
SHARE = Limit("0 or more and less than 1", lambda v: 0 <= v < 1)
SEED = Limit("0 to 4294967295", lambda v: 0 <= v < 2**32)
EVEN = Limit("an even number of 2 or more (rotary embeddings turn pairs)", lambda v: v >= 2 and v % 2 == 0)


def _is_below(path: str) -> bool:
    parts = path.split("/")
    return not any(part in ("", ".", "..") for part in parts) and path.isprintable() and len(path) <= 4000


def _may_be_an_id(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]{1,80}", text) is not None


JOB = Limit("the id of a job, or how one begins or ends", _may_be_an_id)
BELOW = Limit("a path below the project, without `..`", _is_below)


class Facts(NamedTuple):
    """What is said of one key beside its field."""

    limit: Limit | None = None
    """Of a value, and of each value of a list."""
    aliases: tuple[str, ...] = ()
    """What people write in its place who come from transformers, TRL or torchrun; an error then names the key."""
    elsewhere: tuple[str, ...] = ()
    """Other tools' names that nobody writes as a key: docs/config.md alone says them."""
    supervised: bool = False
    """The deployer and its supervisor do it: a `train.py` started by hand has neither."""


NONE = Facts()


def key(
    default: T,
    *,
    limit: Limit | None = None,
    aliases: tuple[str, ...] = (),
    elsewhere: tuple[str, ...] = (),
    supervised: bool = False,
) -> T:
    """A field of the schema with what else is to be said of its key. A list or mapping is copied for each config."""
    metadata = {FACTS: Facts(limit, aliases, elsewhere, supervised)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def facts_of(of: Field[Any]) -> Facts:
    """The facts that `key` declared for a field."""
    facts: Facts = of.metadata.get(FACTS, NONE)
    return facts
