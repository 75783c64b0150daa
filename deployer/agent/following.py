"""A job's log as a stream to one client, until the job has ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

from typing import Any, Dict

from . import logs, state
from .layout import Job, Root
from .requests import find_job
from .wire import Call

POLL_MIN_S, POLL_MAX_S = 0.002, 0.1


def follow(root: Root, call: Call) -> Dict[str, Any]:
    """Streams the job's logs from byte offsets (or the last lines) on until it has ended, or to their present end."""
    job = find_job(root, call.head["job"])
    ranks = call.head.get("ranks")
    chosen = set(ranks) if ranks is not None else None
    offsets = dict(call.head.get("offsets") or {})
    if call.head.get("tail") is not None:
        offsets = logs.tail_offsets(job, call.head["tail"], ranks=chosen)
    reader = logs.LogReader(job, offsets=offsets, ranks=chosen)
    return follow_job(job, call, reader, once=not call.head.get("live", True))


def follow_job(job: Job, call: Call, reader: logs.LogReader, *, once: bool = False) -> Dict[str, Any]:
    wait_s, shown = POLL_MIN_S, ""
    while not call.cancelled.is_set():
        # the state is read before the logs: a job seen ended has written all that the next look can find
        now = state.judge(job)
        chunks = reader.poll()
        for chunk in chunks:
            call.send_data(chunk.data, file=chunk.file, offset=chunk.offset)
        if now["state"] != shown and not once:
            shown = now["state"]
            call.send_event("state", now)
        if not chunks and (once or now["state"] in state.FINAL):
            call.send_event("status", dict(now, job_id=job.id))
            return {}
        wait_s = POLL_MIN_S if chunks else min(wait_s * 1.5, POLL_MAX_S)
        call.cancelled.wait(wait_s)
    return {}


def last_lines(root: Root, call: Call) -> Dict[str, Any]:
    """The last lines of one rank (of the launcher when `rank` is null)."""
    job = find_job(root, call.head["job"])
    data = logs.last_lines(job, call.head.get("rank"), int(call.head.get("lines", 20)))
    call.send_data(data[-65536:])
    return {}
