"""job.json: what a job was launched with. Its plan is stored as received, for newer readers and for its hash.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
from typing import Any, Dict, NamedTuple, Optional, Tuple

from ..host.files import blake2b, write_json
from ..host.layout import FORMAT_VERSION, Job
from ..host.typed import InvalidData, read_typed, to_json
from .plan import Plan, parse_plan

RawPlan = Dict[str, Any]
MAX_BYTES = 64 << 20


class Resumed(NamedTuple):
    """A resume: the attempt that it started, and the plan before it."""

    attempt: int
    plan_hash: str
    resumed_at: float = 0.0
    """Unix time."""
    plan_before: Optional[RawPlan] = None


class Record(NamedTuple):
    plan: RawPlan
    plan_hash: str = ""
    env: Dict[str, str] = {}
    """Values of --env; secrets are names in the plan."""
    git: Optional[Dict[str, Any]] = None
    created_at: Optional[float] = None
    """Unix time, by this host's clock."""
    agent_python: str = ""
    resumed: Tuple[Resumed, ...] = ()
    format: int = FORMAT_VERSION


def read_record(job: Job) -> Record:
    """The job's record. Raises InvalidData, with the reason, if job.json is missing or invalid."""
    try:
        return read_typed(job.record, Record, most=MAX_BYTES)
    except FileNotFoundError:
        raise InvalidData("its job.json is missing") from None
    except OSError as error:
        raise InvalidData("its job.json cannot be read: %s" % error.strerror) from None
    except InvalidData as damage:
        raise InvalidData("its job.json is damaged: %s" % damage) from None


def known_record(job: Job) -> Optional[Record]:
    """The record; None if it is missing or damaged."""
    try:
        return read_record(job)
    except InvalidData:
        return None


def write_record(job: Job, record: Record) -> None:
    write_json(job.record, to_json(record))


def read_plan(job: Job) -> Plan:
    """The plan of this very job. Raises InvalidData, with the reason, if it is missing or invalid."""
    return plan_of(job, read_record(job))


def plan_of(job: Job, record: Record) -> Plan:
    """The plan in the job's record. Raises InvalidData if it is invalid or another job's."""
    plan = parse_plan(record.plan)
    if plan.job_id != job.id:
        raise InvalidData("its job.json is of another job, %s" % plan.job_id[:80])
    return plan


def known_plan(job: Job) -> Optional[Plan]:
    """The plan; None if it is missing or damaged."""
    try:
        return read_plan(job)
    except InvalidData:
        return None


def plan_hash(plan: RawPlan) -> str:
    return blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=16).hexdigest()
