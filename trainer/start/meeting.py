"""The nodes' meeting before torchrun starts on each, over torch's store on node 0.

torchrun alone would wait for ten minutes without a word, and would start whatever versions and configs come together.

    card/K    node K's part, as JSON; its existence says that node K is ready
    problem   why the training does not start, by the first node that finds a reason
    go        all nodes are ready and fit together
    ended/K   torchrun of node K has ended
    outcome   the state in node 0's outcome.json, once its torchrun has ended
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.utils.store import _barrier_nonblocking

from trainer.failures.watchdog import tell_failure_of
from trainer.start.cards import Card, MeetingError, judge_cards, render_cards, render_nodes
from trainer.start.place import Node, node_command
from trainer.typed import InvalidData, from_json, parse_json
from trainer.words import first_line

T = TypeVar("T")

STORE_S = 15.0
"""Seconds for one request to the store, and for a connection to it."""
POLL_S, FIRST_WORD_S, NEXT_WORD_S = 0.2, 1.0, 30.0
MARGIN_S = 10.0
"""Node 0 decides when the wait is over; the others wait longer, so that they get its message."""
END_S = 15.0
"""Seconds that node 0's store outlives its ranks, so that the other nodes can read why they ended."""
SAVE_S = 120.0
"""Seconds in which node 0 may still save after the ranks of another node have ended."""


class Wait:
    """A wait that is reported while it lasts, and that ends with an error."""

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self.seconds, self._tell = seconds, tell
        self._began = time.monotonic()
        self._due = FIRST_WORD_S

    def tick(self, for_what: str, failure: MeetingError) -> None:
        """Sleep for a moment, and report the wait now and then. Raises `failure` when the time is over."""
        spent = time.monotonic() - self._began
        if spent > self.seconds:
            raise failure
        if spent >= self._due:
            left = max(1, round(self.seconds - spent))
            self._tell(f"waiting for {for_what}, up to {left} s")
            self._due = spent + NEXT_WORD_S
        time.sleep(POLL_S)


class Meeting:
    """This node's connection to the others, from the meeting until its torchrun has ended."""

    def __init__(self, store: Store, node: Node) -> None:
        self._store = PrefixStore("torchferry", store)
        self._torchruns = store
        self._node = node
        self._is_lost = False
        self.run_id = ""

    def introduce(
        self, card: Card, prepare: Callable[[Card], None], *, timeout_s: float, tell: Callable[[str], None]
    ) -> None:
        """Return once all nodes are ready and fit together; node 0 has judged that for all.

        `prepare`: called on the other nodes with node 0's card, before they are ready. Raises MeetingError.
        """
        try:
            first = card
            if self._node.rank > 0:
                first = self._first_card(Wait(STORE_S, tell))
                if first.nodes != card.nodes:
                    told = f"{card.name} counts {card.nodes} nodes, and {first.name} counts {first.nodes}"
                    raise MeetingError(told, hint="set the same NNODES on all nodes")
                self._refuse_second(card)
                prepare(first)
            self._claim(card)
            self.run_id = first.run_id
            if self._node.rank == 0:
                cards = self._gather(Wait(timeout_s, tell))
                unfit = judge_cards(cards)
                if unfit is not None:
                    raise unfit
                tell(render_cards(cards))
                self._set("go", "1")
            else:
                self._await_go(Wait(timeout_s + MARGIN_S, tell))
        except RuntimeError as error:  # of the store
            told = f"node 0 at {self._node.endpoint} ended before all nodes were ready"
            raise MeetingError(told, hint=f"its output has the reason ({first_line(error)})") from error
        except _SecondError:
            raise
        except MeetingError as error:
            self._tell_problem(error)
            raise
        except BaseException:
            self._tell_problem(MeetingError(f"{card.name} was interrupted before the training began"))
            raise

    def end(self, state: str | None) -> None:
        """Tell the other nodes that torchrun has ended here. Node 0 waits until theirs have ended too, for a while:
        its store has the reason for which they end. `state`: in node 0's outcome.json."""
        with suppress(RuntimeError):
            if self._node.rank > 0:
                self._set(f"ended/{self._node.rank}", "1")
                return
            self._set("outcome", state or "failed")
            others = [f"ended/{number}" for number in range(1, self._node.nodes)]
            deadline = time.monotonic() + END_S
            while not self._has(others) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def tell_failure(self, rank: int, message: str) -> None:
        """Tell the ranks of the other nodes why this node's rank ended, if a signal ended it before it could."""
        with suppress(RuntimeError):
            self._ask(lambda: tell_failure_of(self._torchruns, rank, message))

    def join_last_barrier(self) -> None:
        """Let the other nodes' torchruns end: they wait for this one's end, which it does not tell after a signal."""
        with suppress(RuntimeError):
            runs = PrefixStore(self.run_id, self._torchruns)
            self._ask(lambda: _barrier_nonblocking(runs, self._node.nodes, _TERMINAL_STATE_SYNC_ID))

    def outcome(self) -> str | None:
        """The state that node 0 tells at its end; None if it tells none."""
        with suppress(RuntimeError):
            deadline = time.monotonic() + SAVE_S
            while time.monotonic() < deadline:
                if self._has(["outcome"]):
                    return self._get("outcome").decode()
                time.sleep(POLL_S)
        return None

    def _first_card(self, wait: Wait) -> Card:
        told = f"something at {self._node.endpoint} answers, and is not node 0 of a training"
        failure = MeetingError(told, hint="choose another MASTER_PORT on all nodes")
        while not self._has(["card/0"]):
            wait.tick("node 0", failure)
        return self._card(0)

    def _refuse_second(self, card: Card) -> None:
        if self._has([f"card/{card.node}"]):
            other = self._card(card.node)
            raise _SecondError(
                f"node {card.node} has started already, on {other.host} (process {other.pid})",
                hint="give each node a different NODE_RANK, or end that process",
            )

    def _claim(self, card: Card) -> None:
        mine = json.dumps(asdict(card))
        if self._ask(lambda: self._store.compare_set(f"card/{card.node}", "", mine)).decode() != mine:
            self._refuse_second(card)

    def _card(self, number: int) -> Card:
        try:
            return from_json(parse_json(self._get(f"card/{number}")), Card)
        except InvalidData as error:
            told = f"node {number} runs another version of the trainer: {error}"
            raise MeetingError(told, hint="use the same checkout or package on all nodes") from error

    def _gather(self, wait: Wait) -> list[Card]:
        node, absent = self._node, list(range(1, self._node.nodes))
        while absent:
            absent = [number for number in absent if not self._has([f"card/{number}"])]
            self._raise_problem()
            if absent:
                wait.tick(f"{render_nodes(absent)} of {node.nodes} at {node.endpoint}", self._absence(absent, wait))
        return [self._card(number) for number in range(node.nodes)]

    def _absence(self, absent: list[int], wait: Wait) -> MeetingError:
        node = self._node
        told = f"{render_nodes(absent)} of {node.nodes} did not come to {node.endpoint} within {wait.seconds:.0f} s"
        command = node_command(node.nodes, absent[0], node.address, node.port)
        return MeetingError(told, hint=f"start `{command}` there; it must reach port {node.port} of node 0")

    def _await_go(self, wait: Wait) -> None:
        numbers = range(self._node.nodes)
        failure = MeetingError(f"node 0 at {self._node.endpoint} gave no start signal in {wait.seconds:.0f} s")
        while not self._has(["go"]):
            self._raise_problem()
            absent = [number for number in numbers if not self._has([f"card/{number}"])]
            for_what = f"{render_nodes(absent)} of {self._node.nodes}" if absent else "the start signal of node 0"
            wait.tick(for_what, failure)

    def _tell_problem(self, error: MeetingError) -> None:
        with suppress(RuntimeError):
            if not self._has(["go"]):
                self._ask(lambda: self._store.compare_set("problem", "", json.dumps([error.message, error.hint])))
                if self._node.rank == 0:  # the store ends with this process
                    time.sleep(5 * POLL_S)

    def _raise_problem(self) -> None:
        if self._has(["problem"]):
            message, hint = json.loads(self._get("problem"))
            raise MeetingError(str(message), hint=str(hint))

    def _ask(self, request: Callable[[], T]) -> T:
        """The store's answer. Raises RuntimeError also if there is none in STORE_S: torch's own timeout is for some
        requests only, so over a link that is cut a request would wait for many minutes."""
        answers: list[T] = []
        errors: list[RuntimeError] = [RuntimeError(f"no answer in {STORE_S:.0f} s")]

        def ask() -> None:
            try:
                answers.append(request())
            except RuntimeError as error:
                errors.insert(0, error)

        if not self._is_lost:
            thread = threading.Thread(target=ask, daemon=True)  # it does not keep this process from ending
            thread.start()
            thread.join(STORE_S)
        if not answers:
            self._is_lost = True
            raise errors[0]
        return answers[0]

    def _has(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def _get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))


class _SecondError(MeetingError):
    """Another process has this node's number. It is not disturbed."""


def open_meeting(node: Node, *, timeout_s: float, tell: Callable[[str], None]) -> Meeting:
    """Host the store as node 0, or wait for node 0's. Raises MeetingError."""
    return Meeting(_host(node) if node.rank == 0 else _join(node, Wait(timeout_s, tell)), node)


def _host(node: Node) -> Store:
    """The store of node 0. torchrun's static rendezvous uses the same server, because it is in the same process."""
    try:
        return TCPStore(
            node.address,
            node.port,
            is_master=True,
            timeout=timedelta(seconds=STORE_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        text = first_line(error)
        if "EADDRINUSE" in text or "address already in use" in text:
            told = f"port {node.port} of this node is taken, where the nodes would meet"
            hint = "an earlier start may still run; else choose another MASTER_PORT on all nodes"
        else:
            told = f"{node.endpoint} does not lead to this node: {text}"
            hint = "MASTER_ADDR must be the address of node 0, and this is node 0"
        raise MeetingError(told, hint=hint) from error


def _join(node: Node, wait: Wait) -> Store:
    while True:
        try:
            # not by the store itself: its wait cannot be interrupted
            with socket.create_connection((node.address, node.port), timeout=3):
                pass
            store = TCPStore(
                node.address,
                node.port,
                is_master=False,
                timeout=timedelta(seconds=STORE_S),
                wait_for_workers=False,
            )
            if not PrefixStore("torchferry", store).check(["outcome"]):
                return store
            reason = "an earlier training is just ending there"
        except OSError as error:
            reason = error.strerror or str(error)
        except RuntimeError as error:
            reason = first_line(error)
        failure = MeetingError(
            f"node 0 does not answer at {node.endpoint}: {reason}",
            hint=f"start node 0, and let this node reach port {node.port} there",
        )
        wait.tick(f"node 0 at {node.endpoint} ({reason})", failure)
