"""Fetches pieces of files over several connections at once, and requests again what a broken connection interrupted."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deployer.agent.host.typed import InvalidData, from_json
from deployer.agent.requests.files.view import DIGEST_BYTES, PieceEnd
from deployer.connection.call import Call
from deployer.connection.host import Host, ReconnectBackoff
from deployer.connection.link import Link
from deployer.errors import ConnectError, FerryError, HostError, LostConnection
from deployer.pull.choice import GONE
from deployer.pull.pieces import Download, Piece, Work
from deployer.pull.target import CannotWrite
from deployer.transport.ssh.attempt import nobody_to_ask

CALLS_PER_LINK = 3
"""Open requests per connection, so that there is no gap between two answers; each piece is 1 MiB."""
MANY_BYTES = 32 << 20
"""From this many missing bytes on, more connections are worth opening."""
MAX_STREAMS = 4
"""Connections, unless the user chooses a number: at 100 ms four carry three times as much as one."""
END_S = 5.0

Progress = Callable[[int, int], None]


class Transfer:
    """Fetches all pieces of some downloads. `streams`: maximum connections; None: decided by the missing bytes."""

    def __init__(
        self,
        host: Host,
        job_id: str,
        downloads: Sequence[Download],
        *,
        streams: int | None,
        progress: Progress,
        backoff: ReconnectBackoff,
    ) -> None:
        self.fetched_bytes = 0
        self._host = host
        self._job_id = job_id
        self._progress = progress
        self._backoff = backoff
        self._due = sum(download.due_bytes for download in downloads)
        many = MAX_STREAMS if self._due >= MANY_BYTES and host.ssh is not None else 1
        self._streams = streams or many
        self._work = Work(downloads)
        self._others: list[Host] = []
        self._lanes: list[threading.Thread] = []
        self._lost: FerryError = LostConnection(f"the connection to {host.name} broke")

    def run(self, link: Link) -> None:
        """Returns when every download is complete or given up. The caller opened `link`; more are opened here."""
        try:
            while not self._work.finished:
                self._start_lanes(link)
                self._widen()
                while self._alive() and not self._work.finished:
                    self._work.wait()
                if not self._work.finished:
                    link.close()
                    link = self._connect_again()
        except BaseException as error:
            self._work.fail(error)
            raise
        finally:
            self._end(link)
        if self._work.failure is not None:
            raise self._work.failure

    # --- connections --------------------------------------------------------------------------------------------------

    def _widen(self) -> None:
        while len(self._others) < self._streams - 1:
            self._others.append(self._host.another())
            threading.Thread(target=self._join_in, args=(self._others[-1],), daemon=True).start()

    def _join_in(self, host: Host) -> None:
        """Opens one more connection. If the host refuses it, the existing ones do the work."""
        try:
            with nobody_to_ask():
                link = host.connect()
            link.wait_ready()  # until then a lane would only keep pieces from those that can bring them
            if not self._work.finished:
                self._start_lanes(link)
        except FerryError:
            host.close()

    def _connect_again(self) -> Link:
        error = self._lost
        for host in self._others:
            host.close()
        self._others = []
        while True:
            self._backoff.wait(error)
            try:
                return self._host.connect()
            except (LostConnection, ConnectError) as again:
                error = again

    def _end(self, link: Link) -> None:
        if self._work.failure is not None:
            link.close()  # what still waits for an answer ends
        for host in self._others:
            host.close()
        deadline = time.monotonic() + END_S
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))

    # --- worker threads -----------------------------------------------------------------------------------------------

    def _start_lanes(self, link: Link) -> None:
        for _ in range(CALLS_PER_LINK):
            lane = threading.Thread(target=self._run_lane, args=(link,), name="pull-lane", daemon=True)
            lane.start()
            self._lanes.append(lane)  # after its start: Ctrl-C may come between the two, and who is listed is awaited

    def _alive(self) -> bool:
        return any(lane.is_alive() for lane in self._lanes)

    def _run_lane(self, link: Link) -> None:
        try:
            while batch := self._work.take():
                self._bring(link, batch)
        except LostConnection as error:
            self._lost = error
        except FerryError as error:
            self._work.fail(error)
        except Exception as error:  # whoever waits must hear of it
            self._work.fail(link.not_understood(error))
        self._work.wake()

    def _bring(self, link: Link, batch: Sequence[Piece]) -> None:
        left = deque(batch)
        try:
            pieces = [piece.to_json() for piece in batch]
            self._receive(link.call("fetch", job=self._job_id, pieces=pieces), left)
        finally:
            self._work.give_back(left)

    def _receive(self, call: Call, left: deque[Piece]) -> None:
        got, digest = 0, _new_digest()
        for name, value, data in call.events():
            if name == "ok":
                break
            if not left:
                raise HostError("the host sends more than was asked for")
            if name == "data":
                self._store(left[0], data, at=got)
                digest.update(data)
                got += len(data)
            elif name == "piece":
                self._judge(left.popleft(), value, got=got, digest=digest.hexdigest())
                got, digest = 0, _new_digest()
        if left:
            raise HostError(f"the host passes over {left[0].download.file.path}")

    def _store(self, piece: Piece, data: bytes, *, at: int) -> None:
        if at + len(data) > piece.length:
            raise HostError(f"the host sends more of {piece.download.file.path} than was asked for")
        with _written(piece.download):
            piece.download.write(piece, data, at=at)
        with self._work.lock:
            self._backoff.progressed()
            self.fetched_bytes += len(data)
            self._progress(self.fetched_bytes, max(self._due, self.fetched_bytes))

    def _judge(self, piece: Piece, value: Any, *, got: int, digest: str) -> None:
        """Handles the host's answer on a piece: it is complete, it is damaged, or its file cannot be copied."""
        try:
            answer = from_json(value, PieceEnd)
        except InvalidData as damage:
            raise HostError(f"the host's word on {piece.download.file.path} is not understood: {damage}") from None
        download = piece.download
        sound = got == piece.length and answer.digest == digest
        if answer.changed or (piece.guard and not answer.same):
            download.fail("it changes while it is copied", heals=True)
        elif answer.gone:
            download.fail(GONE, heals=True)
        elif answer.unreadable:
            download.fail(f"on the host: {answer.unreadable[:200]}")
        elif answer.hole and got == 0 and not piece.guard:
            with _written(download):
                download.write_hole(piece)
                download.verified(piece)
        elif sound or (piece.have is not None and answer.same):
            with _written(download):
                download.verified(piece)
        elif not self._work.retry(piece):
            download.fail(
                f"bytes {piece.offset} to {piece.offset + piece.length} arrive damaged, with another hash than on the "
                "host, twice: its disk or memory may be failing"
            )
        self._work.done()


@contextmanager
def _written(download: Download) -> Iterator[None]:
    """Gives up a file that cannot be written here; the others go on."""
    try:
        yield
    except (OSError, CannotWrite) as error:
        download.give_up(error)


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
