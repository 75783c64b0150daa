"""`top`: shows one job live on a full screen, with keys to change to another job, stop the job and pull its results."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deployer import terminal
from deployer.agent.host.typed import InvalidData, from_json, load_json, to_json
from deployer.agent.job.status import FINAL
from deployer.agent.job.stop import DEFAULT_GRACE_S
from deployer.commands.options import PULL_MAX
from deployer.commands.rows import row_as_json
from deployer.commands.screen import ending_in_order
from deployer.commands.top.glancing import Glancer
from deployer.commands.top.layout import STALE_S, View, lines_of
from deployer.commands.values import parse_size
from deployer.connection.host import Host
from deployer.errors import FerryError, UsageError
from deployer.fullscreen import DOWN, ENDED, UP, full_screen
from deployer.jobs.registry import SeenJob, stamp
from deployer.jobs.requests import stop_jobs
from deployer.printable import shown
from deployer.pull.choice import PullRequest
from deployer.pull.rounds import pull
from deployer.pull.target import CannotWrite

KEY_S = 0.1
"""Seconds until new values are drawn; a key has an effect at once."""


class Entry(NamedTuple):
    """A job that can be shown."""

    host: Host
    job_id: str
    results: str | None = None
    """The folder for its results; None: results/ID."""


def snapshot(entry: Entry) -> None:
    """Prints the current state once, for --json."""
    glancer = Glancer(entry.host, entry.job_id)
    glancer.look(whole=True)
    glancer.close()
    assert glancer.row is not None
    told = {
        "job": row_as_json(SeenJob(glancer.row, entry.host.name, stamp())),
        "gpus": to_json(glancer.gpus),
        "no_gpus": glancer.no_gpus or None,
        "metrics": _record(glancer.latest),
    }
    terminal.say_json(told)


def _record(line: str | None) -> Any:
    try:
        return from_json(load_json((line or "").encode("utf-8", "surrogatepass")), dict[str, Any])
    except InvalidData:
        return None


def top(entries: Sequence[Entry]) -> None:
    """Shows the first of these jobs until the user quits."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError(
            "top draws on a terminal, and here is none that it can draw on",
            hint="for a script: deploy.py ps --json, or deploy.py top --json",
        )
    shown_jobs = _Top(entries)
    shown_jobs.glancer.look()  # questions of the login and errors come before the screen
    try:
        with ending_in_order(), full_screen() as screen:
            drawn: object = None
            while True:
                shown_jobs.glancer.keep_looking()
                size, state = screen.size, shown_jobs.state
                if (size, state) != drawn:
                    screen.draw(lines_of(shown_jobs.view, *size))
                    drawn = size, state
                if not shown_jobs.take(screen.key(KEY_S)):
                    break
    except KeyboardInterrupt:
        pass
    finally:
        shown_jobs.close()
    for line in shown_jobs.left_words:
        terminal.notice(shown(line))


class _Top:
    """The jobs, the one on the screen, and the commands that keys have started."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._glancers = [Glancer(entry.host, entry.job_id) for entry in entries]
        self._chosen = 0
        self._asks = False
        self._word = ""
        self._at_work: dict[str, threading.Thread] = {}

    @property
    def glancer(self) -> Glancer:
        return self._glancers[self._chosen]

    @property
    def state(self) -> object:
        """A value that changes if the screen must be drawn again: also each second while it shows the age of values."""
        glancer = self.glancer
        age_s = int(glancer.silent_s) if glancer.trouble or glancer.silent_s > STALE_S else 0
        return self._chosen, glancer.news, self._asks, self._word, age_s

    @property
    def view(self) -> View:
        glancer = self.glancer
        question = f"stop {glancer.job_id}? y/n"
        return View(
            glancer.job_id,
            glancer.host.name,
            glancer.row,
            glancer.gpus,
            glancer.no_gpus,
            glancer.metrics,
            glancer.log,
            glancer.trouble,
            glancer.silent_s,
            self._chosen + 1,
            len(self._glancers),
            question if self._asks else self._word,
            self._asks,
        )

    @property
    def left_words(self) -> list[str]:
        """Lines about stops that continue and pulls that are interrupted when the user quits."""
        goes_on = {"stop": "the host goes on stopping {}", "pull": "what has come is kept; go on with: {me} pull {}"}
        return [
            goes_on[what].format(job_id, me=terminal.invoked_as())
            for name, thread in self._at_work.items()
            if thread.is_alive()
            for what, _, job_id in [name.partition(" ")]
        ]

    def take(self, key: str) -> bool:
        """Performs the action of a key; false if it quits."""
        if not key:
            return True
        asked, self._asks, self._word = self._asks, False, ""
        if asked:
            if key == "y":
                self._begin("stop", self._stop)
        elif key in ("q", ENDED):
            return False
        elif key in (UP, DOWN, "k", "j"):
            self._chosen = (self._chosen + (1 if key in (DOWN, "j") else -1)) % len(self._glancers)
        elif key == "s":
            row = self.glancer.row
            self._asks = row is None or row.state not in FINAL
            self._word = "" if self._asks else "it has ended"
        elif key == "f":
            self._begin("pull", self._fetch)
        return True

    def close(self) -> None:
        for glancer in self._glancers:
            glancer.close()

    def _begin(self, what: str, work: Callable[[Entry, str], str]) -> None:
        entry, job_id = self._entries[self._chosen], self.glancer.job_id
        name = f"{what} {job_id}"
        if name in self._at_work and self._at_work[name].is_alive():
            self._word = "that is under way"
            return

        def run() -> None:
            try:
                self._word = work(entry, job_id)
            except FerryError as error:
                self._word = f"{what}: {error.message}"

        self._word = f"{what} {job_id} …"
        self._at_work[name] = threading.Thread(target=run, name=name, daemon=True)
        self._at_work[name].start()

    def _stop(self, entry: Entry, job_id: str) -> str:
        def tell(job_id: str, phase: str | None) -> None:
            self._word = f"stopping {job_id}: {phase or f'up to {DEFAULT_GRACE_S:g} s to save'}"

        places = [(entry.host.another(), job_id)]
        (end,) = stop_jobs(places, grace_s=DEFAULT_GRACE_S, force=False, on_state=lambda i, now: tell(i, now.phase))
        if isinstance(end, FerryError):
            raise end
        left = len(end.status.remaining)
        return f"{job_id} {end.status.state}" + (f"; {terminal.counted(left, 'process')} remain" if left else "")

    def _fetch(self, entry: Entry, job_id: str) -> str:
        target = Path(entry.results) if entry.results else Path("results") / job_id

        def tell(done: int, total: int) -> None:
            self._word = f"pulling: {terminal.size(done)} of {terminal.size(total)}"

        try:
            request = PullRequest(max_bytes=parse_size(PULL_MAX) or None)
            pulled = pull(entry.host.another(), job_id, target=target, request=request, progress=tell)
        except CannotWrite as error:
            return f"pull: {error.message}"
        lacks = f"; not pulled: {terminal.counted(len(pulled.not_home), 'thing')}" if pulled.not_home else ""
        return f"{target}: {terminal.counted(pulled.files, 'file')}, {terminal.size(pulled.size_bytes)}{lacks}"
