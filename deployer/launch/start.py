"""Carrying out a plan: what the host lacks is sent, and the job is started once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from deployer.agent.host.typed import to_json
from deployer.agent.job.plan import Plan
from deployer.agent.job.status import Status
from deployer.agent.job.views import Ack
from deployer.agent.store.tree import Entry, blobs_of
from deployer.connection.call import Call
from deployer.connection.host import BACKOFF_S, GIVE_UP_AFTER_S
from deployer.connection.link import Link
from deployer.errors import ConnectError, FerryError, HostError, LostConnection
from deployer.launch.delta import KnownTree, TreeDelta, delta_for, send_blobs, send_delta, send_tree
from deployer.launch.follow import Connect, Watcher, follow_to_end
from deployer.launch.logview import LogView
from deployer.project.manifest import Shipment

ASKED_BYTES = 100
"""What a host's request for one file may take: its hash, quoted."""
CANCEL_S = 5.0
"""How long an interrupted launch waits to hear whether it came to a job."""


def launch_and_follow(
    connect: Connect,
    plan: Plan,
    *,
    shipment: Shipment,
    payload: dict[str, Any],
    git: dict[str, Any] | None,
    view: LogView | None,
    watcher: Watcher,
    give_up_s: float = GIVE_UP_AFTER_S,
    last: KnownTree | None = None,
    like: str = "",
) -> Status | None:
    """Starts the job and returns its final status; without a `view`, returns None once it is acknowledged.

    A connection that breaks before the acknowledgement is made again with the same plan (the host starts it once);
    afterwards the log goes on at the byte where it stopped. KeyboardInterrupt before the acknowledgement cancels.
    `last`: what the host had of this project, so that the difference can be sent unasked.
    `like`: the job on that host whose --env values this one gets too.
    The uncommitted patch in `git` is sent last: it would show in the exec's argument, and no job waits for it.
    """
    git = dict(git or {})
    patch = str(git.pop("patch", ""))
    request: dict[str, Any] = {"op": "launch", "plan": to_json(plan), "follow": view is not None}
    delta = delta_for(last, plan.tree, shipment.trees.get(plan.tree, ()))
    request.update(git=git, patch=bool(patch), ahead=delta is not None)
    if like:
        request["like"] = like
    small = delta is not None and delta.is_small

    def attempt() -> Link:
        ahead = list(delta.frames(shipment.sources)) if delta is not None and small else ()
        link = connect(
            request=request,
            payload=payload or None,
            ahead=ahead,
            agent_too=bool(delta and not small),
            asking=watcher.asking,
        )
        if delta is not None and small and delta.blobs:
            watcher.sending(delta.size_bytes, delta.size_bytes)
        return link

    link, call = _until_acknowledged(attempt, shipment, watcher, delta=None if small else delta)
    if last is not None:
        threading.Thread(target=last.remember, args=(plan.tree, shipment.trees[plan.tree])).start()
    if patch:
        _send_patch(call, patch)
    if view is None:
        _take_leave(link, call)
        return None
    return follow_to_end(
        connect,
        plan.job_id,
        view=view,
        watcher=watcher,
        opened=(link, call),
        request={"from_attempt": 1},
        give_up_s=give_up_s,
    )


def _take_leave(link: Link, call: Call) -> None:
    """Ends the conversation with a host that has acknowledged: a connection that breaks now takes nothing back."""
    try:
        for _ in call.events():
            pass
    except LostConnection:
        pass
    link.close()


def _until_acknowledged(
    attempt: Callable[[], Link], shipment: Shipment, watcher: Watcher, *, delta: TreeDelta | None = None
) -> tuple[Link, Call]:
    for number, wait_s in enumerate((*BACKOFF_S[:3], None)):
        link = talk = None
        try:
            link = attempt()
            talk = _Talk(link.first, shipment, delta, watcher)
            watcher.started(talk.acknowledgement())
            return link, link.first
        except (KeyboardInterrupt, OSError):
            if link is not None and talk is not None:
                _cancel(link, talk, watcher)
            raise
        except (LostConnection, ConnectError) as error:
            if link is not None:
                link.close()
            if isinstance(error, ConnectError) and number == 0:
                raise
            if wait_s is None:  # an earlier try may have come to a job, so this is no plain ConnectError
                raise LostConnection(error.message, where=error.where, hint=error.hint) from error
            watcher.reconnecting(error, wait_s)
            time.sleep(wait_s)
        except FerryError:  # the host's own word
            if link is not None:
                link.close()
            raise
    raise AssertionError("unreachable")


class _Talk:
    """The conversation up to the acknowledgement, in a separate thread: Ctrl-C, which comes to the main one, must not
    cut a frame, behind whose half no host would understand that the launch is cancelled."""

    def __init__(self, call: Call, shipment: Shipment, delta: TreeDelta | None, watcher: Watcher) -> None:
        self.ack: Ack | None = None
        self.error: BaseException | None = None
        self._ended = threading.Event()  # Ctrl-C may come while the thread is started, which then cannot be joined
        self._thread = threading.Thread(target=self._run, args=(call, shipment, delta, watcher), daemon=True)

    def _run(self, call: Call, shipment: Shipment, delta: TreeDelta | None, watcher: Watcher) -> None:
        try:
            self.ack = _converse(call, shipment, delta, watcher)
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def end(self, within_s: float) -> bool:
        """Waits for the end of the launch. Returns whether it has ended."""
        return self._ended.wait(within_s)

    def acknowledgement(self) -> Ack:
        self._thread.start()
        self._ended.wait()
        if self.ack is None:
            assert self.error is not None
            raise self.error
        return self.ack


class _Unclear(LostConnection):
    """The host has acknowledged in words that nobody understands: it has the job, or not, and is asked again."""


def _converse(call: Call, shipment: Shipment, delta: TreeDelta | None, watcher: Watcher) -> Ack:
    """Sends what the host will ask for, and what it does ask for, up to its acknowledgement."""
    if delta is not None:
        send_delta(call, delta, shipment.sources, watcher.sending)
    entries: tuple[Entry, ...] = ()
    for name, value, _ in call.events():
        if name == "need_tree":
            tree = call.read(value, str, name)
            if tree not in shipment.trees:
                raise HostError(f"the host asks for {tree[:60]!r}, which is no tree of this launch")
            entries = shipment.trees[tree]
            call.max_event = max(call.max_event, ASKED_BYTES * len(entries))
            send_tree(call, entries)
        elif name == "need_blobs":
            send_blobs(call, call.read(value, list[str], name), shipment.sources, blobs_of(entries), watcher.sending)
        elif name == "ack":
            try:
                return call.read(value, Ack, name)
            except HostError as error:
                raise _Unclear(error.message, hint=error.hint) from None
    raise LostConnection("the host ended the launch without an acknowledgement")


def _send_patch(call: Call, patch: str) -> None:
    try:
        call.send_data(patch.encode("utf-8", "surrogateescape"))
        call.end_data()
    except FerryError:
        pass  # the job runs; a broken connection shows where the log is followed


def _cancel(link: Link, talk: _Talk, watcher: Watcher) -> None:
    """Tells the host to forget the launch and waits for its answer: the acknowledgement may have been on its way."""
    try:
        link.first.cancel()
        answered = talk.end(CANCEL_S)
    except FerryError:
        answered = False  # the host is gone; if the launch got through, `ps` shows it
    if talk.ack is not None:
        watcher.started(talk.ack)
    elif answered and isinstance(talk.error, FerryError) and not (link.lost or isinstance(talk.error, _Unclear)):
        watcher.refused()
    link.close()


def resume_and_follow(
    connect: Connect,
    plan: Plan,
    *,
    attempt: int,
    payload: dict[str, Any],
    view: LogView | None,
    watcher: Watcher,
    give_up_s: float = GIVE_UP_AFTER_S,
) -> Status | None:
    """Starts this attempt of a job that has ended, and returns the final status as `launch_and_follow` does."""
    request = {"op": "resume", "job": plan.job_id, "attempt": attempt, "plan": to_json(plan)}
    request["follow"] = view is not None
    link, call = _until_acknowledged(
        lambda: connect(request=request, payload=payload or None, asking=watcher.asking), Shipment({}, {}), watcher
    )
    if view is None:
        _take_leave(link, call)
        return None
    own = {"from_attempt": attempt}
    return follow_to_end(
        connect, plan.job_id, view=view, watcher=watcher, opened=(link, call), request=own, give_up_s=give_up_s
    )
