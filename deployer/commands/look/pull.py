"""`pull`, and the results that a followed run brings home."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deployer import terminal
from deployer.agent.job.status import FINAL
from deployer.connection.host import Host, Patience
from deployer.errors import ConnectError, LostConnection
from deployer.jobs.requests import read_status
from deployer.printable import shown
from deployer.pull.choice import BEYOND_LIMIT, LeftOut, Wish
from deployer.pull.rounds import Pulled, pull


def pull_job(host: Host, job_id: str, *, target: Path | None, wish: Wish, every_s: float | None, as_json: bool) -> None:
    """Brings results home, to results/ID unless a target is given; with `every_s` until the job has ended."""
    if target is None:  # the id may be the beginning of one
        job_id = read_status(host, job_id).job_id
        target = Path("results") / job_id
    try:
        if every_s is not None:
            pulled = _watch(host, job_id, target, wish, every_s=every_s)
        else:
            pulled = _pull(host, job_id, target, wish)
    except (KeyboardInterrupt, LostConnection):
        terminal.notice(shown(""), shown(f"what has come is kept; go on with: {terminal.invoked_as()} pull {job_id}"))
        raise
    if as_json:
        terminal.say_json({"id": job_id, "target": str(target), **asdict(pulled)})
    else:
        _tell(pulled, job_id, target)


def bring_home(host: Host, job_id: str, *, target: Path, wish: Wish) -> None:
    """One pull, and words on what came and what stayed."""
    _tell(_pull(host, job_id, target, wish), job_id, target)


def _pull(host: Host, job_id: str, target: Path, wish: Wish) -> Pulled:
    with terminal.progress(shown("pulled")) as update:
        return pull(host, job_id, target=target, wish=wish, progress=update, tell=terminal.notice)


def _watch(host: Host, job_id: str, target: Path, wish: Wish, *, every_s: float) -> Pulled:
    """Pulls until the job has ended, and once more then."""
    patience = Patience(terminal.notice)
    pulled: Pulled | None = None
    while True:
        try:
            ended = read_status(host, job_id).status.state in FINAL  # asked first: what it wrote last must come too
            pulled = _pull(host, job_id, target, wish)
            if ended:
                return pulled
        except (LostConnection, ConnectError) as error:
            if pulled is None:
                raise
            patience.wait(error)
        else:
            patience.progressed()
            time.sleep(every_s)


def _tell(pulled: Pulled, job_id: str, target: Path) -> None:
    terminal.notice(
        shown(f"results: {target} ({terminal.counted(pulled.files, 'file')}, {terminal.size(pulled.size_bytes)})")
    )
    beyond = [left for left in pulled.left_out if left.reason == BEYOND_LIMIT]
    for left in pulled.left_out:
        if left not in beyond:
            terminal.notice(shown(f"left out: {left.name}: {left.reason}"))
    if beyond:
        _tell_beyond(beyond, pulled, job_id)


def _tell_beyond(beyond: Sequence[LeftOut], pulled: Pulled, job_id: str) -> None:
    total = sum(left.size_bytes for left in beyond)
    names = ", ".join(left.name for left in beyond[:4]) + (" …" if len(beyond) > 4 else "")
    files = terminal.counted(sum(left.files for left in beyond), "file")
    terminal.notice(
        shown(
            f"left on the host: {names}, {files}, {terminal.size(total)}; bring them home "
            f"with: {terminal.invoked_as()} pull {job_id} --pull-max {(pulled.size_bytes + total) / 1e9 + 1:.0f}GB"
        )
    )
