"""How busy the host's GPUs are now, according to nvidia-smi.

Stdlib only, Python 3.8: this package runs on the host.
"""

import re
from typing import Dict, List, Optional, Tuple

from . import nvidia
from .view import GpuLoad

_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,power.draw,power.limit,temperature.gpu"
MOST_GPUS = 64


def read_load(env: Dict[str, str]) -> Tuple[GpuLoad, ...]:
    """The load of each GPU; empty without nvidia-smi. Raises AgentError if it fails or hangs."""
    text = nvidia.ask(env, "--query-gpu=" + _FIELDS)
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    # a name may hold commas
    loads = [GpuLoad(r[0], ",".join(r[1:-6])[:80], *map(_number, r[-6:])) for r in rows if _is_row(r)]
    return tuple(loads[:MOST_GPUS])


def _is_row(cells: List[str]) -> bool:
    return len(cells) >= 8 and re.match(r"[0-9]{1,5}\Z", cells[0]) is not None


def _number(cell: str) -> Optional[float]:
    """The number; None if the driver does not report it (`[N/A]`)."""
    return float(cell) if re.match(r"[0-9]{1,9}(\.[0-9]{1,9})?\Z", cell) else None
