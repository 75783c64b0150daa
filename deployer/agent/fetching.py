"""A job's files for one client: which there are, and their bytes.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import stat
from typing import Any, Dict, List

from .errors import AgentError
from .layout import Root
from .requests import find_job
from .wire import Call


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
