"""Records which of a job's files clients have copied, so that gc can report those that no client has.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import NamedTuple, Optional, Sequence, Tuple

from ...host.files import is_path_below, write_json
from ...host.layout import Job, Root
from ...host.typed import InvalidData, read_typed, to_json
from ...job.record import known_plan
from ...wire.conversation import Call
from ..jobs import find_folder
from .unpulled import list_unpulled
from .view import UnpulledFiles

MOST_PATHS = 20_000
MAX_BYTES = 8 << 20
RECORDS = (
    "job.json",
    "config.yaml",
    "git.patch",
    "status.json",
    "outcome.json",
    "memory_plan.json",
    "logs",
    "hang",
)
"""The job's own records: of no use without its results."""


class _Fetched(NamedTuple):
    """The content of control/fetched.json."""

    paths: Tuple[str, ...] = ()
    """Files, and folders of which all files were copied, relative to the job's folder."""


class FetchedRequest(NamedTuple):
    job: str
    paths: Tuple[str, ...]


def fetched(root: Root, call: Call) -> None:
    """Records that a client has these files."""
    request = call.read(FetchedRequest)
    note_fetched(find_folder(root, request.job), request.paths)


def note_fetched(job: Job, paths: Sequence[str]) -> None:
    known = _read(job)
    new = [path for path in dict.fromkeys(paths) if is_path_below(path) and path not in known]
    if new:
        try:
            write_json(_file(job), to_json(_Fetched((*known, *new)[:MOST_PATHS])))
        except OSError:  # a full disk: then a collection names too much
            pass


def never_fetched(root: Root, job: Job) -> Optional[UnpulledFiles]:
    """The files that the job wrote, without its records, that no client has copied. None if that cannot be
    determined."""
    try:
        return list_unpulled(root, job, known_plan(job), (*RECORDS, *_read(job)))
    except OSError:
        return None


def _file(job: Job) -> str:
    return os.path.join(job.control, "fetched.json")


def _read(job: Job) -> Tuple[str, ...]:
    try:
        return read_typed(_file(job), _Fetched, most=MAX_BYTES).paths
    except (OSError, InvalidData):
        return ()
