"""Copies a job's files in rounds of list, choose and fetch, until all are here and verified."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deployer.agent.host.typed import to_json
from deployer.agent.requests.files.view import FilesRequest, UnpulledFiles
from deployer.connection.host import Host, ReconnectBackoff, Tell
from deployer.connection.link import Link
from deployer.errors import ConnectError, FerryError, LostConnection
from deployer.pull.choice import LeftOut, PullRequest, choose
from deployer.pull.listing import Listing, read_listing
from deployer.pull.pieces import Download, RemoteFile, place_of
from deployer.pull.target import HEADROOM_BYTES, CannotWrite, PullTarget
from deployer.pull.transfer import Progress, Transfer
from deployer.terminal import size

ROUNDS = 3
"""How many times in all a file that changes while it is copied is listed and fetched."""

NOTED_BYTES = 32 << 10
"""Maximum bytes of the names that are reported to the host as copied: they fit into one frame."""


@dataclass(frozen=True)
class Pulled:
    files: int
    """Files that are here now, including those of earlier pulls."""
    size_bytes: int
    fetched_files: int
    fetched_bytes: int
    seconds: float
    left_out: tuple[LeftOut, ...]
    unpulled: UnpulledFiles | None = None
    """The other files that the job has written; None if they were not requested."""

    @property
    def not_home(self) -> tuple[LeftOut, ...]:
        """Requested files that did not arrive."""
        return tuple(left for left in self.left_out if left.wanted)


def pull(
    host: Host,
    job_id: str,
    *,
    target: Path,
    request: PullRequest | None = None,
    progress: Progress = lambda done, total: None,
    tell: Tell = lambda text: None,
    is_kept: bool = True,
) -> Pulled:
    """Copies a job's results into `target`; each file, and each checkpoint, is there whole and verified or not at all.

    Unchanged files are kept, of files that only grew the new bytes are fetched, and an interrupted pull continues where
    it stopped. It reconnects if a connection breaks, and raises LostConnection if that is not possible any more. A file
    that cannot be read on the host or written here is left out; the others are copied, small ones first. Raises
    CannotWrite if nothing can be written. If the files stay on this client (`is_kept`), the host records which ones
    were copied.
    """
    with PullTarget(target) as pull_target:
        return _Pull(
            host, job_id, pull_target, request or PullRequest(), progress=progress, tell=tell, is_kept=is_kept
        ).run()


class _Pull:
    """One pull: rounds that list the host's files and fetch the missing ones."""

    def __init__(
        self,
        host: Host,
        job_id: str,
        pull_target: PullTarget,
        request: PullRequest,
        *,
        progress: Progress,
        tell: Tell,
        is_kept: bool,
    ) -> None:
        self._host = host
        self._job_id = job_id
        self._target = pull_target
        self._request = request
        self._progress = progress
        self._backoff = ReconnectBackoff(tell)
        self._is_kept = is_kept
        self._connected = False
        self._failures: dict[str, str] = {}  # unit, or single file -> why it could not be had
        self._given_up: set[str] = set()  # those of them that are not tried again
        self._anew: set[str] = set()  # files that are not what they were: no top-up
        self._fetched_files = self._fetched_bytes = 0

    def run(self) -> Pulled:
        begun = time.monotonic()
        for _ in range(ROUNDS):
            link, listing = self._list()
            try:
                folds_case = self._target.folds_case()
                kept, left_out = choose(listing.files, self._request, outputs=listing.outputs, folds_case=folds_case)
                failed = self._fetch(link, [file for file in kept if _whole(file) not in self._given_up])
                if self._fetched_files and self._is_kept:
                    self._note(link, [file for file in kept if _whole(file) not in failed | self._given_up])
            finally:
                link.close()
            if failed <= self._given_up:
                break
        self._target.clear()
        lacking = failed | self._given_up
        here = [file for file in kept if _whole(file) not in lacking]
        seconds = time.monotonic() - begun
        left_out += listing.left_out + self._not_had(listing.files, lacking, kept=kept)
        size = sum(file.size for file in here)
        return Pulled(
            len(here), size, self._fetched_files, self._fetched_bytes, seconds, tuple(left_out), listing.unpulled
        )

    def _note(self, link: Link, here: Sequence[RemoteFile]) -> None:
        """Reports to the host which files are on the client, for gc. Does not wait for the answer."""
        paths, room = [], NOTED_BYTES
        for path in dict.fromkeys(file.unit or file.path for file in here):
            room -= len(json.dumps(path)) + 1
            if room > 0:
                paths.append(path)
        with suppress(FerryError):
            link.call("fetched", job=self._job_id, paths=paths)

    def _list(self) -> tuple[Link, Listing]:
        """An open link and the host's list; reconnects if needed."""
        request = self._request
        outputs, stays = not request.paths, request.list_unpulled
        asked = FilesRequest(self._job_id, request.parts, request.paths, outputs=outputs, stays=stays)
        while True:
            try:
                link = self._host.connect(request={"op": "files", **to_json(asked)})
                self._connected = True
                return link, read_listing(link.first, request)
            except (LostConnection, ConnectError) as error:
                if not self._connected:
                    raise
                self._backoff.wait(error)

    def _fetch(self, link: Link, kept: Sequence[RemoteFile]) -> set[str]:
        """Fetches the missing files. Returns the names of those that could not be copied as listed."""
        wholes: dict[str, list[RemoteFile]] = defaultdict(list)
        for file in kept:
            wholes[_whole(file)].append(file)
        missing = {name: files for name, files in wholes.items() if not all(map(self._is_here, files))}
        downloads = {name: [d for d in map(self._download, files) if d is not None] for name, files in missing.items()}
        due = self._that_fit(downloads)
        if due:
            self._transfer(link, due)
        every = [download for group in downloads.values() for download in group]
        failures = {_whole(d.file): d.failure for d in every if d.failure}
        for name, files in missing.items():
            if name.startswith("checkpoints/"):
                self._settle_checkpoint(name, files, failures)
        self._failures.update(failures)
        healing = {_whole(d.file) for d in every if d.heals}
        self._given_up.update(failures.keys() - healing)
        self._anew.update(d.file.path for d in every if d.failure)
        self._fetched_files += sum(not d.failure for d in due)
        return set(failures)

    def _is_here(self, file: RemoteFile) -> bool:
        return self._target.has(file.path, size=file.size, mtime_ns=file.mtime_ns)

    def _download(self, file: RemoteFile) -> Download | None:
        """The download of one file; None if it is complete, here or with the rest of its checkpoint."""
        if self._target.has(place_of(file), size=file.size, mtime_ns=file.mtime_ns):
            return None
        there = self._target.find(file.path) if file.grows and file.path not in self._anew else None
        start = there.st_size if there is not None and there.st_size <= file.size else 0
        return Download(file, self._target, job_id=self._job_id, start=start)

    def _that_fit(self, downloads: Mapping[str, Sequence[Download]]) -> list[Download]:
        """The downloads for which this disk has room, small ones first; the others are given up."""
        free = max(0, self._target.free_bytes() - HEADROOM_BYTES)
        room = free
        fitting: list[Download] = []
        for group in sorted(downloads.values(), key=_due):
            if _due(group) <= room:
                room -= _due(group)
                fitting += group
            else:
                words = f"no room here: {size(_due(group))} are due, {size(free)} are free"
                for download in group:
                    download.fail(words)
        return fitting

    def _transfer(self, link: Link, downloads: Sequence[Download]) -> None:
        transfer = Transfer(
            self._host,
            self._job_id,
            downloads,
            streams=self._request.streams,
            progress=self._progress,
            backoff=self._backoff,
        )
        try:
            transfer.run(link)
        finally:
            self._fetched_bytes += transfer.fetched_bytes

    def _settle_checkpoint(self, name: str, files: Sequence[RemoteFile], failures: dict[str, str]) -> None:
        try:
            if name in failures:
                self._target.drop_folder(name)
            else:
                self._target.publish_folder(name, [file.path[len(name) + 1 :] for file in files])
        except (OSError, CannotWrite) as error:
            failures.setdefault(name, self._target.why_not(error, name))

    def _not_had(self, listed: Sequence[RemoteFile], lacking: set[str], *, kept: Sequence[RemoteFile]) -> list[LeftOut]:
        """What could not be copied in the last round, and what was removed on the host before it."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for file in listed:
            sizes[_whole(file)].append(file.size)
        gone = set(self._failures) - {_whole(file) for file in kept}
        names = sorted(lacking | gone)
        return [LeftOut(name, len(sizes[name]), sum(sizes[name]), self._failures[name]) for name in names]


def _due(downloads: Sequence[Download]) -> int:
    return sum(download.due_bytes for download in downloads)


def _whole(file: RemoteFile) -> str:
    """The unit of a file: its checkpoint, or the file itself."""
    return file.unit if file.unit.startswith("checkpoints/") else file.path
