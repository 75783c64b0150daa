"""Paths for control sockets: short enough for a socket address, in a folder that no other user can access."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from deployer.errors import ConnectError

MAX_ADDRESS = 104
"""Bytes of a Unix socket's address on the strictest system."""
BIND_SUFFIX = 17
"""Bytes that ssh appends to the name while it binds."""


def control_path() -> str:
    """A path for a new control socket, in a private folder (0700). Raises ConnectError if no folder is suitable."""
    name = f"tf-{secrets.token_hex(6)}"
    refusals = []
    for folder in _folders():
        path = folder / name
        if len(os.fsencode(path)) + BIND_SUFFIX >= MAX_ADDRESS or not re.fullmatch(r"[\w./@+-]+", str(path)):
            refusals.append(f"{folder}: too long, or with signs that ssh would read as its own")
            continue
        try:
            _make_private(folder)
            return str(path)
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror or error}")
    raise ConnectError(
        "there is no place for ssh's control socket",
        where=refusals,
        hint="set XDG_RUNTIME_DIR to a short folder of yours, or use --transport fabric",
    )


def _folders() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path(f"/tmp/torchferry-{os.getuid()}")
    return [Path(runtime) / "torchferry", shared] if runtime else [shared]


def _make_private(folder: Path) -> None:
    """Raises OSError if the folder cannot be made, is a link, belongs to another user or is open to others."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(0, "not a folder of yours alone (mode 0700)")
