"""Imports paramiko without two modules that it hardly needs and that take half of its import time."""

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

    `invoke` serves only `Match exec` in paramiko's own reader of ssh_config, which we do not use for it. Without it the
    import takes 130 ms instead of 220. `importlib.metadata` loads an email parser to read paramiko's own version,
    another 12 ms. Both are hidden during this import only, so that Fabric and others can load them later.
    """
    hidden = not {"paramiko", "invoke"} & set(sys.modules)
    metadata = _Metadata(_METADATA) if hidden and _METADATA not in sys.modules else None
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    if hidden:
        modules["invoke"] = None
    if metadata is not None:
        modules[_METADATA] = metadata
    try:
        import paramiko  # even if it is loaded: another thread may be importing it, and this waits for that thread
    finally:
        if hidden:
            modules.pop("invoke", None)
        if metadata is not None and modules.get(_METADATA) is metadata:
            del modules[_METADATA]
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it logs the errors that it also raises
    return paramiko


class _Metadata(ModuleType):
    """Replaces importlib.metadata while paramiko asks for its version; loads the real module for anything else."""

    def version(self, name: str) -> str:
        """The version, read from the name of the folder that an installer puts beside a package."""
        beside = Path(sys.modules[name].__path__[0]).parent.glob(f"{name}-*.dist-info") if name in sys.modules else ()
        found = [path.name.removesuffix(".dist-info").removeprefix(f"{name}-") for path in beside]
        return found[0] if len(found) == 1 else str(self.__getattr__("version")(name))

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_METADATA) is self:
            del sys.modules[_METADATA]
        return getattr(importlib.import_module(_METADATA), name)
