"""The doctor's checks of GPUs, their driver, and torch's needs of it. Pure, except `read_gpus`.

Stdlib only, Python 3.8: this package runs on the host.
"""

import re
from concurrent.futures import Executor
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from ..gpus import nvidia
from ..gpus.health import HARDWARE_XIDS, Report, read_report, read_xids
from .check_host import Python
from .findings import FAIL, OK, WARN, Check, check

CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
PACKAGES = ("torch", "pip", *CUDA_RUNTIMES)
"""Requested together, so that each interpreter starts once."""


class GpuFacts(NamedTuple):
    gpus: List[nvidia.Gpu]
    holders: List[nvidia.Holder]
    report: Report
    limit: Optional[nvidia.Limit] = None


def read_gpus(env: Dict[str, str], pool: Executor) -> GpuFacts:
    """All that nvidia-smi reports; the calls run at the same time. Raises AgentError if it fails or hangs."""
    report = pool.submit(read_report, env)
    using = pool.submit(nvidia.holders, env)
    gpus = nvidia.list_gpus(env)
    return GpuFacts(gpus, using.result(), report.result(), nvidia.read_limit(env, gpus))


# --- GPUs -------------------------------------------------------------------------------------------------------------


def check_driver(facts: GpuFacts) -> Check:
    if not facts.gpus:
        return check("driver", WARN, "no GPU seen (no nvidia-smi, or it lists none)", "jobs here: target.device=cpu")
    if not facts.report.cuda:
        return check("driver", OK, "NVIDIA %s" % (facts.report.driver or "of unknown version"))
    return check("driver", OK, "NVIDIA %s, for CUDA up to %s" % (facts.report.driver, facts.report.cuda))


def check_gpus(facts: GpuFacts) -> Iterator[Check]:
    """One finding for each GPU: its memory, and who uses it."""
    for gpu in facts.gpus:
        if gpu.fault:
            yield check("gpu %d" % gpu.index, FAIL, gpu.fault, "reset it (nvidia-smi -r), or reboot the machine")
            continue
        users = nvidia.users_of(gpu, facts.holders)
        memory = "%s, %d of %d MiB in use" % (gpu.name, gpu.memory_used_mib, gpu.memory_total_mib)
        hint = "--gpus names others, --queue waits for them, --allow-busy runs beside" if users else ""
        yield check("gpu %d" % gpu.index, WARN if users else OK, memory + (": " + users if users else ""), hint)


def check_gpu_limit(facts: GpuFacts) -> Optional[Check]:
    """The GPUs that CUDA_VISIBLE_DEVICES of the login leaves to jobs."""
    limit = facts.limit
    if limit is None or not facts.gpus:
        return None
    detail = "this login may use GPU %s of %d: CUDA_VISIBLE_DEVICES=%s" % (limit.labels, len(facts.gpus), limit.text)
    hint = "where no scheduler or administrator set it, unset it in the host's login files"
    return check("gpu limit", OK if limit.gpus else WARN, detail, "" if limit.gpus else hint)


def check_gpu_memory(facts: GpuFacts) -> Optional[Check]:
    """Memory in use on GPUs without a visible process."""
    if not facts.gpus:
        return None
    held = {holder.gpu_uuid for holder in facts.holders}
    ghosts = [g for g in facts.gpus if g.uuid not in held and g.memory_used_mib > nvidia.BUSY_MIB]
    if not ghosts:
        return check("gpu memory", OK, "none is in use without a process")
    where = ", ".join("GPU %d (%d MiB)" % (g.index, g.memory_used_mib) for g in ghosts)
    hint = "another container's, or left by a killed job: fuser -v /dev/nvidia* on the machine itself shows who"
    return check("gpu memory", WARN, "in use by no process that is seen: %s" % where, hint)


def check_persistence(facts: GpuFacts) -> Optional[Check]:
    if not facts.report.cards:
        return None
    off = [card for card in facts.report.cards if not card.persistence]
    if not off:
        return check("gpu persistence", OK, "on")
    detail = "off on %d of %d GPUs: each start waits for the driver" % (len(off), len(facts.report.cards))
    return check("gpu persistence", WARN, detail, "nvidia-smi -pm 1 (root)")


def check_gpu_errors(facts: GpuFacts) -> Optional[Check]:
    """Memory errors, and pages or rows that wait to be replaced."""
    cards = {card.uuid: card for card in facts.report.cards}
    known = [(gpu.index, cards[gpu.uuid]) for gpu in facts.gpus if gpu.uuid in cards]
    if not known:
        return None
    broken = ["GPU %d" % index for index, card in known if card.broken]
    if broken:
        return check("gpu errors", FAIL, "memory beyond repair: " + ", ".join(broken), "leave these GPUs out: --gpus")
    hit = ["GPU %d (%d uncorrectable)" % (n, c.uncorrectable) for n, c in known if c.uncorrectable or c.pending]
    if hit:
        hint = "a reset repairs what can be: nvidia-smi --gpu-reset (root), or reboot"
        return check("gpu errors", WARN, "memory errors: " + ", ".join(hit), hint)
    return check("gpu errors", OK, "no uncorrectable memory error since the driver was loaded")


def check_kernel_log(text: Optional[str]) -> Check:
    """`text`: the kernel's messages; None if they may not be read."""
    if text is None:
        return check("gpu faults", OK, "the kernel's log may not be read by this user, so Xid errors are not seen")
    found = read_xids(text)
    faults = [xid for xid in found if xid.number in HARDWARE_XIDS]
    if not faults:
        return check("gpu faults", OK, "%d Xid errors in the kernel's log, none of the hardware" % len(found))
    detail = "%d Xid errors of the hardware, the last: %s" % (len(faults), faults[-1].line[:200])
    return check("gpu faults", WARN, detail, "reboot the machine; if they come back, the card or its slot is broken")


# --- torch ------------------------------------------------------------------------------------------------------------


def check_torch(pythons: Sequence[Python]) -> Check:
    having = ["%s (%s)" % (_torch(p.packages), p.path) for p in pythons if "torch" in p.packages]
    if having:
        return check("torch", OK, "; ".join(having))
    return check("torch", WARN, "no interpreter here has it", "jobs build an environment first, which takes minutes")


def _torch(packages: Dict[str, str]) -> str:
    cuda = cuda_of(packages)
    return packages["torch"] + (" with CUDA %s" % cuda if cuda and "+cu" not in packages["torch"] else "")


def cuda_of(packages: Dict[str, str]) -> str:
    """torch's CUDA version, from its build ("+cu128" is 12.8) or its packages; "" for a CPU build."""
    build = re.search(r"\+cu(\d+)(\d)$", packages.get("torch", ""))
    if build:
        return "%s.%s" % build.groups()
    return next((packages[name] for name in CUDA_RUNTIMES if name in packages), "")


def check_cuda(pythons: Sequence[Python], facts: GpuFacts) -> Optional[Check]:
    """Whether the driver is new enough for an installed torch. Within a major version every driver works."""
    having = [p for p in pythons if "torch" in p.packages]
    if not facts.gpus or not having:
        return None
    built = [(cuda_of(p.packages), p) for p in having if "+cpu" not in p.packages["torch"]]
    if not built:
        hint = "jobs build their own environment, or name an interpreter with --python"
        return check("torch and driver", WARN, "torch here is for the CPU only, and there are GPUs", hint)
    limit = facts.report.cuda
    if not re.match(r"\d", limit) or not all(cuda for cuda, _ in built):
        return check("torch and driver", OK, "not compared: torch or the driver does not tell its CUDA version")
    fitting = [(cuda, p.path) for cuda, p in built if _major(cuda) <= _major(limit)]
    if fitting:
        return check("torch and driver", OK, "CUDA %s (%s) runs with this driver" % fitting[0])
    needs = ", ".join("%s of %s" % (cuda, p.path) for cuda, p in built)
    hint = "install a newer driver, or a torch for CUDA %s: name its interpreter with --python" % limit
    return check(
        "torch and driver", FAIL, "the driver supports CUDA up to %s, too old for CUDA %s" % (limit, needs), hint
    )


def _major(version: str) -> int:
    return int(version.split(".")[0])
