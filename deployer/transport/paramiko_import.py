"""Imports paramiko without `invoke`, which it loads for one rare option of ssh_config and which doubles its time."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any


def import_paramiko() -> Any:
    """The paramiko package.

    `invoke` serves only `Match exec` in paramiko's own reader of ssh_config, which we do not use for it; leaving it out
    takes the process from 220 to 130 ms. It is hidden for the import only, so that Fabric can load it later.
    """
    hidden = not {"paramiko", "invoke"} & set(sys.modules)
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    if hidden:
        modules["invoke"] = None
    try:
        import paramiko  # also when it is there: another thread may be at it, and this waits for that one
    finally:
        if hidden:
            modules.pop("invoke", None)
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it logs what it also raises
    return paramiko
