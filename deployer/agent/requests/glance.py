"""One job's current state for a client that asks repeatedly: its status, its GPUs, and what is new since the last
request, in few bytes.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import zlib
from typing import Any, Dict, List, Tuple

from ..gpus.load import read_load
from ..gpus.view import GpuLoad
from ..host import environment
from ..host.errors import AgentError
from ..host.files import open_regular
from ..host.layout import Job, Root
from ..host.marks import ProcessSnapshot
from ..host.typed import InvalidData, from_json, load_json, to_json
from ..job import progress
from ..job.views import Glance, GlanceRequest, NewMetrics
from ..logs.read import Chosen, last_lines
from ..wire.conversation import Call
from .jobs import find_folder, row_of

READ_BYTES = 8 << 20
"""If the metrics are longer, only this many bytes of their end are read at a time."""
FIRST_RECORDS, NEXT_RECORDS = 120, 10
"""Number of records that are sent: the first time, and each further time."""
MAX_RECORD = 64 << 10
KEYS = ("step", "loss", "eval_loss", "tokens_per_s_per_gpu", "tokens_per_s")
LOG_LINES, LOG_LINE, LOG_CHARACTERS = 40, 200, 2500


def glance(root: Root, call: Call) -> None:
    asked = call.read(GlanceRequest)
    job = find_folder(root, asked.job, kind="unknown_job")
    row = row_of(job, ProcessSnapshot())
    gpus, no_gpus = _gpus()
    log = _log(job)
    mark = "%08x" % zlib.crc32(log.encode("utf-8", "surrogatepass"))
    latest = progress.last_metrics(job) if asked.whole else None
    found = Glance(
        row,
        gpus,
        no_gpus,
        _new_metrics(job, asked.metrics_file, asked.metrics_from),
        log=None if mark == asked.log_mark else log,
        log_mark=mark,
        latest=latest,
    )
    call.send_event("glance", to_json(found, sparse=True))


def _gpus() -> Tuple[Tuple[GpuLoad, ...], str]:
    """(the host's GPU loads, why there are none)."""
    env = environment.job_environment(dict(os.environ), environment.container_env())
    try:
        loads = read_load(env)
    except AgentError as error:
        return (), str(error)[:200]
    return loads, "" if loads else "this host has none"


def _new_metrics(job: Job, file: str, start: int) -> NewMetrics:
    """The lines of metrics.jsonl after `start`, complete and thinned out. All lines if it is another file: a run that
    continues from an earlier step writes a new one."""
    try:
        with open_regular(job.metrics) as f:
            info = os.fstat(f.fileno())
            anew = str(info.st_ino) != file or info.st_size < start
            begin = max(0 if anew else start, info.st_size - READ_BYTES)
            f.seek(begin)
            data = f.read(READ_BYTES)
    except OSError:
        return NewMetrics(file="", to=0, anew=bool(file))
    lines = data.split(b"\n")[:-1]
    end = begin + data.rfind(b"\n") + 1
    kept = _thinned(lines, FIRST_RECORDS if anew else NEXT_RECORDS)
    records = tuple(filter(None, map(_numbers_of, kept)))
    return NewMetrics(records, str(info.st_ino), end, anew)


def _thinned(lines: List[bytes], most: int) -> List[bytes]:
    """At most `most` lines at even distances, with the last one."""
    if len(lines) <= most:
        return lines
    return [lines[(number + 1) * len(lines) // most - 1] for number in range(most)]


def _numbers_of(line: bytes) -> Dict[str, float]:
    """The numbers of a line; empty if it is not a record."""
    try:
        record = from_json(load_json(line, most=MAX_RECORD), Dict[str, Any])
    except InvalidData:
        return {}
    values = {key: progress.value_of(record, key, float) for key in KEYS}
    return {key: value for key, value in values.items() if value is not None}


def _log(job: Job) -> str:
    """The last lines of rank 0, else of the logs before the ranks."""
    data = last_lines(job, Chosen(ranks={0}), LOG_LINES) or last_lines(job, Chosen(), LOG_LINES)
    lines = re.split(r"[\r\n]+", data.decode("utf-8", "replace").rstrip("\r\n"))
    text = "\n".join(line[:LOG_LINE] for line in lines[-LOG_LINES:])[-LOG_CHARACTERS:]
    return text if len(text) < LOG_CHARACTERS else text.partition("\n")[2]
