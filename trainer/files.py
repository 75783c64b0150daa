"""Files that are whole or as before, whenever the process ends; and whether there is room for them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainer.words import render_bytes


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ or ~USER replaced; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError


def replace_text(path: Path, text: str) -> None:
    """Write a file aside and give it its name in one step."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """As `replace_text`."""
    aside = path.with_name(f".tmp_{path.name}")
    aside.write_bytes(content)
    aside.replace(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk. Raises OSError on file systems that cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lack_of_room(folder: Path, needed: int) -> str | None:
    """`it needs 2.00 GiB and 1.25 GiB are free` where a disk cannot take so many bytes; else None."""
    free = shutil.disk_usage(folder).free
    return None if free >= needed else f"it needs {render_bytes(needed)} and {render_bytes(free)} are free"
