"""What each host last said about its jobs, kept on this client for the time when a host cannot be reached."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deployer.paths import state_dir, write_whole

Row = dict[str, Any]
"""One job as `ps` lists it, with `seen_at`, a time of this client."""


def stamp() -> str:
    """Now, as rows have it in `seen_at`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def remember(ssh: str | None, root: str, rows: list[Row], *, asked_at: float | None = None) -> None:
    """Keeps a host's answer, whole or not at all. A disk that takes no note must not end a look at jobs.

    asked_at: when the host was asked for all its jobs, in seconds since 1970 on this client.
    """
    answer = {"ssh": ssh, "root": root, "asked_at": asked_at, "jobs": rows}
    with suppress(OSError):
        write_whole(_path(ssh, root), json.dumps(answer).encode("ascii"))


def note(ssh: str | None, root: str, row: Row) -> None:
    """Keeps what is known of one job now; of what is known already only these keys are replaced."""
    rows = recall(ssh, root)
    before = next((known for known in rows if known["id"] == row["id"]), None)
    others = [known for known in rows if known is not before]
    remember(ssh, root, [*others, {**(before or {}), **row, "seen_at": stamp()}], asked_at=asked_at(ssh, root))


def recall(ssh: str | None, root: str) -> list[Row]:
    """What the host said last; nothing when it was never seen or the note is torn."""
    try:
        data = json.loads(_path(ssh, root).read_text())
        return [row for row in data["jobs"] if {"id", "state", "where", "seen_at"} <= row.keys()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def asked_at(ssh: str | None, root: str) -> float | None:
    """When the host told of all its jobs last; None when it never did."""
    try:
        return float(json.loads(_path(ssh, root).read_text())["asked_at"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _path(ssh: str | None, root: str) -> Path:
    name = hashlib.blake2b(repr((ssh, root)).encode(), digest_size=16).hexdigest()
    return state_dir() / "hosts" / f"{name}.json"
