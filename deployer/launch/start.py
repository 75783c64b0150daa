"""Carries out a plan: sends what the host lacks and starts the job once."""

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
"""Maximum bytes of a host's request for one file: its hash, quoted."""
CANCEL_S = 5.0
"""How long an interrupted launch waits for the host's answer."""


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

    If the connection breaks before the acknowledgement, it reconnects with the same plan (the host starts it once);
    later the log continues at the same byte. KeyboardInterrupt before the acknowledgement cancels the launch.
    `last`: the project's last tree on this host, to send only the difference.
    `like`: the job on this host whose --env values this job gets too.
    The uncommitted patch in `git` is sent last: in the exec's argument every user could read it.
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
    """Waits for the end of a conversation after the acknowledgement: a connection that breaks now changes nothing."""
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
    """The exchange up to the acknowledgement, in a separate thread: Ctrl-C reaches only the main thread and must not
    interrupt a frame. After half a frame the host could not read the cancellation."""

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
        """Waits at most `within_s` for the end of the launch. Returns whether it has ended."""
        return self._ended.wait(within_s)

    def acknowledgement(self) -> Ack:
        self._thread.start()
        self._ended.wait()
        if self.ack is None:
            assert self.error is not None
            raise self.error
        return self.ack


class _Unclear(LostConnection):
    """The host's acknowledgement cannot be read: the host may have the job, and is asked again."""


def _converse(call: Call, shipment: Shipment, delta: TreeDelta | None, watcher: Watcher) -> Ack:
    """Sends the delta, and then what the host asks for, up to the host's acknowledgement."""
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
    """Cancels the launch and waits for the host's answer: the acknowledgement may already be on its way."""
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
    """Starts this attempt of an ended job. Returns the final status as `launch_and_follow` does."""
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
