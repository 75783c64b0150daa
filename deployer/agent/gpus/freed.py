"""Whether a stopped job's GPUs are free again according to nvidia-smi: no process of the job, and no unexplained
memory.

Stdlib only, Python 3.8, Linux.
"""

import os
import re
import time
from typing import Collection, Dict, List, Optional, Sequence, Tuple

from ..host.processes import command_of
from . import nvidia
from .nvidia import BUSY_MIB, Gpu, Holder
from .view import GpuHolder

WAIT_S = 5.0
"""Seconds to wait: the driver frees a dead process's memory a little later."""
_POLL_S = 0.2
_DEVICE = re.compile(r"/dev/nvidia\d+\Z")


def still_held(
    wanted: Sequence[Gpu], using: Sequence[Holder], ours: Collection[int], *, allow_busy: bool = False
) -> List[GpuHolder]:
    """What the job left on its GPUs. `ours`: the PIDs that it had. With `allow_busy`, processes that are not visible
    here (in another container) may have been there before it."""
    held: List[GpuHolder] = []
    for gpu in wanted:
        here = [h for h in using if h.gpu_uuid == gpu.uuid]
        left = [h for h in here if h.pid in ours or (h.user == "?" and not allow_busy)]
        held += [GpuHolder(gpu.index, h.pid, h.command, h.memory_mib) for h in left]
        unexplained = gpu.memory_used_mib - sum(h.memory_mib for h in here)
        if not left and unexplained > BUSY_MIB and all(h.memory_mib for h in here):
            held.append(GpuHolder(gpu.index, None, "no process that is seen here", unexplained))
    return held


def wait_until_free(
    names: Sequence[str], env: Dict[str, str], ours: Collection[int], *, allow_busy: bool = False
) -> Tuple[Optional[bool], List[GpuHolder]]:
    """(whether these GPUs are free, what holds them), once they are free or WAIT_S have passed.

    None if it cannot be determined: whatever nvidia-smi does, the job's final status must be written.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            gpu_view = nvidia.read_gpus(names, env)
            held = still_held(gpu_view.named, gpu_view.using, ours, allow_busy=allow_busy)
        except Exception:
            return None, []
        if not held or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if any(h.pid is None for h in held):
        held += device_holders()
    return not held, held


def device_holders(devices: "re.Pattern[str]" = _DEVICE) -> List[GpuHolder]:
    """The processes that have a GPU's device file open, as far as this user may see them. A forked child that only
    inherited the descriptor is not listed by nvidia-smi, but it keeps the memory."""
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        device = _open_device(pid, devices)
        if device is not None:
            number = re.sub(r".*\D", "", device)
            found.append(GpuHolder(int(number or 0), pid, "%s holds %s" % (command_of(pid), device), 0))
    return found


def _open_device(pid: int, devices: "re.Pattern[str]") -> Optional[str]:
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        try:
            target = os.readlink(os.path.join(folder, name))
        except OSError:
            continue
        if devices.match(target):
            return target
    return None
