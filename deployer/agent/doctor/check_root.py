"""The doctor's checks of Torchferry's root: its disk, its jobs, the GPUs that they hold, and what gc would remove.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import List, Sequence

from ..gc.choose import AGENT, CACHE, DATA, ENV, GcObject, Policy, choose
from ..gc.inventory import read_inventory
from ..gpus.view import TICKET, Claim
from ..guard import TRUSTED, secure_root
from ..host.disk import NETWORK_KINDS, Disk
from ..host.layout import Root
from ..job.status import FINAL, LOST
from ..job.views import Row
from .check_host import LOW_DISK_BYTES
from .findings import FAIL, OK, WARN, Check, check, gigabytes

MUCH_BYTES = 10**9
LOW_INODES = 20000
_ELSEWHERE = "choose another folder with --remote-root DIR"


def check_root(root: Root) -> Check:
    """Whether this account, and no other, can write to the root; creates only the folder itself."""
    probe = os.path.join(root.tmp, "doctor-%d" % os.getpid())
    try:
        is_trusted = secure_root(root.path)
        os.makedirs(root.tmp, mode=0o700, exist_ok=True)
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as f:
            f.write("x")
        os.unlink(probe)
    except OSError as error:
        detail = "%s cannot be used: %s" % (error.filename or root.path, error.strerror)
        return check("root", FAIL, detail, _ELSEWHERE)
    if is_trusted:
        detail = "%s: other users can write there, and %s says that they may" % (root.path, TRUSTED)
        return check("root", WARN, detail, "whoever can write there can run code as you")
    return check("root", OK, root.path)


def check_root_file_system(disk: Disk) -> Check:
    detail = "%s (%s)" % (disk.path, disk.kind or "unknown file system")
    if disk.kind not in NETWORK_KINDS:
        return check("root file system", OK, detail)
    hint = "a folder on a disk of this machine is faster: --remote-root DIR"
    return check("root file system", WARN, detail + ": a network file system makes each launch slower", hint)


def check_root_disk(disk: Disk) -> Check:
    detail = "%s free of %s" % (gigabytes(disk.free_bytes), gigabytes(disk.size_bytes))
    if disk.free_bytes >= LOW_DISK_BYTES:
        return check("root disk", OK, detail)
    return check("root disk", WARN, detail + ": little for checkpoints", "deploy.py gc frees some, or " + _ELSEWHERE)


def check_root_inodes(disk: Disk) -> Check:
    if not disk.inodes:
        return check("root inodes", OK, "this file system does not count them")
    detail = "%d of %d free" % (disk.inodes_free, disk.inodes)
    if disk.inodes_free >= LOW_INODES:
        return check("root inodes", OK, detail)
    return check("root inodes", WARN, detail + ": no room for many files", "deploy.py gc frees some, or " + _ELSEWHERE)


def check_jobs(jobs: Sequence[Row]) -> Check:
    """`jobs`: from `requests.jobs.list_jobs`."""
    here = [job for job in jobs if not job.on_host]
    orphans = [job.id for job in here if job.unsupervised]
    lost = [job.id for job in here if job.state == LOST]
    detail = "%d, %d of them not ended" % (len(jobs), len([job for job in here if not job.ended_at]))
    if orphans:
        hint = "deploy.py status ID looks after it again; deploy.py stop ID ends it"
        return check("jobs", WARN, "%s; without a supervisor: %s" % (detail, _some(orphans)), hint)
    if lost:
        hint = "deploy.py status ID says why; deploy.py gc --older-than 30d removes old ones"
        return check("jobs", WARN, "%s; lost: %s" % (detail, _some(lost)), hint)
    return check("jobs", OK, detail)


def check_leases(claims: Sequence[Claim], jobs: Sequence[Row], *, exposed: str = "") -> Check:
    """Who holds GPUs, and whether an ended job still does: then a process of it is left. `exposed`: see gpus.places."""
    ended = {job.id for job in jobs if job.state in FINAL}
    stale = [claim.job for claim in claims if claim.job in ended]
    if stale:
        hint = "deploy.py stop ID ends what is left of it"
        return check("gpu leases", WARN, "held by jobs that have ended: " + _some(stale), hint)
    if exposed:
        return check("gpu leases", WARN, exposed + ", who can hide leases in it", "as root: chown root that folder")
    holds = ["%s of %s" % (claim.job, claim.user) for claim in claims if claim.kind != TICKET]
    waits = len(claims) - len(holds)
    detail = ("held by " + _some(holds)) if holds else "none"
    return check("gpu leases", OK, detail + ("; %d in the queue" % waits if waits else ""))


def _some(names: List[str]) -> str:
    more = " and %d more" % (len(names) - 3) if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_garbage(root: Root) -> Sequence[GcObject]:
    """What gc would remove without a limit. Does not walk through folders, so their size is 0."""
    return choose(read_inventory(root, measure=lambda path: 0), Policy()).objects


def check_garbage(objects: Sequence[GcObject]) -> Check:
    count = {kind: len([t for t in objects if t.kind == kind]) for kind in (ENV, DATA, AGENT, CACHE)}
    named = (
        *(("environment", count[ENV]), ("data set", count[DATA]), ("agent of another version", count[AGENT])),
        ("cache of compiled code", count[CACHE]),
    )
    size = sum(obj.size for obj in objects)
    parts = [gigabytes(size) + " of files"] + ["%d %s" % (n, _plural(what, n)) for what, n in named if n]
    detail = "gc would free " + ", ".join(parts)
    if size < MUCH_BYTES and not count[ENV] and not count[DATA]:
        return check("leftovers", OK, detail)
    return check("leftovers", WARN, detail, "deploy.py gc shows and removes it")


def _plural(what: str, count: int) -> str:
    first, _, rest = what.partition(" of ")
    return (first if count == 1 else first + "s") + (" of " + rest if rest else "")
