"""Carrying out a plan: what the host lacks is sent, and the job is started once."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer.agent import frames
from deployer.agent.tree import Entry, dump_entries
from deployer.errors import ConnectError, FerryError, HostError, LostConnection, UsageError
from deployer.follow import BACKOFF_S, GIVE_UP_AFTER_S, Connect, Watcher, follow_to_end
from deployer.link import Call, Link
from deployer.logview import LogView
from deployer.plan import LaunchPlan, plan_to_json

CANCEL_S = 5.0
"""How long an interrupted launch waits to hear whether it came to a job."""

Progress = Callable[[int, int], None]
"""(bytes sent, bytes in all), called as an upload goes on."""


@dataclass(frozen=True)
class Shipment:
    """The trees that a plan names, and where the content of their files is found on this machine."""

    trees: Mapping[str, tuple[Entry, ...]]
    sources: Mapping[str, str]


def launch_and_follow(
    connect: Connect,
    plan: LaunchPlan,
    *,
    shipment: Shipment,
    payload: dict[str, Any],
    git: dict[str, Any] | None,
    view: LogView | None,
    watcher: Watcher,
    give_up_s: float = GIVE_UP_AFTER_S,
) -> dict[str, Any] | None:
    """Starts the job and returns its final status; without a `view`, returns None once it is acknowledged.

    A connection that breaks before the acknowledgement is made again with the same plan (the host starts it once);
    afterwards the log goes on at the byte where it stopped. KeyboardInterrupt before the acknowledgement cancels.
    The uncommitted patch in `git` is sent last: it would show in the exec's argument, and no job waits for it.
    """
    git = dict(git or {})
    patch = str(git.pop("patch", ""))
    request: dict[str, Any] = {"op": "launch", "plan": plan_to_json(plan), "follow": view is not None}
    request.update(git=git, patch=bool(patch))

    def attempt() -> Link:
        return connect(request=request, payload=payload or None)

    link, call = _until_acknowledged(attempt, shipment, watcher)
    if patch:
        _send_patch(call, patch)
    if view is None:
        call.result()
        link.close()
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


def _until_acknowledged(attempt: Callable[[], Link], shipment: Shipment, watcher: Watcher) -> tuple[Link, Call]:
    for number, wait_s in enumerate((*BACKOFF_S[:3], None)):
        link = None
        try:
            link = attempt()
            watcher.started(_converse(link.first, shipment, watcher))
            return link, link.first
        except KeyboardInterrupt:
            if link is not None:
                _cancel(link, watcher)
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
    raise AssertionError("unreachable")


def _converse(call: Call, shipment: Shipment, watcher: Watcher) -> dict[str, Any]:
    """Answers what the host asks for, up to its acknowledgement."""
    entries: tuple[Entry, ...] = ()
    for name, value, _ in call.events():
        if name == "need_tree":
            if value not in shipment.trees:
                raise HostError(f"the host asks for {value!r}, which is no tree of this launch")
            entries = shipment.trees[value]
            call.send_data(zlib.compress(dump_entries(entries), 6))
            call.end_data()
        elif name == "need_blobs":
            _send_blobs(call, value, shipment.sources, {e.hash: e.size for e in entries}, watcher.sending)
        elif name == "ack":
            return dict(value)
    raise LostConnection("the host ended the launch without an acknowledgement")


def _send_patch(call: Call, patch: str) -> None:
    try:
        call.send_data(patch.encode("utf-8", "surrogateescape"))
        call.end_data()
    except FerryError:
        pass  # the job runs; a broken connection shows where the log is followed


def _send_blobs(
    call: Call, hashes: list[str], sources: Mapping[str, str], sizes: Mapping[str, int], progress: Progress
) -> None:
    if unknown := next((h for h in hashes if h not in sizes), None):
        raise HostError(f"the host asks for {unknown!r}, which is no file of this launch")
    total, sent = sum(sizes[h] for h in hashes), 0
    for name in hashes:
        for head, part in _blob_frames(name, Path(sources[name])):
            call.send_data(part, **head)
            sent += len(part)
            progress(sent, total)
    call.end_data()


def _blob_frames(name: str, path: Path) -> Any:
    """Frames of one file: the first one names it, the last one says so. UsageError when it is gone by now."""
    try:
        f = path.open("rb")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{path} cannot be read any more: {reason}", hint="deploy again") from error
    with f:
        part = f.read(frames.MAX_BODY)
        head: dict[str, Any] = {"blob": name}
        while True:
            following = f.read(frames.MAX_BODY)
            yield ({**head, "last": True} if not following else head), part
            if not following:
                return
            head, part = {}, following


def _cancel(link: Link, watcher: Watcher) -> None:
    """Tells the host to forget the launch and waits for its answer: the acknowledgement may have been on its way."""
    timer = threading.Timer(CANCEL_S, link.close)
    timer.start()
    try:
        link.first.cancel()
        for name, value, _ in link.first.events():
            if name == "ack":
                watcher.started(dict(value))
                return
    except FerryError:
        pass  # it is cancelled, or the host is gone; if the launch got through, `ps` shows it
    finally:
        timer.cancel()
        link.close()


def resume_and_follow(
    connect: Connect,
    plan: LaunchPlan,
    *,
    attempt: int,
    payload: dict[str, Any],
    view: LogView | None,
    watcher: Watcher,
    give_up_s: float = GIVE_UP_AFTER_S,
) -> dict[str, Any] | None:
    """Starts this attempt of a job that has ended, and returns the final status as `launch_and_follow` does."""
    request = {"op": "resume", "job": plan.job_id, "attempt": attempt, "plan": plan_to_json(plan)}
    request["follow"] = view is not None
    link, call = _until_acknowledged(
        lambda: connect(request=request, payload=payload or None), Shipment({}, {}), watcher
    )
    if view is None:
        call.result()
        link.close()
        return None
    own = {"from_attempt": attempt}
    return follow_to_end(
        connect, plan.job_id, view=view, watcher=watcher, opened=(link, call), request=own, give_up_s=give_up_s
    )
