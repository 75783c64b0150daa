"""Starts a job on this host: requests missing files, creates the job's folder once, and starts its supervisor.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import shlex
import shutil
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, NamedTuple, Optional, Tuple

from ..host import disk, environment
from ..host.errors import AgentError
from ..host.files import write_whole
from ..host.layout import AGENT_DIR, Job, Root
from ..host.locks import locked, store_in_use
from ..host.typed import InvalidData, to_json
from ..job.plan import Include, Plan, parse_plan, trees_of, wanted_gpus
from ..job.record import RawPlan, Record, known_record, plan_hash, write_record
from ..job.status import QUEUED, read_status
from ..job.views import Ack, SlotValues
from ..store import spare, tree
from ..store.bring import bring_trees, drain
from ..store.content import Store
from ..supervisor import start
from ..wire.conversation import Call

if TYPE_CHECKING:
    from ..gpus.leases import HeldClaim

MAX_PATCH = 4 << 20
MIN_FREE_BYTES = 64 << 20
MIN_FREE_INODES = 64


def launch(root: Root, call: Call) -> None:
    """Starts the plan's job, or acknowledges it if it was already started; then follows its log if requested."""
    request = call.read(LaunchRequest)
    plan = plan_in(request.plan)
    job = _job(root, plan.job_id)
    check_root(root)
    if request.like:
        from . import repeat  # hardly ever needed

        request = repeat.with_values_of(root, request, plan)
    already = _existing(job, request.plan)
    if not already:
        already = not _start_once(root, job, plan, request, call)
    elif request.ahead:
        drain(call.receive(), call)
    if call.revoked:  # a client that is only gone may be asking again by now
        from ..job.stop import request_stop

        request_stop(job, 0)
        call.send_event("ack", to_json(Ack(job.id, job.path, already, stopping=True)))
        raise AgentError("host", "the launch was cancelled")
    begun = read_status(job)
    waits = begun is not None and begun.state == QUEUED
    queued = waits and (wanted_gpus(plan) is not None or bool(plan.policy.after))
    call.send_event("ack", to_json(Ack(job.id, job.path, already, queued)))
    if not already:
        spare.make_later(root, plan.tree)
    if request.patch:
        _keep_patch(job, call)
    elif request.like and not already:
        repeat.copy_patch(root, request.like, job.path)
    if request.follow:
        from ..logs import read  # what is needed from now on is loaded while the job starts
        from .follow import follow_job

        follow_job(job, call, read.LogReader(job, attempt=1))


def _start_once(root: Root, job: Job, plan: Plan, request: "LaunchRequest", call: Call) -> bool:
    """Starts the job unless another call was faster. Returns whether this call started it."""
    env = base_env()
    # before any file is sent for a job that would be refused
    after = _awaited(root, plan)
    with _claimed(plan, env, now=not after) as held, store_in_use(root):
        arrived = bring_trees(Store(root), trees_of(plan), call, ahead=request.ahead)
        try:
            with locked(job, anew=True):
                if _existing(job, request.plan):
                    return False
                is_new = not os.path.lexists(job.record)
                try:
                    with start.Starting(job, held_fd=held.fd if held is not None else -1) as starting:
                        _make_job(root, job, plan, request, arrived)
                        if call.cancelled.is_set():
                            raise AgentError("host", "the launch was cancelled")
                        starting.go(launch_input(root, plan, request, env, held, after))
                except BaseException:
                    if is_new and not start.has_begun(job, 1):  # else somebody was told of it, before a power cut
                        shutil.rmtree(job.path, ignore_errors=True)  # no half job stays, least of all on a full disk
                    raise
        finally:
            spare.discard(arrived)
    return True


def slots(root: Root, call: Call) -> Dict[str, Any]:
    """The values that a plan's slots would get here, without starting or writing anything."""
    plan = plan_in(call.read(LaunchRequest).plan)
    from ..python import find  # a launch leaves that to its supervisor

    env = base_env()
    _awaited(root, plan)
    found = {"root": root.path, "job": os.path.join(root.jobs, plan.job_id), "agent": AGENT_DIR}
    wanted = wanted_gpus(plan)
    if wanted is not None:
        from ..gpus import claim

        found["gpus"] = claim.would_get(wanted, env)
    try:
        found["python"] = find.find_python(plan.python, env=env, root=root)
    except AgentError as error:
        if plan.python.explicit:
            raise
        return to_json(SlotValues(found, "to be built there: " + error.message))  # type: ignore[no-any-return]
    return to_json(SlotValues(found))  # type: ignore[no-any-return]


class LaunchRequest(NamedTuple):
    """A client's launch request; also a resume, which sends no files."""

    plan: RawPlan
    follow: bool = False
    ahead: bool = False
    """The tree's files follow without a request for them."""
    patch: bool = False
    git: Optional[Dict[str, Any]] = None
    env: Dict[str, str] = {}
    secrets: Dict[str, str] = {}
    like: str = ""
    """The ID of the job that this one repeats: it gets that job's --env values too."""
    notify: Tuple[str, ...] = ()
    """The --notify URLs, which are secrets too."""
    job: str = ""
    """For a resume: the job's ID, and the number of the attempt."""
    attempt: int = 1


def plan_in(raw: RawPlan) -> Plan:
    try:
        return parse_plan(raw)
    except InvalidData as damage:
        raise AgentError("usage", str(damage)) from None


def _job(root: Root, job_id: str) -> Job:
    try:
        return root.job(job_id)
    except ValueError as error:
        raise AgentError("usage", str(error))


def base_env() -> Dict[str, str]:
    return environment.job_environment(dict(os.environ), environment.container_env())


def _awaited(root: Root, plan: Plan) -> Tuple[str, ...]:
    """The jobs that it must wait for; empty for most jobs."""
    if not plan.policy.after:
        return ()
    from .after import still_awaited

    return still_awaited(root, plan)


def _claimed(plan: Plan, env: Dict[str, str], *, now: bool) -> "ContextManager[Optional[HeldClaim]]":
    """The plan's GPUs, held while its supervisor is started; None for a plan without GPUs, and for one that claims them
    later."""
    wanted = wanted_gpus(plan) if now else None
    if wanted is None:
        return nullcontext()
    from ..gpus import claim  # a job without GPUs starts sooner

    return claim.claimed(wanted, env)


def check_root(root: Root) -> None:
    """Raises AgentError if a job could be started there but its status could not be written."""
    hint = "choose another folder with --remote-root"
    try:
        os.makedirs(root.jobs, mode=0o700, exist_ok=True)
        os.makedirs(root.tmp, mode=0o700, exist_ok=True)
        free = os.statvfs(root.path)
    except OSError as error:
        raise AgentError("host", "the remote root %s cannot be used: %s" % (root.path, error.strerror), hint)
    if not os.access(root.jobs, os.W_OK):
        raise AgentError("host", "the remote root %s is not writable" % root.path, hint)
    few = free.f_files and free.f_favail < MIN_FREE_INODES
    if few or free.f_bavail * free.f_frsize < MIN_FREE_BYTES:
        inodes = ", %d inodes of %d" % (free.f_favail, free.f_files) if few and free.f_favail else ""
        what = "the disk of the remote root %s is full: %s%s" % (root.path, disk.room(root.path), inodes)
        room = "deploy.py gc --ssh HOST --remote-root %s --older-than 7d" % shlex.quote(root.path)
        raise AgentError("host", what, "make room, for example with %s; or %s" % (room, hint))


# --- the job folder ---------------------------------------------------------------------------------------------------


def _existing(job: Job, plan: RawPlan) -> bool:
    """Whether this very plan was already started. Raises AgentError if another plan has its ID."""
    if not start.has_begun(job, 1):
        return False
    record = known_record(job)
    if record is None or record.plan_hash != plan_hash(plan):
        raise AgentError("usage", "job %s exists already with another plan" % job.id, "choose another --name")
    return True


def _make_job(root: Root, job: Job, plan: Plan, request: LaunchRequest, arrived: Optional[spare.Spare]) -> None:
    """Creates all files of a job that exist before its supervisor; an interrupted launch is simply repeated."""
    store = Store(root)
    for leftover in (job.code, job.lib):
        shutil.rmtree(leftover, ignore_errors=True)
    spare.materialise(root, plan.tree, job.path, arrived=arrived)
    store.keep_listing(plan.tree, job.listing)
    os.makedirs(job.code, exist_ok=True)
    for include in plan.includes:
        _link_include(store, job, include)
    if plan.config_yaml is not None:
        write_whole(job.config, plan.config_yaml.encode(), sync=True)
    record = Record(
        plan=request.plan,
        plan_hash=plan_hash(request.plan),
        env=request.env,
        git=request.git,
        created_at=time.time(),
        agent_python=sys.version.split()[0],
    )
    write_record(job, record)


def _keep_patch(job: Job, call: Call) -> None:
    """Stores the project's uncommitted changes; at most MAX_PATCH bytes."""
    patch = b"".join(frame.body for frame in call.receive())
    if len(patch) <= MAX_PATCH:
        write_whole(os.path.join(job.path, "git.patch"), patch, sync=True)


def _link_include(store: Store, job: Job, include: Include) -> None:
    path = include.path
    tree.check_entry(tree.Entry(path, tree.LINK, 0, "x"))
    where = os.path.join(job.code, path)
    os.makedirs(os.path.dirname(where), exist_ok=True)
    if os.path.realpath(os.path.dirname(where)) != os.path.normpath(
        os.path.dirname(os.path.join(os.path.realpath(job.code), path))
    ):
        raise AgentError("usage", "the included path %s lies behind a link of the project" % path)
    target = store.shared(include.tree, os.path.basename(path), file=include.file)
    if os.path.lexists(where):
        raise AgentError("usage", "the included path %s is among the files of the project already" % path)
    os.symlink(target, where)


def start_next(root: Root, job: Job, plan: Plan, *, commit: Callable[[], LaunchRequest]) -> None:
    """Starts the supervisor of a later attempt. `commit`: called when nothing can refuse the attempt any more; returns
    the supervisor's input."""
    env = base_env()
    after = _awaited(root, plan)
    with _claimed(plan, env, now=not after) as held:
        start.spawn(job, launch_input(root, plan, commit(), env, held, after))


def launch_input(
    root: Root,
    plan: Plan,
    request: LaunchRequest,
    env: Dict[str, str],
    held: "Optional[HeldClaim]",
    after: Tuple[str, ...] = (),
) -> start.LaunchInput:
    return start.LaunchInput(
        plan=plan,
        attempt=request.attempt,
        env=request.env,
        secrets=request.secrets,
        base_env=env,
        wheels=Store(root).shared(plan.python.wheels, "wheels") if plan.python.wheels else None,
        held=held.to_inherit() if held is not None else None,
        after=after,
        notify=request.notify,
    )
