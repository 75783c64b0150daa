"""The host's GPUs and who uses them, according to nvidia-smi.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import os
import re
import shutil
import subprocess
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..host.errors import AgentError
from ..host.processes import user_name
from .view import auto_count

TIMEOUT_S = 10
BUSY_MIB = 1024
"""A GPU with more memory in use counts as busy even without a visible process: one in another container uses it."""
_GPU_FIELDS = "--query-gpu=index,uuid,name,memory.total,memory.used"
_APP_FIELDS = "--query-compute-apps=gpu_uuid,pid,used_memory"
CSV = "--format=csv,noheader,nounits"


class Gpu(NamedTuple):
    index: int  # type: ignore[assignment]  # as nvidia-smi counts (by PCI bus); hides tuple.index, which nobody needs
    uuid: str  # GPU-…, or MIG-… for a slice that was asked for by it
    name: str
    memory_total_mib: int
    memory_used_mib: int
    parent: str = ""  # of a slice: the GPU's uuid
    fault: str = ""  # what nvidia-smi says in the place of its memory, of one that no longer answers

    @property
    def device(self) -> str:
        """Its name in leases."""
        return "%s/%s" % (self.parent, self.uuid) if self.parent else self.uuid

    @property
    def label(self) -> str:
        """Its name in messages and options."""
        return self.uuid if self.parent else str(self.index)


class Holder(NamedTuple):
    """A process that computes on a GPU."""

    gpu_uuid: str
    pid: int  # of the host; in a container it may name no process that is seen there
    user: str  # "?" when the process is not seen
    command: str
    memory_mib: int

    @property
    def who(self) -> str:
        owner = "" if self.user == "?" else " of " + self.user
        return "pid %d%s, %s" % (self.pid, owner, self.command)


def list_gpus(env: Dict[str, str], *, timeout_s: float = TIMEOUT_S) -> List[Gpu]:
    """All GPUs; empty without nvidia-smi on the environment's PATH. Raises AgentError if nvidia-smi fails or hangs."""
    query = start_smi(env, _GPU_FIELDS, CSV)
    return _gpus_of(query, timeout_s) if query else []


def ask(env: Dict[str, str], fields: str) -> Optional[str]:
    """nvidia-smi's answer, one GPU per line; None without nvidia-smi. Raises AgentError if it fails or hangs."""
    query = start_smi(env, fields, CSV)
    return _finish(query) if query else None


def holders(env: Dict[str, str]) -> List[Holder]:
    """The processes that compute on the GPUs, as far as this session may see them."""
    query = start_smi(env, _APP_FIELDS, CSV)
    return _parse_holders(_finish(query)) if query else []


class Limit(NamedTuple):
    """The GPUs that a login may use: a scheduler or an administrator has set CUDA_VISIBLE_DEVICES for it.

    GPUs that a cgroup or a container excludes are not listed by nvidia-smi either, and CUDA counts in the same way.
    """

    text: str
    gpus: Sequence[Gpu]  # slices among them; none where nothing that is there is named

    def allows(self, gpu: Gpu) -> bool:
        return any(gpu.device == own.device or gpu.device.startswith(own.device + "/") for own in self.gpus)

    @property
    def labels(self) -> str:
        return ", ".join(gpu.label for gpu in self.gpus) or "none"


class GpuView(NamedTuple):
    """The GPUs of the host as nvidia-smi shows them at one moment."""

    gpus: Sequence[Gpu]
    named: Sequence[Gpu]  # those that a job names, in its order, slices among them
    using: Sequence[Holder]
    limit: Optional[Limit] = None

    @property
    def known(self) -> List[Gpu]:
        """The host's GPUs, and the slices to which the login is limited."""
        return [*self.gpus, *(gpu for gpu in (self.limit.gpus if self.limit else ()) if gpu.parent)]

    @property
    def usable(self) -> Sequence[Gpu]:
        """The GPUs from which auto:N may choose."""
        return [gpu for gpu in (self.limit.gpus if self.limit else self.gpus) if not gpu.fault]

    def busy(self) -> Dict[str, str]:
        """Busy device -> who computes on it, as text."""
        users = {gpu.device: users_of(gpu, self.using) for gpu in [*self.gpus, *self.named]}
        return {device: who for device, who in users.items() if who}


def read_gpus(
    requested: Sequence[str], env: Dict[str, str], *, on_cpu: str = "--device cpu", limited: bool = False
) -> GpuView:
    """The host's GPUs and the requested ones: by index, UUID or the beginning of one, or as auto:N.

    Raises AgentError if the host lacks a requested GPU or one is named twice. `limited`: apply CUDA_VISIBLE_DEVICES of
    `env`: auto:N chooses only from these GPUs, and a named GPU outside them is an error. `on_cpu`: the option that runs
    the job without GPUs, for the hint.
    """
    # both at the same time: without persistence mode each takes about a second
    of_gpus = start_smi(env, _GPU_FIELDS, CSV)
    try:
        of_apps = start_smi(env, _APP_FIELDS, CSV)
    except AgentError:
        if of_gpus is not None:
            of_gpus.kill()
            of_gpus.wait()
        raise
    hint = "run on its CPUs with %s, or choose another machine" % on_cpu
    lacks = ", so no GPU %s" % ", ".join(requested) if requested else ""
    if of_gpus is None or of_apps is None:
        raise AgentError("host", "%s has no nvidia-smi%s" % (_machine(), lacks or ", so no GPU is seen"), hint)
    try:
        gpus, using = _gpus_of(of_gpus), _parse_holders(_finish(of_apps))
    finally:
        of_apps.kill()  # it may hang as the first one did
    if not gpus:
        raise AgentError("host", "%s has no GPU%s" % (_machine(), lacks), hint)
    count, limit = auto_count(requested), read_limit(env, gpus) if limited else None
    named = [] if count else [_find(text, gpus, env, hint=_hint_of_count(requested)) for text in requested]
    gpu_view = GpuView(gpus, named, using, limit)
    if count > len(gpu_view.usable):
        raise AgentError("host", _too_few(gpu_view, count), hint)
    for n, gpu in enumerate(named):
        if gpu.uuid in [other.uuid for other in named[:n]]:
            raise AgentError("usage", "GPU %s is named twice: %s" % (gpu.index, ", ".join(requested)), "name each once")
        if gpu.fault:
            message = "GPU %s of %s does not answer: %s" % (gpu.label, _machine(), gpu.fault)
            raise AgentError(
                "host", message, "name others with --gpus; that one needs a reset, or the machine a reboot"
            )
    if limit and not all(map(limit.allows, named)):
        wanted = ", ".join(gpu.label for gpu in named)
        what = "GPU %s" % limit.labels if limit.gpus else "no GPU"
        message = "this login may use %s of %s (CUDA_VISIBLE_DEVICES=%s), and %s asks for GPU %s"
        others = "name those with --gpus, or --gpus auto:%d" % len(limit.gpus) if limit.gpus else hint
        raise AgentError(
            "host",
            message % (what, _machine(), limit.text, ",".join(requested), wanted),
            others + "; where that is no limit, unset the variable in the host's login",
        )
    return gpu_view


def read_limit(env: Dict[str, str], gpus: Sequence[Gpu]) -> Optional[Limit]:
    """The GPUs in CUDA_VISIBLE_DEVICES, as CUDA reads it: up to the first entry that is not a GPU of this host. None if
    it is not set."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None or text.strip() == "all":
        return None
    allowed: List[Gpu] = []
    for entry in text.split(","):
        try:
            allowed.append(_find(entry.strip(), gpus, env))
        except AgentError:
            break
    return Limit(text[:200], list(dict.fromkeys(allowed)))


def _too_few(gpu_view: GpuView, count: int) -> str:
    faults = ", ".join("GPU %d does not answer" % gpu.index for gpu in gpu_view.gpus if gpu.fault)
    has = "%s has %d GPUs%s" % (_machine(), len(gpu_view.gpus), ", " + faults if faults else "")
    if gpu_view.limit:
        has += ", of which this login may use %s (CUDA_VISIBLE_DEVICES=%s)" % (
            gpu_view.limit.labels,
            gpu_view.limit.text,
        )
    return "%s, fewer than auto:%d asks for" % (has, count)


def _hint_of_count(requested: Sequence[str]) -> str:
    """A hint for a user who may have meant a number of GPUs, as other tools' --gpus does."""
    alone = requested[0] if len(requested) == 1 else ""
    if not re.match(r"[1-9][0-9]?\Z", alone):
        return ""
    count = "%s GPUs" % alone if alone != "1" else "one GPU"
    return ". %s is the index of one GPU; --gpus auto:%s asks for %s" % (alone, alone, count)


def _find(text: str, gpus: Sequence[Gpu], env: Dict[str, str], *, hint: str = "") -> Gpu:
    if text.startswith("MIG-"):
        return _find_slice(text, gpus, env)
    found = [g for g in gpus if text == str(g.index) or (text.startswith("GPU-") and g.uuid.startswith(text))]
    if len(found) == 1:
        return found[0]
    has = ", ".join("%d (%s)" % (g.index, g.name) for g in gpus)
    what = "has several GPUs that begin with %s" if found else "has no GPU %s"
    raise AgentError(
        "host",
        ("%s " + what + "; it has %s") % (_machine(), text, has),
        "name another GPU with --gpus or target.gpu_ranks" + hint,
    )


def _find_slice(text: str, gpus: Sequence[Gpu], env: Dict[str, str]) -> Gpu:
    query = start_smi(env, "-L")
    index: Optional[int] = None
    for line in _finish(query).splitlines() if query else []:
        of_gpu = re.match(r"GPU (\d+):", line)
        index = int(of_gpu.group(1)) if of_gpu else index
        of_slice = re.search(r"UUID: (MIG-[^)\s]+)", line)
        if of_slice and of_slice.group(1) == text:
            whole = next(g for g in gpus if g.index == index)
            return whole._replace(uuid=text, memory_used_mib=0, parent=whole.uuid)
    raise AgentError("host", "%s has no GPU slice %s" % (_machine(), text), "nvidia-smi -L lists them")


def _machine() -> str:
    return "host " + os.uname().nodename


def users_of(gpu: Gpu, using: Sequence[Holder], *, memory: bool = True) -> str:
    """Who uses a GPU, as text, with the memory in use; "" if it is free."""
    here = [h for h in using if h.gpu_uuid == gpu.uuid]
    if here:
        return ", ".join(h.who + (", %d MiB" % h.memory_mib if memory else "") for h in here)
    if gpu.memory_used_mib > BUSY_MIB:
        size = "%d MiB " % gpu.memory_used_mib if memory else ""
        return size + "in use by a process that this login cannot see (in another container?)"
    return ""


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


def start_smi(env: Dict[str, str], *arguments: str) -> "Optional[subprocess.Popen[str]]":
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return None
    try:
        return subprocess.Popen(
            [program, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors="replace",
        )
    except OSError as error:
        is_short = error.errno in (errno.EAGAIN, errno.ENOMEM)
        hint = "the host has no processes or no memory left" if is_short else "repair the GPU driver"
        raise AgentError("host", "nvidia-smi cannot be started: %s" % error.strerror, hint) from None


def _gpus_of(query: "subprocess.Popen[str]", timeout_s: float = TIMEOUT_S) -> List[Gpu]:
    """The GPUs that answer, even if nvidia-smi fails for another one."""
    output, failure = _output(query, timeout_s)
    gpus = _parse_gpus(output)
    if failure and not gpus:
        raise failure
    return gpus


def _finish(query: "subprocess.Popen[str]") -> str:
    output, failure = _output(query, TIMEOUT_S)
    if failure:
        raise failure
    return output


def _output(query: "subprocess.Popen[str]", timeout_s: float) -> Tuple[str, Optional[AgentError]]:
    try:
        output = query.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        query.kill()
        raise AgentError(
            "host",
            "nvidia-smi gave no answer within %g s" % timeout_s,
            "the GPU driver hangs: look at dmesg on the host",
        )
    if query.returncode != 0:
        reason = " ".join(output.split())[:300] or "no message"
        ended = "nvidia-smi ended with %d: %s" % (query.returncode, reason)
        return output, AgentError("host", ended, "repair the GPU driver")
    return output, None


def _parse_gpus(text: str) -> List[Gpu]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") >= 4]
    return [
        Gpu(int(r[0]), r[1], ",".join(r[2:-2]), _number(r[-2]), _number(r[-1]), fault=_fault(r[-2:]))
        for r in rows
        if _is_number(r[0])
    ]


def _fault(cells: Sequence[str]) -> str:
    """The text in place of the memory of a GPU that does not answer: `[GPU is lost]`, `[GPU requires reset]`, `[Unknown
    Error]`. A value that the driver does not report (`[N/A]`) is not a fault."""
    return next((cell for cell in cells if re.search(r"lost|reset|err", cell, re.IGNORECASE)), "")[:100]


def _parse_holders(text: str) -> List[Holder]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    seen = [(uuid, int(pid), _number(memory)) for uuid, pid, memory in rows if _is_number(pid)]
    return [Holder(uuid, pid, _user_of(pid), _command_of(pid), memory) for uuid, pid, memory in seen]


def _number(cell: str) -> int:
    """MiB; 0 if the driver does not report it ("[N/A]")."""
    return int(cell) if _is_number(cell) else 0


def _is_number(cell: str) -> bool:
    return re.match(r"[0-9]{1,15}\Z", cell) is not None


def _user_of(pid: int) -> str:
    try:
        return user_name(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return "?"


def _command_of(pid: int) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as f:
            words = f.read(400).split(b"\0")
    except OSError:
        return "a process that this login cannot see"
    return " ".join(word.decode("utf-8", "replace") for word in words if word)[:120] or "?"
