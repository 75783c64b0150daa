"""What a client may ask about jobs on this host: list, look, follow, stop, fetch.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import stat
import time
from typing import Any, Dict, List, Optional

from . import logs, state, supervise
from .errors import AgentError
from .layout import Job, Root
from .wire import Call

POLL_MIN_S, POLL_MAX_S = 0.002, 0.1


def find_job(root: Root, job_id: str) -> Job:
    """The job of that id or of the only id that begins so."""
    try:
        job = root.job(job_id)
    except ValueError:
        raise AgentError("unknown_job", "%r is not a job id" % job_id)
    if os.path.isdir(job.path):
        return job
    names = sorted(os.listdir(root.jobs)) if os.path.isdir(root.jobs) else []
    matches = [name for name in names if name.startswith(job_id)]
    if len(matches) > 1:
        raise AgentError("unknown_job", "%s matches %d jobs: %s" % (job_id, len(matches), ", ".join(matches[:6])))
    if not matches:
        raise AgentError("unknown_job", "no job %s on this host" % job_id, "list them: deploy.py ps")
    return root.job(matches[0])


def ps(root: Root, call: Call) -> Dict[str, Any]:
    call.send_event("jobs", state.list_jobs(root))
    return {}


def status(root: Root, call: Call) -> Dict[str, Any]:
    job = find_job(root, call.head["job"])
    call.send_event("status", dict(state.judge(job), job_id=job.id, path=job.path, latest=last_metrics(job)))
    return {}


def last_metrics(job: Job) -> Optional[str]:
    """The last whole line of metrics.jsonl."""
    try:
        with open(job.metrics, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 8192))
            lines = f.read().split(b"\n")[:-1]
    except OSError:
        return None
    return lines[-1].decode("utf-8", "replace") if lines else None


# --- follow ----------------------------------------------------------------------------------------------------------


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


# --- stop ------------------------------------------------------------------------------------------------------------


def stop(root: Root, call: Call) -> Dict[str, Any]:
    """Asks the supervisor to stop the job and reports how it goes until the job has ended. Idempotent."""
    job = find_job(root, call.head["job"])
    before = state.judge(job)
    if before["state"] not in state.FINAL:
        state.request_stop(job, float(call.head.get("grace_s", 120.0)))
        shown = ""
        while not call.cancelled.is_set():
            now = state.judge(job)
            if now.get("unsupervised"):
                _adopt(job)
            phase = str(now.get("phase") or now["state"])
            if phase != shown:
                shown = phase
                call.send_event("state", now)
            if now["state"] in state.FINAL:
                break
            time.sleep(0.1)
    call.send_event("status", dict(state.judge(job), job_id=job.id, was=before["state"]))
    return {}


def _adopt(job: Job) -> None:
    try:
        supervise.adopt(job, os.path.dirname(os.path.abspath(__file__)))
    except AgentError:
        if state.judge(job).get("unsupervised"):  # else another agent was first
            raise


# --- files -----------------------------------------------------------------------------------------------------------


def files(root: Root, call: Call) -> Dict[str, Any]:
    """Relative path, size and mtime of the regular files below the asked parts of a job folder; links are left out."""
    job = find_job(root, call.head["job"])
    found = []  # type: List[List[Any]]
    for part in call.head["parts"]:
        found.extend(_walk(job.path, part))
    call.send_event("files", found)
    return {}


def _walk(base: str, part: str) -> List[List[Any]]:
    top = os.path.join(base, part)
    if os.path.isfile(top) and not os.path.islink(top):
        return [_file_row(base, top)]
    rows = []
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                rows.append(_file_row(base, path))
    return rows


def _file_row(base: str, path: str) -> List[Any]:
    info = os.lstat(path)
    return [os.path.relpath(path, base), info.st_size, info.st_mtime]


def fetch(root: Root, call: Call) -> Dict[str, Any]:
    """The bytes of one file of a job folder from an offset on, at most `size` of them."""
    job = find_job(root, call.head["job"])
    path = os.path.join(job.path, call.head["path"])
    if os.path.commonpath([os.path.realpath(path), os.path.realpath(job.path)]) != os.path.realpath(job.path):
        raise AgentError("usage", "%s is not a file of job %s" % (call.head["path"], job.id))
    left = int(call.head["size"])
    with open(path, "rb") as f:
        f.seek(int(call.head.get("offset", 0)))
        while left > 0 and not call.cancelled.is_set():
            data = f.read(min(left, 1 << 20))
            if not data:
                break
            left -= len(data)
            call.send_data(data)
    return {}


def doctor(root: Root, call: Call) -> Dict[str, Any]:
    """Facts about this host and checks of it, each with what to do."""
    from . import checkup, probe  # no other request needs them

    env = probe.job_environment(dict(os.environ), probe.container_env())
    checks = checkup.run_checks(root, env, client_time=call.head.get("client_time"))
    call.send_event("doctor", {"facts": probe.host_facts(root), "checks": checks})
    return {}
