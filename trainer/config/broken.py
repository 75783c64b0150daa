"""A rule of a config that does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.keys import Places
from trainer.errors import COMMAND_LINE


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold: the key to look at first, what is wrong, what to do, the other keys in it."""

    key: str
    message: str
    hint: str = ""
    others: tuple[str, ...] = ()

    def place(self, places: Places) -> str:
        """Where the first of the keys stands, or the command line if it gave one of them: it came last."""
        found = [places.of(key) for key in (self.key, *self.others)]
        return COMMAND_LINE if COMMAND_LINE in found else found[0]
