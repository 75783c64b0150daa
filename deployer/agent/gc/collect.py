"""Removes objects that no job needs, and on request ended jobs.

They are renamed aside while no launch is running, and deleted afterwards, because that may take long. Renaming needs no
new folder, since the disk may be full. If gc is killed, the next gc finds the renamed objects.
Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..host.disk import existing_folder
from ..host.errors import AgentError
from ..host.files import remove, remove_folder
from ..host.layout import Job, Root
from ..host.locks import store_alone, take_lock
from ..host.typed import to_json
from ..job.judge import judge
from ..job.status import FINAL
from ..requests.files.view import UnpulledFiles
from ..wire.conversation import Call
from .choose import (
    AGENT,
    BLOB,
    CACHE,
    DATA,
    ENV,
    PACK,
    SPARE,
    TMP,
    TREE,
    GcObject,
    Inventory,
    JobItem,
    Policy,
    Removals,
    choose,
    leftovers,
    totals,
)
from .inventory import read_inventory
from .view import GcReport, KeptJobs, RemovedJob

MOST_LOOKED_INTO = 100
"""Maximum number of jobs whose files are checked for missing copies."""
LOOK_S = 2.0
"""Seconds to wait for a job's lock: a process that only reads how the job ended may hold it for a moment."""


class _GcRequest(NamedTuple):
    dry_run: bool = False
    older_than_s: Optional[float] = None
    max_bytes: Optional[int] = None
    keep_jobs: Optional[int] = None
    only: Optional[List[str]] = None
    unfetched: bool = False


def gc(root: Root, call: Call) -> None:
    """Reports what gc would remove; removes it unless `dry_run`. `only`: the IDs of the jobs that the user has agreed
    to. `unfetched`: also report the files of these jobs that were never copied to a client."""
    request = call.read(_GcRequest)
    only = None if request.only is None else frozenset(request.only)
    policy = Policy(request.older_than_s, request.max_bytes, request.keep_jobs, only)
    seen = read_inventory(root)
    unfetched = _unfetched(root, choose(seen, policy).jobs) if request.unfetched else {}
    chosen, remaining = (choose(seen, policy), []) if request.dry_run else collect(root, seen, policy)
    call.send_event("gc", to_json(report(root, seen, chosen, remaining, unfetched)))


def _unfetched(root: Root, jobs: Sequence[JobItem]) -> Dict[str, Optional[UnpulledFiles]]:
    from ..requests.files.fetched import never_fetched  # walks through folders: only where somebody wants to know

    return {job.id: never_fetched(root, root.job(job.id)) for job in jobs[:MOST_LOOKED_INTO]}


def collect(root: Root, seen: Inventory, policy: Policy) -> Tuple[Removals, List[str]]:
    """What was removed, and the paths that could not be. `seen`: an earlier inventory, for its sizes.

    Removes only jobs that were chosen then. A job counts as removed even if some of its files remain. Raises AgentError
    if launches hold the lock for too long.
    """
    jobs = frozenset(job.id for job in choose(seen, policy).jobs)
    with store_alone(root):
        now = read_inventory(root, measure=_remembered(root, seen))
        chosen = choose(now, policy._replace(only=jobs))
        gone = _take_jobs(root, chosen.jobs)
        kept = [job for job in now.jobs if job not in gone]  # one that came to life keeps what it needs
        objects, refused = _take_objects(root, now, leftovers(now, kept, policy))
    asides = [aside for aside in (*gone.values(), *objects.values()) if aside is not None]
    for aside in asides:
        remove_folder(aside)
    left = [aside for aside in asides if os.path.lexists(aside)]
    whole = tuple(obj for obj, aside in objects.items() if aside not in left)
    return Removals(tuple(gone), whole), refused + left


def _remembered(root: Root, seen: Inventory) -> Callable[[str], int]:
    """A function that returns sizes of an earlier inventory, without another walk."""
    folders = _folders(root)
    sizes = {os.path.join(root.jobs, job.id): job.size for job in seen.jobs}
    sizes.update((os.path.join(folders[t.kind], t.name), t.size) for t in seen.objects if t.kind in folders)
    return lambda path: sizes.get(path, 0)


def _folders(root: Root) -> Dict[str, str]:
    return {DATA: root.data, ENV: root.envs, AGENT: root.agents, TMP: root.path, CACHE: root.cache}


def _take_jobs(root: Root, jobs: Sequence[JobItem]) -> Dict[JobItem, str]:
    """Renames the jobs aside and returns their new paths. A job that cannot be taken stays, and so do the jobs that it
    started from."""
    gone: Dict[JobItem, str] = {}
    stays: Set[str] = set()
    for item in sorted(jobs, key=lambda job: job.ended_s or 0.0):  # who began from another one is the newer
        aside = None if item.id in stays else _take_job(root, root.job(item.id))
        if aside is not None:
            gone[item] = aside
        else:
            stays |= item.names
    return gone


def _take_job(root: Root, job: Job) -> Optional[str]:
    """Renames the job aside and returns its new path; None if it is being started again."""
    try:
        os.makedirs(job.control, mode=0o700, exist_ok=True)
        fd = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        free = take_lock(fd, wait_s=LOOK_S) and judge(job, is_locked=True).state in FINAL
        return _take(root, job.path) if free else None
    except (AgentError, OSError):
        return None
    finally:
        os.close(fd)


def _take_objects(
    root: Root, now: Inventory, objects: Sequence[GcObject]
) -> Tuple[Dict[GcObject, Optional[str]], List[str]]:
    """Removes the objects or renames them aside. Returns the new path of each (None if it is already removed), and the
    paths of those that could not be removed.

    Trees are removed before blobs: a tree promises that its blobs are there. So the blobs of a tree that cannot be
    removed stay too.
    """
    folders = {**_folders(root), TREE: root.trees, PACK: root.packs, SPARE: os.path.join(root.path, "store")}
    taken: Dict[GcObject, Optional[str]] = {}
    stayed: List[str] = []
    promised: Set[str] = set()
    for obj in sorted(objects, key=lambda obj: obj.kind in (BLOB, PACK)):
        if obj.kind == BLOB:
            path = os.path.join(root.blobs, obj.name[:2], obj.name[2:])
        else:
            path = os.path.join(folders[obj.kind], obj.name)
        if promised & (now.packed.get(obj.name, frozenset()) if obj.kind == PACK else {obj.name}):
            continue
        aside = None
        if obj.kind in (TREE, BLOB, PACK):
            remove(path)
        else:
            aside = _take(root, path)
        if os.path.lexists(path):
            stayed.append(path)
            promised |= now.blobs_of.get(obj.name, frozenset()) if obj.kind == TREE else set()
        else:
            taken[obj] = aside
    return taken, stayed


def _take(root: Root, path: str) -> Optional[str]:
    """Renames it aside and returns the new path. If tmp/ is on another disk (jobs/ may be a link to a larger one) or
    cannot take it, it stays in its own folder under a new name. None if it cannot be renamed."""
    name = "gc-%d-%s" % (os.getpid(), os.urandom(8).hex())
    for aside in (os.path.join(root.tmp, name), os.path.join(os.path.dirname(path), "." + name)):
        try:
            os.rename(path, aside)
            return aside
        except OSError:
            continue
    return None


# --- the report -------------------------------------------------------------------------------------------------------


def report(
    root: Root,
    seen: Inventory,
    chosen: Removals,
    remaining: List[str],
    unfetched: Mapping[str, Optional[UnpulledFiles]],
) -> GcReport:
    """For the client: what is or would be removed, why other jobs stay, and the free space."""
    disk = os.statvfs(existing_folder(root.path))
    stay = [job for job in seen.jobs if job.id not in {gone.id for gone in chosen.jobs}]
    groups = (
        ("not ended yet", [job for job in stay if not job.foreign and job.ended_s is None]),
        ("of other machines", [job for job in stay if job.foreign]),
        ("ended", [job for job in stay if not job.foreign and job.ended_s is not None]),
    )
    return GcReport(
        jobs=tuple(RemovedJob(job.id, job.size, job.ended_s, unfetched.get(job.id)) for job in chosen.jobs),
        rest=totals(chosen.objects),
        total_bytes=sum(job.size for job in chosen.jobs) + sum(t.size for t in chosen.objects),
        kept_jobs=tuple(_summary(what, jobs) for what, jobs in groups if jobs),
        remaining=tuple(remaining),
        free_bytes=disk.f_bavail * disk.f_frsize,
        root=root.path,
    )


def _summary(what: str, jobs: List[JobItem]) -> KeptJobs:
    oldest: Optional[float] = max((job.ended_s or 0.0 for job in jobs), default=None)
    return KeptJobs(what, len(jobs), sum(job.size for job in jobs), oldest)
