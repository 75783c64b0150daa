"""Faults that are planted in the shipped sources, one at a time: the search has to find each.

Each is a change of the source as it is loaded; the product itself knows nothing of them.
"""

from __future__ import annotations

import os
from typing import NamedTuple

CHOSEN = "TORCHFERRY_WORLD_PLANTED"
"""The environment variable that names the one to plant; it has to be set before the sources are loaded."""


class Planted(NamedTuple):
    module: str
    old: str
    new: str
    seed: int
    """Of a schedule that finds it."""
    more: tuple[tuple[str, str], ...] = ()
    """What else is changed in the same module."""


PLANTED = {
    "lease released before the start": Planted(
        "deployer.agent.supervisor.life",
        "            self.status.note(devices=self.gpus.devices)\n",
        "            self.status.note(devices=self.gpus.devices)\n            self.gpus.release(ended=True)\n",
        seed=2,
    ),
    "orphan judged without a look at its processes": Planted(
        "deployer.agent.job.judge",
        "    if found.others:\n        return status._replace(state=RUNNING, unsupervised=True)\n",
        "",
        seed=44,
    ),
    "orphan that left something running judged ended": Planted(
        "deployer.agent.job.judge",
        "    if found.others:\n        return status._replace(state=RUNNING, unsupervised=True)\n",
        "    if found.others and not any(r.code is not None for r in read_ranks(job, status.attempt)):\n"
        "        return status._replace(state=RUNNING, unsupervised=True)\n",
        seed=223,
    ),
    "end that is not recorded": Planted(
        "deployer.agent.rank",
        "    _write(record, {**started, **_end(code, signum)})\n    return code\n",
        "    return code\n",
        seed=2,
    ),
    "launcher's signal that counts as success": Planted(
        "deployer.agent.supervisor.children",
        "self._codes[pid] = exit_code(wait_status)",
        "self._codes[pid] = (wait_status >> 8) & 0xFF",
        seed=179,
    ),
    "ticket that is believed for its size and time": Planted(
        "deployer.agent.gpus.leases",
        'return self.fd >= 0 and os.pread(self.fd, MAX_BYTES, 0) != _text(self.claim).encode("ascii")',
        "return self.fd >= 0 and os.fstat(self.fd).st_size != len(_text(self.claim))",
        seed=1325,
    ),
    "lease that makes no sense keeps nobody out": Planted(
        "deployer.agent.gpus.leases",
        "            claim = _of_all(place, name)\n",
        "            pass\n",
        seed=8917,
    ),
    "status written before the sweep": Planted(
        "deployer.agent.supervisor.life",
        "        self._sweep()\n        self.status.note(\n            **ending",
        "        self.status.save(**ending._asdict())\n        self._sweep()\n"
        "        self.status.note(\n            **ending",
        seed=1,
    ),
    "offset one too high": Planted(
        "deployer.launch.logview",
        "self.offsets[file] = offset + len(data)\n",
        "self.offsets[file] = offset + len(data) + 1\n",
        seed=16,
    ),
    "launch that looks for no job before it": Planted(
        "deployer.agent.requests.launch",
        "    if not start.has_begun(job, 1):\n        return False\n    record",
        "    if True:\n        return False\n    record",
        seed=294,
    ),
    "launches that do not wait for each other": Planted(
        "deployer.agent.host.locks",
        "            fcntl.flock(fd, fcntl.LOCK_EX)\n            if _leads_to(job.lock, fd):\n",
        "            if _leads_to(job.lock, fd):\n",
        seed=1150,
    ),
    "status that is not synced": Planted(
        "deployer.agent.host.files",
        "            if sync:\n                os.fsync(f.fileno())\n",
        "",
        seed=10,
    ),
    "name that is not synced": Planted(
        "deployer.agent.host.files",
        "        os.fsync(fd)\n    except OSError:  # some network",
        "        pass\n    except OSError:  # some network",
        seed=29,
    ),
    "status written in place": Planted(
        "deployer.agent.host.files",
        '    temporary = aside or "%s.%d-%s.tmp" % (path, os.getpid(), os.urandom(4).hex())',
        "    temporary = aside or path",
        seed=0,
    ),
    "queue that serves the last first": Planted(
        "deployer.agent.gpus.queue",
        "key=lambda c: (c.number, c.since, c.file))",
        "key=lambda c: (-c.number, c.since, c.file))",
        seed=2,
    ),
    "ticket that keeps nobody waiting": Planted(
        "deployer.agent.gpus.queue",
        "        taken += chosen if chosen is not None else _waits_for(ticket, gpus)\n",
        "        taken += chosen if chosen is not None else ()\n",
        seed=14,
    ),
    "GPU in use that counts as free": Planted(
        "deployer.agent.gpus.nvidia",
        "        return {device: who for device, who in users.items() if who}\n",
        "        return {}\n",
        seed=1,
    ),
    "lease that others' leases do not keep out": Planted(
        "deployer.agent.gpus.queue",
        "    taken = [device for lease in leases for device in lease.devices or everything]\n",
        "    taken = []\n",
        seed=0,
    ),
    "lease that ranks do not inherit": Planted(
        "deployer.agent.supervisor.attempt",
        "gpus.stdin if gpus is not None else subprocess.DEVNULL",
        "subprocess.DEVNULL",
        seed=223,
    ),
    "claims that are not locked while one chooses": Planted(
        "deployer.agent.gpus.leases",
        "    with opened() as places, locked(places, timeout_s):\n        yield Claims(places)\n",
        "    with opened() as places:\n        yield Claims(places)\n",
        seed=55,
    ),
    "last word believed whatever runs": Planted(
        "deployer.agent.job.judge",
        "    if known & ours or unswept or (found.supervisors and ours):\n",
        "    if False:\n",
        seed=1428,
    ),
    "signal recorded as a code": Planted(
        "deployer.agent.rank",
        "(128 + os.WTERMSIG(status), os.WTERMSIG(status))",
        "(os.WTERMSIG(status), os.WTERMSIG(status))",
        seed=3,
    ),
    "last failure taken for the first": Planted(
        "deployer.agent.job.ending",
        "    return min(failing, key=lambda r: (r.ended_mono_ns, r.rank)) if failing else None\n",
        "    return max(failing, key=lambda r: (r.ended_mono_ns, r.rank)) if failing else None\n",
        seed=14,
    ),
    "ends compared by the wall clock": Planted(
        "deployer.agent.job.ending",
        "    return min(failing, key=lambda r: (r.ended_mono_ns, r.rank)) if failing else None\n",
        "    return min(failing, key=lambda r: (r.ended_at_ns, r.rank)) if failing else None\n",
        seed=6938,
    ),
    "stop that hides an earlier failure": Planted(
        "deployer.agent.job.ending",
        "    if known.stop is not None and not _ended_before(ranks, known.groups, known.stop.requested_mono):\n",
        "    if known.stop is not None:\n",
        seed=479,
    ),
    "state read after the log": Planted(
        "deployer.agent.requests.follow",
        "        now = judge(job)\n        chunks = reader.poll()\n",
        "        chunks = reader.poll()\n        call.cancelled.wait(0.05)\n        now = judge(job)\n",
        seed=16,
    ),
    "attempt that keeps its number": Planted(
        "deployer.agent.supervisor.life",
        "            attempt=now.attempt + 1,\n",
        "            attempt=now.attempt,\n",
        seed=9,
    ),
    "launcher's code that counts as success": Planted(
        "deployer.agent.job.ending",
        '    if code == 0:\n        return Ending(SUCCEEDED, 0, "exited with code 0")\n    signum',
        '    if code < 2:\n        return Ending(SUCCEEDED, 0, "exited with code 0")\n    signum',
        seed=136,
    ),
    "acknowledgement before the job is there": Planted(
        "deployer.agent.requests.launch",
        "    already = _existing(job, request.plan)\n    if not already:\n",
        "    already = _existing(job, request.plan)\n"
        '    call.send_event("ack", to_json(Ack(job.id, job.path, already)))\n    if not already:\n',
        seed=0,
    ),
    "resume that looks for no attempt before it": Planted(
        "deployer.agent.requests.resume",
        "    if not start.has_begun(job, number):\n        return False\n",
        "    if True:\n        return False\n",
        seed=544,
    ),
    "resume that keeps the former stop": Planted(
        "deployer.agent.requests.resume",
        "    remove(job.stop)\n",
        "",
        seed=984,
    ),
    "resume with code that a power cut emptied": Planted(
        "deployer.agent.requests.resume",
        "            _mend_code(root, job, plan)\n",
        "",
        seed=29,
    ),
    "resume that writes into the former log": Planted(
        "deployer.agent.host.layout",
        'os.path.join(self.path, kind, "attempt_%d" % attempt)',
        'os.path.join(self.path, kind, "attempt_%d" % min(attempt, 1))',
        seed=14,
    ),
    "collection that takes what a kept job includes": Planted(
        "deployer.agent.gc.choose",
        "        DATA: None if unknown else words,\n",
        "        DATA: none,\n",
        seed=49,
    ),
    "place in the queue of one account alone": Planted(
        "deployer.agent.gpus.leases",
        "        return claim and claim._replace(uid=found.st_uid",
        "        if claim and claim.kind == 'ticket' and found.st_uid != os.geteuid():\n            return None\n"
        "        return claim and claim._replace(uid=found.st_uid",
        seed=14,
    ),
    "sweep that only asks": Planted(
        "deployer.agent.host.killing",
        "    deadline = time.monotonic() + KILL_S\n    while left and time",
        "    deadline = time.monotonic()\n    while left and time",
        seed=99,
    ),
    "process told by its number alone": Planted(
        "deployer.agent.host.processes",
        "return stat is not None and stat.start_time == process.start_time and",
        "return stat is not None and",
        seed=399,
    ),
    "queue left before the lease is held": Planted(
        "deployer.agent.gpus.claim",
        "        with claiming() as claims:\n"
        "            chosen = self._granted(self._others(claims.read(), ticket), gpu_view, busy=gpu_view.busy())\n"
        "            if chosen is None:\n                return\n",
        "        chosen = self._granted(self._others(read_claims(), ticket), gpu_view, busy=gpu_view.busy())\n"
        "        if chosen is None:\n            return\n"
        "        ticket.release(ended=True)\n        time.sleep(1.0)\n        with claiming() as claims:\n",
        seed=114,
    ),
    "job judged lost while its supervisor lives": Planted(
        "deployer.agent.job.judge",
        "    if found.supervisors:\n        return status  # one",
        "    if False:\n        return status  # one",
        seed=1,
        more=(("is_alive(identity) and supervises(identity.pid, job)", "False"),),
    ),
    "collection that takes the contents of a tree that stayed": Planted(
        "deployer.agent.gc.collect",
        "            promised |= now.blobs_of.get(obj.name, frozenset()) if obj.kind == TREE else set()\n",
        "",
        seed=11011629,
    ),
    "collection that does not remove what it took": Planted(
        "deployer.agent.gc.collect",
        "        remove_folder(aside)\n    left = [aside for aside in asides if os.path.lexists(aside)]\n",
        "        pass\n    left = []\n",
        seed=89,
    ),
    "attempt told of twice": Planted(
        "deployer.agent.supervisor.life",
        "for one in self.status.now.attempts if one.attempt != report.attempt]",
        "for one in self.status.now.attempts]",
        seed=319,
    ),
    "stop that sees no resume meanwhile": Planted(
        "deployer.agent.requests.stop",
        "        if final.state not in FINAL:  # somebody has started it again meanwhile\n"
        "            runs, was = True, final.state\n",
        "",
        seed=1624,
    ),
    "code unchecked where the store has lost its tree": Planted(
        "deployer.agent.requests.resume",
        "        if store.has_tree(plan.tree) or os.path.exists(job.listing):",
        "        if store.has_tree(plan.tree):",
        seed=2444,
    ),
    "host that is another while its name cannot be read": Planted(
        "deployer.agent.host.machine",
        '        if error.errno in _FOR_GOOD:\n            return ""\n',
        '        return ""\n',
        seed=70174,
    ),
    "attempts numbered anew without a status": Planted(
        "deployer.agent.job.judge",
        "        attempt = latest_attempt(job) or 0  # the next one must not write into its files\n",
        "        attempt = 0\n",
        seed=71444,
    ),
    "job without a status launched once more": Planted(
        "deployer.agent.supervisor.start",
        "    if os.path.isdir(job.logs(attempt)) or (attempt == 1 and os.path.exists(job.status)):\n",
        "    if attempt == 1 and os.path.exists(job.status):\n",
        seed=90189,
    ),
    "data set that is not synced": Planted(
        "deployer.agent.store.content",
        "            _sync(entries, aside)  # nobody compares their content again, also after a power cut\n",
        "",
        seed=2449,
    ),
    "supervisor that comes late": Planted(
        "deployer.agent.supervisor.start",
        "    if not launch_input.adopt and has_begun(job, launch_input.attempt):\n"
        '        sys.exit("attempt %d has been begun by another supervisor" % launch_input.attempt)\n',
        "",
        seed=133185,
    ),
}


def planted(module: str, source: str) -> str:
    """The source with the chosen fault in it, if that is this module's."""
    from tests.world.trainer.planted import PLANTED as OF_TRAINER

    fault = {**PLANTED, **OF_TRAINER}.get(os.environ.get(CHOSEN, ""))
    if fault is None or fault.module != module:
        return source
    for old, new in ((fault.old, fault.new), *fault.more):
        assert source.count(old) == 1, (module, old, source.count(old))
        source = source.replace(old, new)
    return source
