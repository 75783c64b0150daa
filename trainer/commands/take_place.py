"""Applies what trainer.start.place decides to this process's environment."""

from __future__ import annotations

import os

from trainer.commands.help import as_called
from trainer.errors import UserError
from trainer.start.place import Place, changes, read_place


def take_place(program: str) -> Place:
    """Decide from the environment what this process is, and make the environment say so: RANK is then set exactly in a
    rank. Raises UserError."""
    try:
        place = read_place(os.environ)
    except UserError as error:
        raise UserError(error.message, hint=as_called(error.hint, program.rpartition(" ")[0])) from None
    for name, value in changes(place).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return place
