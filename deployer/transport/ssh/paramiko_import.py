"""Imports paramiko without two modules that it loads for next to nothing and that take half of its time."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_METADATA = "importlib.metadata"


def import_paramiko() -> Any:
    """The paramiko package.

    `invoke` serves only `Match exec` in paramiko's own reader of ssh_config, which we do not use for it; leaving it out
    takes the process from 220 to 130 ms. `importlib.metadata` brings a parser of mails to read paramiko's own version,
    another 12 ms. Both are hidden for the import only, so that Fabric and others can load them later.
    """
    hidden = not {"paramiko", "invoke"} & set(sys.modules)
    metadata = _Metadata(_METADATA) if hidden and _METADATA not in sys.modules else None
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    if hidden:
        modules["invoke"] = None
    if metadata is not None:
        modules[_METADATA] = metadata
    try:
        import paramiko  # also when it is there: another thread may be at it, and this waits for that one
    finally:
        if hidden:
            modules.pop("invoke", None)
        if metadata is not None and modules.get(_METADATA) is metadata:
            del modules[_METADATA]
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it logs what it also raises
    return paramiko


class _Metadata(ModuleType):
    """Stands for importlib.metadata while paramiko asks for its version; for all else it loads the real one."""

    def version(self, name: str) -> str:
        """The version in the name of the folder that an installer puts beside a package."""
        beside = Path(sys.modules[name].__path__[0]).parent.glob(f"{name}-*.dist-info") if name in sys.modules else ()
        found = [path.name.removesuffix(".dist-info").removeprefix(f"{name}-") for path in beside]
        return found[0] if len(found) == 1 else str(self.__getattr__("version")(name))

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_METADATA) is self:
            del sys.modules[_METADATA]
        return getattr(importlib.import_module(_METADATA), name)
