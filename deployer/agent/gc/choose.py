"""Decides what gc may remove: pure functions of a root's content. `inventory` reads it, `collect` removes it.

A job names what it needs: its record, config and status contain the hashes of its trees, its environment, its agent,
and the IDs of jobs whose checkpoints it started from. Everything that a kept job names stays.
Stdlib only, Python 3.8: this package runs on the host.
"""

from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .view import RemovedObjects

TREE, BLOB, PACK, DATA, ENV, AGENT = "tree", "blob", "pack", "data", "env", "agent"
SPARE, TMP, CACHE = "spare", "tmp", "cache"
HOUR_S, DAY_S = 3600.0, 86400.0
MIN_AGE_S = {
    TREE: HOUR_S,
    BLOB: HOUR_S,
    PACK: HOUR_S,
    DATA: HOUR_S,
    TMP: HOUR_S,
    ENV: DAY_S,
    AGENT: DAY_S,
    SPARE: 7 * DAY_S,
    CACHE: 30 * DAY_S,  # no job needs one: without it the next start takes longer
}
"""Seconds for which unneeded files stay: the process that made them may be about to use them."""


class JobItem(NamedTuple):
    id: str
    size: int  # bytes on the disk
    ended_s: Optional[float]  # seconds since it ended; None: it has not, or nobody here can tell
    foreign: bool  # another machine's, on a shared home
    names: FrozenSet[str]  # every word of its record, config and status: hashes, environments, other jobs' ids
    settled: bool  # those words hold its environment and agent too, as far as it will ever need them
    known: bool  # it has a record; without one, what a job needs is anybody's guess


class GcObject(NamedTuple):
    """An object of the root that is not a job: for example a blob, a tree or an environment."""

    kind: str
    name: str  # of a blob and tree the hash, of a leftover its path below the root, else that in its kind's folder
    size: int
    age_s: float
    in_use: bool = False  # a process of this host holds it


class Inventory(NamedTuple):
    jobs: Tuple[JobItem, ...]
    objects: Tuple[GcObject, ...]
    blobs_of: Mapping[str, FrozenSet[str]]  # tree -> its blobs
    packed: Mapping[str, FrozenSet[str]]  # pack -> the blobs in it
    names_of: Mapping[str, FrozenSet[str]]  # tree -> words of its links' targets, which may lead into a job
    spare_tree: Optional[str]


class Policy(NamedTuple):
    """Which ended jobs to remove. Without a limit, none."""

    older_than_s: Optional[float] = None  # those that ended longer ago
    max_bytes: Optional[int] = None  # the oldest, until everything takes no more than this
    keep_jobs: Optional[int] = None  # the newest so many stay; without another limit all others go
    only: Optional[FrozenSet[str]] = None  # none but these, whatever the limits say


class Removals(NamedTuple):
    jobs: Tuple[JobItem, ...]
    objects: Tuple[GcObject, ...]


def choose(inventory: Inventory, policy: Policy) -> Removals:
    """What to remove: the jobs that the policy allows, and objects that no other job needs."""
    gone = _choose_jobs(inventory, policy)
    kept = [job for job in inventory.jobs if job.id not in gone]
    return Removals(tuple(job for job in inventory.jobs if job.id in gone), leftovers(inventory, kept, policy))


# --- jobs -------------------------------------------------------------------------------------------------------------


def _choose_jobs(inventory: Inventory, policy: Policy) -> Set[str]:
    ended = [job for job in inventory.jobs if job.ended_s is not None and not job.foreign]
    oldest_first = sorted(ended, key=lambda job: (-(job.ended_s or 0.0), job.id))
    candidates = oldest_first[: max(0, len(ended) - (policy.keep_jobs or 0))]
    if policy.only is not None:
        candidates = [job for job in candidates if job.id in policy.only]
    named_by = _named_by(inventory)
    gone: Set[str] = set()
    while True:  # a job may go once the job that began from it has gone
        before = len(gone)
        for job in candidates:
            if job.id not in gone and not named_by[job.id] - gone and _is_given_up(job, gone, inventory, policy):
                gone.add(job.id)
        if len(gone) == before:
            return gone


def _named_by(inventory: Inventory) -> Dict[str, Set[str]]:
    """Job -> other jobs that started from its files, or whose code links to them."""
    named: Dict[str, Set[str]] = {job.id: set() for job in inventory.jobs}
    for job in inventory.jobs:
        linked = (names for tree, names in inventory.names_of.items() if tree in job.names)
        for name in job.names.union(*linked) & set(named):
            named[name].add(job.id)
    return {name: others - {name} for name, others in named.items()}


def _is_given_up(job: JobItem, gone: Set[str], inventory: Inventory, policy: Policy) -> bool:
    if policy.older_than_s is None and policy.max_bytes is None:
        return policy.keep_jobs is not None
    if policy.older_than_s is not None and (job.ended_s or 0.0) > policy.older_than_s:
        return True
    if policy.max_bytes is None:
        return False
    kept = [other for other in inventory.jobs if other.id not in gone]
    return _bytes_without(leftovers(inventory, kept, policy), inventory, kept) > policy.max_bytes


def _bytes_without(objects: Sequence[GcObject], inventory: Inventory, kept: Sequence[JobItem]) -> int:
    """Bytes that remain once only these jobs are left and these objects are removed."""
    freed = sum(obj.size for obj in objects)
    return sum(job.size for job in kept) + sum(obj.size for obj in inventory.objects) - freed


# --- what jobs share --------------------------------------------------------------------------------------------------


def unneeded(inventory: Inventory, kept: Sequence[JobItem]) -> Tuple[GcObject, ...]:
    """The objects that no job needs, if only these jobs are left."""
    needed = _needed_by_kind(kept)
    stays = {(t.kind, t.name) for t in inventory.objects if _stays(t, needed[t.kind])}
    trees = {name for kind, name in stays if kind == TREE}
    if inventory.spare_tree and any(kind == SPARE for kind, _ in stays):
        trees.add(inventory.spare_tree)
        stays.add((TREE, inventory.spare_tree))
    blobs: Set[str] = set().union(*(inventory.blobs_of.get(tree, frozenset()) for tree in trees))
    stays.update((BLOB, name) for name in blobs)
    stays.update((PACK, name) for name, inside in inventory.packed.items() if inside & blobs)
    return tuple(t for t in inventory.objects if (t.kind, t.name) not in stays)


def leftovers(inventory: Inventory, kept: Sequence[JobItem], policy: Policy) -> Tuple[GcObject, ...]:
    """The objects to remove if only these jobs are left: those that no job needs. If the rest is larger than the
    policy's size, also caches of any age, before any job."""
    idle = unneeded(inventory, kept)
    is_small = policy.max_bytes is None or _bytes_without(idle, inventory, kept) <= policy.max_bytes
    if is_small or _needed_by_kind(kept)[CACHE] is None:
        return idle
    gone = set(idle)
    return tuple(t for t in inventory.objects if t in gone or (t.kind == CACHE and not t.in_use))


def _needed_by_kind(kept: Sequence[JobItem]) -> Dict[str, Optional[Set[str]]]:
    """Kind -> names that stay; None: all of them, because a job may still need any."""
    unknown = any(job.ended_s is None and not job.known for job in kept)
    unsettled = unknown or any(job.ended_s is None and not job.settled for job in kept)
    words: Set[str] = set().union(*(job.names for job in kept))
    running: Set[str] = set().union(*(job.names for job in kept if job.ended_s is None))
    none: Set[str] = set()
    return {
        TREE: None if unknown else words,
        DATA: None if unknown else words,
        BLOB: None if unknown else none,
        PACK: None if unknown else none,
        ENV: None if unsettled else words,
        AGENT: None if unsettled else running,
        CACHE: None if any(job.ended_s is None for job in kept) else none,
        SPARE: none,
        TMP: none,
    }


def _stays(obj: GcObject, needed: Optional[Set[str]]) -> bool:
    return needed is None or obj.name in needed or obj.in_use or obj.age_s < MIN_AGE_S[obj.kind]


def totals(objects: Sequence[GcObject]) -> Tuple[RemovedObjects, ...]:
    """Number and size of the objects of each kind, in the order of MIN_AGE_S."""
    kinds = [(kind, [t for t in objects if t.kind == kind]) for kind in MIN_AGE_S]
    return tuple(
        RemovedObjects(kind, len(of), sum(t.size for t in of), max(t.age_s for t in of)) for kind, of in kinds if of
    )
