"""A job's progress, read from its files: steps, checkpoints, the age and the last line of its logs.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Type, TypeVar

from ..host.files import open_regular
from ..host.layout import ALONE, CHECKPOINT_MARKER, GroupName, Job
from ..host.typed import InvalidData, from_json, load_json, parse
from ..logs.read import Chosen, last_lines, log_names, log_path
from .plan import Plan, is_trainer

RECENT = 16
"""Number of lines of the metrics for the mean time of a step."""
MOST = 1e15
"""A larger number in the metrics is ignored."""
MAX_LINE = 300
"""Maximum characters of a log line in a status."""
_STEP = re.compile(r"step_(\d+)\Z")
_RESUMES_ELSEWHERE = re.compile(r"^  resume: (?!auto$)", re.MULTILINE)  # as trainer/config/files.py writes it


class _Metrics(NamedTuple):
    """The part of a line of metrics.jsonl that is read."""

    step: Optional[int] = None


class Recent(NamedTuple):
    """Values from the last lines of metrics.jsonl."""

    step: Optional[int] = None
    steps: Optional[int] = None
    """The total number of steps."""
    loss: Optional[float] = None
    """The loss of the last training step."""
    step_s: Optional[float] = None
    """Mean seconds of the recent steps."""


class ProgressFingerprint(NamedTuple):
    """A value that is equal as long as the files do not change."""

    files: Tuple[Tuple[str, int, int], ...]  # name, size, mtime in ns


def trainer_fingerprint(job: Job) -> ProgressFingerprint:
    """A value that changes with each step, and while a checkpoint or an export is written."""
    checkpoints = os.path.join(job.path, "checkpoints")
    aside = [os.path.join(checkpoints, name) for name in _names(checkpoints) if name.startswith(".tmp_")]
    folders = [checkpoints, *aside, os.path.join(job.path, "export")]
    paths = [job.metrics, *folders, *(path for folder in folders for path in _paths(folder))]
    return ProgressFingerprint(tuple(_stats(paths)))


def metrics_fingerprint(job: Job) -> ProgressFingerprint:
    """A value that changes with each step."""
    return ProgressFingerprint(tuple(_stats([job.metrics])))


def output_fingerprint(job: Job, attempt: int) -> ProgressFingerprint:
    """A value that changes with each byte that a rank of this attempt writes."""
    return ProgressFingerprint(tuple(_stats(rank_logs(job, attempt))))


def rank_logs(job: Job, attempt: int) -> List[str]:
    """The logs of all ranks of all groups."""
    return [log_path(job, name) for name in log_names(job, attempt) if name.rank is not None]


def silent_s(job: Job, attempt: int) -> Optional[float]:
    """Seconds since any rank of this attempt wrote to its log; None before the first byte."""
    written = [mtime_ns for _, size, mtime_ns in _stats(rank_logs(job, attempt)) if size]
    return max(0.0, time.time() - max(written) / 1e9) if written else None


def last_metrics(job: Job) -> Optional[str]:
    """The last complete line of metrics.jsonl."""
    lines = _last_lines(job)
    return lines[-1].decode("utf-8", "replace") if lines else None


def recent(job: Job) -> Recent:
    """The recent metrics. Ignores a value of another type: a program may write its own metrics."""
    lines = _last_lines(job)
    records = list(filter(None, map(_record_of, lines[-RECENT:])))
    steps = [record for record in records if "loss" in record]
    last = steps[-1] if steps else {}
    # a first step holds compilation and warm-up
    usual = [record for record in steps if "start_s" not in record] or steps
    times = [seconds for seconds in (value_of(record, "step_s", float) for record in usual) if seconds is not None]
    step = value_of(_record_of(lines[-1]), "step", int) if lines else None
    mean_s = sum(times) / len(times) if times else None
    return Recent(step, value_of(last, "steps", int), value_of(last, "loss", float), mean_s)


def _last_lines(job: Job) -> List[bytes]:
    """The last complete lines of metrics.jsonl; the first of them may lack its beginning."""
    try:
        with open_regular(job.metrics) as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 8192))
            return f.read().split(b"\n")[:-1]
    except OSError:
        return []


def _record_of(line: bytes) -> Dict[str, Any]:
    """The record of a line; empty if the line is not a record."""
    try:
        return from_json(load_json(line), Dict[str, Any])
    except InvalidData:
        return {}


N = TypeVar("N", int, float)


def value_of(record: Dict[str, Any], name: str, kind: Type[N]) -> Optional[N]:
    """A number of a record; None if it is missing, not a number, or too large."""
    try:
        value = from_json(record.get(name), kind)
    except InvalidData:
        return None
    return value if abs(value) < MOST else None


def last_step(job: Job) -> Optional[int]:
    """The step of the last line of metrics.jsonl."""
    try:
        return parse((last_metrics(job) or "{}").encode("utf-8"), _Metrics).step
    except InvalidData:
        return None


def resumes_from(job: Job, plan: Plan, *, restarted: bool) -> Optional[int]:
    """The step of the run's own checkpoint from which an attempt continues. None if it starts elsewhere, and for a
    program, whose checkpoints Torchferry cannot read."""
    if not is_trainer(plan):
        return None
    is_auto = _RESUMES_ELSEWHERE.search(plan.config_yaml or "") is None  # the default, where nobody gave it
    return newest_checkpoint(job) if restarted or is_auto else None


def newest_checkpoint(job: Job) -> Optional[int]:
    """The step of the newest complete checkpoint; None without one."""
    folder = os.path.join(job.path, "checkpoints")
    found = [m for m in map(_STEP.match, _names(folder)) if m]
    steps = [int(m.group(1)) for m in found if os.path.isfile(os.path.join(folder, m.group(), CHECKPOINT_MARKER))]
    return max(steps, default=None)


def last_line(job: Job, rank: Optional[int], attempt: int, group: GroupName = ALONE) -> str:
    """The last line in a rank's log that is not empty, truncated to MAX_LINE characters; without a rank, in the
    launcher's log."""
    chosen = Chosen(*group, ranks=None if rank is None else {rank})
    text = last_lines(job, chosen, 5, attempt=attempt).decode("utf-8", "replace")
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return lines[-1][-MAX_LINE:] if lines else ""


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _paths(folder: str) -> List[str]:
    return [os.path.join(folder, name) for name in _names(folder)]


def _stats(paths: List[str]) -> Iterator[Tuple[str, int, int]]:
    for path in paths:
        try:
            info = os.stat(path)
        except OSError:
            continue
        yield path, info.st_size, info.st_mtime_ns
