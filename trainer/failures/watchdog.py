"""A thread in every rank that ends the run, with one message, if a rank hangs, exits early, fails or stops responding.

The ranks post their progress to torch's store, over a separate connection of this thread, so that it works while the
main thread hangs in a collective. Every rank judges separately; the first verdict in the store is valid for all.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as torch_dist

from trainer.console import write_error
from trainer.dist import Dist, control_timeout_s
from trainer.failures import diagnose
from trainer.failures.heartbeat import SILENT_S, Heartbeat, Observer, Verdict, judge
from trainer.nodes import Nodes
from trainer.progress import Progress

HANG_DIR = "hang"
"""In the run folder: each rank's stacks at the time of the verdict."""
STORE_TIMEOUT = timedelta(seconds=10)
TELL_S, DUMP_S = 5.0, 3.0
"""Seconds that a rank waits for the message to be printed, and for the other ranks' stacks."""
FAILED_PEER_S = 5.0
"""Seconds that a rank continues after another one failed, so that its own exception can come first."""
READ_S = 2.0
"""Seconds that a failed rank of several nodes stays, so that the others can read why."""
HINTS = {
    "late": "its stack is in {stacks}; a longer train.hang_timeout_s if it was only slow",
    "gone": "a call of exit in its code, or a signal: -9 is mostly the system's out-of-memory killer (dmesg tells)",
    "silent": "look at that node; then start again: the run resumes from its newest checkpoint",
}


@dataclass(frozen=True)
class Peers:
    """The ranks that a watchdog watches, and its timeouts."""

    rank: int
    world_size: int
    run_dir: Path
    timeout_s: float
    slow_timeout_s: float
    period_s: float
    nodes: Nodes | None = None
    """None if there is one."""

    @property
    def host(self) -> str:
        """This rank's node, for messages."""
        return socket.gethostname() if self.nodes is None else self.nodes.name_of(self.rank)

    @property
    def machine(self) -> str:
        """Equal for two ranks that see each other's processes. Two nodes may be one machine, in a test."""
        return machine_id() if self.nodes is None else f"{machine_id()} {self.nodes.of_rank[self.rank]}"


@contextmanager
def watching(dist: Dist, run_dir: Path, *, timeout_s: float) -> Iterator[Watchdog | None]:
    """Watch this rank and its peers until the block ends; does nothing if `timeout_s` is 0."""
    if timeout_s <= 0:
        yield None
        return
    # torch's stub lacks `clone`
    store = torch_dist.HashStore() if dist.store is None else dist.store.clone()  # type: ignore[attr-defined]
    peers = Peers(
        dist.rank, dist.world_size, run_dir, timeout_s, control_timeout_s(), min(1.0, timeout_s / 4), dist.nodes
    )
    watchdog = Watchdog(store, peers, dist.progress)
    watchdog.start()
    try:
        yield watchdog
        dist.progress.enter("done")
    finally:
        watchdog.stop()


class Watchdog:
    """A thread that posts heartbeats, reads those of the others, and judges; see `start` and `stop`."""

    def __init__(self, store: torch_dist.Store, peers: Peers, progress: Progress) -> None:
        store.set_timeout(STORE_TIMEOUT)
        self._store = torch_dist.PrefixStore("watchdog", store)
        self._peers = peers
        self._progress = progress
        self._main = threading.main_thread().ident
        self._serial = 0
        self._verdict: Verdict | None = None
        self._judged, self._over = threading.Event(), threading.Event()
        self._failed_at: float | None = None
        self._failure = ""
        self._rounds = 0
        self._lost = False
        self._host, machine = peers.host, peers.machine
        self._machine = machine
        self._observer = Observer(peers.world_size, ended=lambda beat: process_ended(beat, machine))
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._post()
        self._thread.start()
        if self._peers.nodes is not None:
            threading.Thread(target=self._guard, name="store guard", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, and post this rank's last heartbeat for the others."""
        self._over.set()
        self._thread.join(STORE_TIMEOUT.total_seconds())
        with suppress(RuntimeError):  # the other ranks, and the store with them, may be gone by now
            self._post()

    def tell_failure(self, message: str) -> None:
        """Post to the other ranks that this one fails, and why; they end too."""
        with suppress(RuntimeError):
            self._store.set("failed", f"{self._peers.rank}\n{message}")
            if self._peers.nodes is not None:  # torchrun ends with this rank, and the store may end with it
                time.sleep(READ_S)

    def await_verdict(self, seconds: float) -> Verdict | None:
        """Wait for the verdict that explains a broken connection; None if there is none within `seconds`."""
        self._lost = self._peers.nodes is not None
        self._judged.wait(seconds)
        return self._verdict

    def hears_store(self, seconds: float) -> bool:
        """Whether the store answers within `seconds`."""
        seen, deadline = self._rounds, time.monotonic() + seconds
        while self._rounds == seen and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._rounds != seen

    def _watch(self) -> None:
        last = answered = time.monotonic()
        while not self._over.wait(self._peers.period_s):
            now = time.monotonic()
            if now - last > 5 + self._peers.period_s:  # this process was stopped or starved: silence may be its own
                self._observer.extend_deadlines(now - last)
                answered += now - last
            last = now
            try:
                self._post()
                self._listen(now)
                answered = now
                self._rounds += 1
            except RuntimeError as error:
                if self._failed_at is not None and now - self._failed_at > FAILED_PEER_S:
                    self._follow(self._failure)
                if now - answered > SILENT_S:
                    self._end_without_store(str(error).splitlines()[0])

    def _guard(self) -> None:
        """End this rank if the store has stopped to answer without an error: its node is halted, or the link is cut.
        The other thread is then in a call that may never return."""
        seen, since = self._rounds, time.monotonic()
        last = since
        while not self._over.wait(self._peers.period_s):
            now = time.monotonic()
            if now - last > 5 + self._peers.period_s:  # see `_watch`
                since += now - last
            last = now
            if self._rounds != seen:
                seen, since = self._rounds, now
            elif now - since > SILENT_S:
                self._end_without_store("no answer")

    def _post(self) -> None:
        frame = sys._current_frames().get(self._main or 0)
        progress, self._serial = self._progress, self._serial + 1
        beat = Heartbeat(
            rank=self._peers.rank,
            host=self._host,
            machine=self._machine,
            pid=os.getpid(),
            serial=self._serial,
            step=progress.step,
            phase=progress.phase,
            count=progress.count,
            waiting=is_waiting(frame),
            where=place_of(frame),
        )
        self._store.set(f"beat/{beat.rank}", beat.encode())

    def _listen(self, now: float) -> None:
        self._observer.update(self._beats(), now)
        if self._failed_at is None and self._has("failed"):
            self._failed_at, self._failure = now, self._get("failed")
        if self._failed_at is not None:
            if now - self._failed_at > FAILED_PEER_S:
                self._follow(self._failure)
            return
        if self._verdict is None:
            peers = self._peers
            # a broken connection and silence together: the other node is gone, whatever its ranks were doing
            slow_s = SILENT_S if self._lost else peers.slow_timeout_s
            verdict = judge(self._observer.seen(now), timeout_s=peers.timeout_s, slow_timeout_s=slow_s)
            if verdict is None and not self._has("verdict"):
                return
            self._carry_out(verdict)

    def _beats(self) -> list[Heartbeat]:
        keys = [f"beat/{rank}" for rank in range(self._peers.world_size)]
        if not self._store.check(keys):
            return []
        return [Heartbeat.decode(text.decode()) for text in self._store.multi_get(keys)]

    def _carry_out(self, mine: Verdict | None) -> None:
        """Agree on one verdict, report it once, write the stacks and end this rank."""
        token = f"{self._peers.rank}\n{mine.encode()}" if mine else ""
        won, _, text = (
            self._store.compare_set("verdict", "", token).decode() if mine else self._get("verdict")
        ).partition("\n")
        self._verdict = Verdict.decode(text)
        if int(won) == self._peers.rank:
            self._tell(self._verdict)
            self._store.set("told", "1")
        elif self._peers.nodes is not None:  # the run folder may be another one, which must tell it too
            self._tell(self._verdict)
        self._judged.set()
        self._dump(loud=self._peers.rank in self._verdict.ranks and self._verdict.kind == "late")
        self._store.set(f"dumped/{self._peers.rank}", "1")
        self._await(["told"], TELL_S)
        # no rank exits before: its exit would wake the ranks that wait for it, and their stacks would not show the wait
        self._await([f"dumped/{rank}" for rank in range(self._peers.world_size)], DUMP_S)
        leave(1)

    def _tell(self, verdict: Verdict) -> None:
        stacks = self._peers.run_dir / HANG_DIR
        hint = HINTS[verdict.kind].format(stacks=stacks / f"rank_{verdict.ranks[0]}.txt")
        message = f"Error: {verdict.message}\nhint: {hint}"
        if diagnose.claim_failure(self._peers.run_dir, verdict.ranks[0], message):
            write_error(f"[rank {self._peers.rank}] {message}")

    def _dump(self, *, loud: bool) -> None:
        """Write all threads' stacks into the run folder; with `loud` also into this rank's log."""
        with suppress(OSError):
            path = self._peers.run_dir / HANG_DIR / f"rank_{self._peers.rank}.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file)
            write_collectives(path.with_name(f"collectives_rank_{self._peers.rank}.json"))
            if loud:
                write_error(f"[rank {self._peers.rank}] stacks of all threads:\n{path.read_text()}")

    def _follow(self, failure: str) -> None:
        """End this rank after another one's failure. Repeats its message only if no rank has reported one."""
        rank, _, message = failure.partition("\n")
        if int(rank) == self._peers.rank:
            return
        if diagnose.claim_failure(self._peers.run_dir, int(rank), message):
            write_error(f"[rank {self._peers.rank}] rank {rank} failed: {message}")
        leave(1)

    def _end_without_store(self, why: str) -> None:
        message = f"Error: {self._lost_store()} ({why})"
        if self._peers.nodes is not None:
            message += f"\nhint: {HINTS['silent']}"
        if diagnose.claim_failure(self._peers.run_dir, self._peers.rank, message):
            write_error(f"[rank {self._peers.rank}] {message}")
        leave(1)

    def _lost_store(self) -> str:
        nodes, since = self._peers.nodes, f"torch's store has not answered for {SILENT_S:.0f} s"
        if nodes is None or nodes.store is None:
            return f"{since}: torchrun or the node that holds it is gone"
        if nodes.store == nodes.of_rank[self._peers.rank]:
            return f"{since}: torchrun on this node, {nodes.names[nodes.store]}, is gone"
        name = nodes.names[nodes.store]
        return f"{name} has been silent for {SILENT_S:.0f} s: the node or the network is gone. It holds torch's store"

    def _has(self, *keys: str) -> bool:
        return bool(self._store.check(list(keys)))

    def _get(self, key: str) -> str:
        return self._store.get(key).decode()

    def _await(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._has(*keys):
            time.sleep(0.05)


def tell_failure_of(store: torch_dist.Store, rank: int, message: str) -> None:
    """Post for a rank that a signal ended why it failed, unless a rank has posted a failure. Raises RuntimeError."""
    posts = torch_dist.PrefixStore("watchdog", store)
    posts.compare_set("failed", "", f"{rank}\n{message}")


def write_collectives(path: Path) -> None:
    """Write this rank's last collectives and their states, if torch records them (train.debug_distributed)."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            path.write_bytes(dump())
            return


def leave(code: int) -> None:
    """End this process at once, because its main thread may hang forever."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def machine_id() -> str:
    """Host and process namespace: equal for two processes that see each other's process IDs."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def process_ended(beat: Heartbeat, machine: str | None = None) -> bool | None:
    """Whether the process that sent a heartbeat has ended; None if it runs on another machine than `machine`, which is
    this one."""
    if beat.machine != (machine or machine_id()):
        return None
    with suppress(OSError):
        try:
            state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True if Path("/proc/self").exists() else None
        return state in ("Z", "X")
    return None


_LIBRARIES = (sysconfig.get_paths()["stdlib"], f"{os.sep}site-packages{os.sep}")


def is_waiting(frame: FrameType | None) -> bool:
    """Whether the innermost call is in torch.distributed."""
    return frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename


def place_of(frame: FrameType | None) -> str:
    """`FILE:LINE (FUNCTION)` of the innermost line outside libraries, else of the innermost line."""
    innermost = frame
    while frame is not None and any(part in frame.f_code.co_filename for part in _LIBRARIES):
        frame = frame.f_back
    shown = frame or innermost
    return f"{shown.f_code.co_filename}:{shown.f_lineno} ({shown.f_code.co_name})" if shown else "an unknown place"
