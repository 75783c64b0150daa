"""This client's folders: installation, state and settings. Files there are written atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from deployer.errors import UsageError

CLIENT_ROOT = Path(__file__).resolve().parent.parent
"""Contains `deployer/`, `trainer/` and `train.py`: a checkout, or the site-packages of an installed client."""


def state_dir() -> Path:
    """The folder of this client's state, 0700; TORCHFERRY_STATE_DIR overrides it."""
    chosen = os.environ.get("TORCHFERRY_STATE_DIR")
    if chosen:
        path = Path(chosen)
    else:
        from platformdirs import user_state_path

        try:
            path = user_state_path("torchferry", appauthor=False)
        except RuntimeError:  # newer releases of platformdirs raise; older ones return `~`
            path = Path("~")
        if not path.is_absolute():  # a relative path depends on the current folder
            raise UsageError(
                "this account has no home folder, so there is no place for this client's state",
                hint="TORCHFERRY_STATE_DIR names one",
            )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"this client's state folder {path} cannot be made: {reason}", hint="TORCHFERRY_STATE_DIR names another"
        ) from None
    # these files decide where jobs are sent; under sudo, root may use the caller's folder
    is_ours = found.st_uid in (0, os.getuid()) or os.getuid() == 0
    if not is_ours or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"this client's state folder {path} could be another user's work (uid {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):o})",
            hint=f"chmod 700 {path} if it is yours and nobody else wrote there; TORCHFERRY_STATE_DIR names another",
        )
    return path


def config_dir() -> Path:
    """The folder of this user's settings, which may not exist; TORCHFERRY_CONFIG_DIR overrides it."""
    chosen = os.environ.get("TORCHFERRY_CONFIG_DIR")
    if chosen:
        return Path(chosen)
    from platformdirs import user_config_path

    try:
        return user_config_path("torchferry", appauthor=False)
    except RuntimeError:  # an account without a home has no settings
        return Path("/nonexistent")


def expanded(path: str) -> Path:
    """The path with `~` and `~user` replaced by their home folders, if those are known."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file (0600) completely or not at all, and makes its folder (0700) if it is missing. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
