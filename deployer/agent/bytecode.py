"""Bytecode of the agent that was cut, by a full disk or a lost power: Python takes it for whole, and fails to read it.

Whoever starts a Python with the agent runs this file's text first; so it imports nothing of this package.
"""

import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from typing import Any


class Mending(SourceFileLoader):
    """Compiles a module anew whose bytecode cannot be read."""

    def get_code(self, fullname: str) -> Any:
        try:
            return super().get_code(fullname)
        except (EOFError, ValueError, TypeError):
            from importlib.util import cache_from_source

            os.unlink(cache_from_source(self.get_filename(fullname)))
            return super().get_code(fullname)


def enter(home: str) -> None:
    """Makes the agent in a folder importable."""

    def find_in(path: str) -> FileFinder:
        if not (path + "/").startswith(home + "/"):
            raise ImportError  # not ours
        return FileFinder(path, (Mending, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, find_in)
    sys.path.insert(0, home)
