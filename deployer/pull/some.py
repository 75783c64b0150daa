"""Copies a few files of a job, by name, into a folder that is not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deployer.connection.host import Host
from deployer.printable import Shown
from deployer.pull.choice import ABSENT, PullRequest
from deployer.pull.rounds import pull


def bring_some(
    host: Host, job_id: str, paths: Sequence[str], folder: Path, *, most: int, tell: Callable[[Shown], None]
) -> dict[str, str]:
    """Copies the files at or below these paths, if they exist and within `most` bytes together, into `folder` as `pull`
    would. Returns why each of the others is not there."""
    request = PullRequest(paths=tuple(paths), max_bytes=most, streams=1)
    pulled = pull(host, job_id, target=folder, request=request, tell=tell, is_kept=False)
    return {left.name: left.reason for left in pulled.left_out if left.reason != ABSENT}
