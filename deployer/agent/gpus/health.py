"""Reads faults of GPUs from the driver and the kernel's log: memory errors, Xid messages.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import shutil
import subprocess
from typing import Dict, List, NamedTuple, Optional
from xml.etree import ElementTree

from ..host.errors import AgentError
from . import nvidia

HARDWARE_XIDS = (46, 48, 61, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140)
"""Xids of the card, its link or its firmware; the others are mostly a program's mistake (NVIDIA, "Xid Errors")."""
_PENDING = ("pending_retirement", "pending_blacklist", "remapped_row_pending", "channel_repair_pending")
_BROKEN = ("remapped_row_failure", "unrepairable_memory")


class Card(NamedTuple):
    """What `nvidia-smi -q` reports of one GPU, except memory and processes."""

    uuid: str
    persistence: bool
    uncorrectable: int  # memory errors since the driver was loaded
    pending: bool  # a repair waits for a reset
    broken: bool


class Report(NamedTuple):
    driver: str
    cuda: str  # the newest that the driver supports, "" when it does not tell
    cards: List[Card]


def read_report(env: Dict[str, str]) -> Report:
    """A report of every card; empty without nvidia-smi. Raises AgentError if it hangs."""
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return Report("", "", [])
    try:
        done = subprocess.run(
            [program, "-q", "-x"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=nvidia.TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise AgentError("host", "nvidia-smi -q gave no answer", "the GPU driver hangs: look at dmesg on the host")
    return parse_report(done.stdout)


def parse_report(text: bytes) -> Report:
    """Parses `nvidia-smi -q -x`, whose elements differ between drivers; a missing one counts as fine."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return Report("", "", [])
    cards = [_card(element) for element in root.iter("gpu")]
    return Report(root.findtext("driver_version", ""), root.findtext("cuda_version", ""), cards)


def _card(gpu: ElementTree.Element) -> Card:
    volatile = gpu.find("ecc_errors/volatile")
    errors = [e.text or "" for e in volatile.iter() if _is_uncorrectable(e.tag)] if volatile is not None else []
    said_yes = {e.tag for e in gpu.iter() if (e.text or "").strip() == "Yes"}
    return Card(
        uuid=gpu.findtext("uuid", ""),
        persistence=gpu.findtext("persistence_mode", "Enabled") != "Disabled",
        uncorrectable=sum(int(text) for text in errors if text.isdigit()),
        pending=bool(said_yes.intersection(_PENDING)),
        broken=bool(said_yes.intersection(_BROKEN)),
    )


def _is_uncorrectable(tag: str) -> bool:
    return "uncorrectable" in tag


# --- the kernel's log -------------------------------------------------------------------------------------------------

_XID = re.compile(r"(?:^(?:<\d+>)?\[\s*(\d+\.\d+)\])?.*NVRM: Xid [^:]*\([^)]*\): (\d+)")


class Xid(NamedTuple):
    """A driver message about a GPU error."""

    number: int
    line: str
    boot_s: Optional[float] = None
    """Its time by the kernel's clock, which is nearly the monotonic one; None if the log has no times."""


def read_xids(kernel_log: str) -> List[Xid]:
    found = []
    for line in kernel_log.splitlines():
        match = _XID.search(line) if "NVRM: Xid" in line else None
        if match is not None:
            at = match.group(1)
            found.append(Xid(int(match.group(2)), line.strip(), float(at) if at else None))
    return found


def read_kernel_log() -> Optional[str]:
    """The kernel's messages that are still stored; None if this user may not read them."""
    import ctypes

    read_all, size = 3, 1 << 20
    text = ctypes.create_string_buffer(size)
    try:
        length = ctypes.CDLL(None).klogctl(read_all, text, size)
    except AttributeError:
        return None
    return text.raw[:length].decode("utf-8", "replace") if length >= 0 else None
