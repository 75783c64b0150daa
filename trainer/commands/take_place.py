"""Applies what trainer.start.place decides to this process's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.commands.help import as_called
from trainer.config.target import ANY_WORLD, World
from trainer.errors import UserError
from trainer.nodes import are_several
from trainer.start.place import Node, Place, Rank, changes, read_place


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


def world_of(place: Place, environ: Mapping[str, str]) -> World | None:
    """The ranks and nodes of the run; None if they are those that the config names. The other nodes of a start by hand
    may have other ranks: the ranks themselves check what depends on their number."""
    if isinstance(place, Node):
        return ANY_WORLD
    if not isinstance(place, Rank) or not are_several(environ):
        return None
    ranks, here = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    nodes = environ.get("GROUP_WORLD_SIZE", "")
    return World(ranks, int(nodes) if nodes.isdigit() else -(-ranks // here))
