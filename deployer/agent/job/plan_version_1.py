"""Reads plans of version 1, which had no roles and no request, from jobs of an earlier Torchferry.

Stdlib only, Python 3.8: both sides use it.
"""

import json
import re
from typing import Any, Dict, List, Literal, Mapping, NamedTuple, Optional, Tuple

from ..host.typed import InvalidData, from_json
from ..python.spec import PythonSpec
from .plan import TRAINER, Devices, Include, Plan, Policy, Request, Role, RoleName, Slot, Text

MOST_PROCESSES = 1024
"""Maximum number of processes, each of which becomes a GPU: a damaged plan may contain any number."""
_AGENTS_WRAPPER = (Slot("agent"), "/rank.py")


class _Policy(NamedTuple):
    queue: bool = False
    max_restarts: int = 0
    max_runtime_s: Optional[float] = None
    stall_timeout_s: Optional[float] = None
    log_max_bytes: Optional[int] = None


class _Plan(NamedTuple):
    job_id: str
    kind: RoleName
    device: Literal["cuda", "cpu", "any"]
    argv: Tuple[Text, ...]
    cwd: Text
    env: Dict[str, Text]
    tree: str
    name: str = ""
    created: str = ""
    gpus: Tuple[str, ...] = ()
    nproc: int = 1
    torchrun: bool = False
    python: PythonSpec = PythonSpec()
    includes: Tuple[Include, ...] = ()
    allow_busy: bool = False
    policy: _Policy = _Policy()
    env_names: Tuple[str, ...] = ()
    secret_names: Tuple[str, ...] = ()
    config_yaml: Optional[str] = None


def upgrade(raw: Mapping[str, Any]) -> Plan:
    """The same plan in the current version. Raises InvalidData if it is not a plan."""
    old = from_json(dict(raw), _Plan)
    if old.nproc > MOST_PROCESSES:
        raise InvalidData("nproc is %d, more than %d" % (old.nproc, MOST_PROCESSES))
    role = Role(
        name=old.kind,
        argv=old.argv,
        cwd=old.cwd,
        env=old.env,
        nodes=(Devices(old.device, old.gpus),),
        nproc=old.nproc,
        torchrun=old.torchrun,
        max_restarts=old.policy.max_restarts,
    )
    return Plan(
        job_id=old.job_id,
        name=old.name,
        created=old.created,
        roles=(role,),
        python=old.python,
        tree=old.tree,
        request=_request(old),
        includes=old.includes,
        allow_busy=old.allow_busy,
        policy=Policy(old.policy.queue, old.policy.max_runtime_s, old.policy.stall_timeout_s, old.policy.log_max_bytes),
        env_names=old.env_names,
        secret_names=old.secret_names,
        config_yaml=old.config_yaml,
        version=1,
    )


def _request(old: _Plan) -> Request:
    """The user's request, reconstructed from the plan."""
    if old.kind == TRAINER:
        return Request(own_trainer="train.py" in old.argv)
    settings = tuple("%s=%s" % (key, json.dumps(value)) for key, value in _settings(old).items())
    return Request(_command(old), old.torchrun, settings)


def _command(old: _Plan) -> Tuple[str, ...]:
    """The program in the argv: with torchrun it follows the rank wrapper."""
    words = list(old.argv)
    if old.torchrun:
        if _AGENTS_WRAPPER not in words:
            raise InvalidData("argv has no rank.py, by which torchrun starts a program")
        words = words[words.index(_AGENTS_WRAPPER) + 1 :]
    return tuple("python" if word == (Slot("python"),) else str(word) for word in words)


def _settings(old: _Plan) -> Dict[str, Any]:
    gpus: List[Any] = [int(gpu) if re.match(r"[0-9]{1,9}\Z", gpu) else gpu for gpu in old.gpus] or list(
        range(old.nproc)
    )
    settings = {
        "run.name": old.name,
        "target.gpu_ranks": None if old.device == "any" else gpus,
        "target.device": "cpu" if old.device == "cpu" else "auto",
        "target.python": old.python.explicit,
        "target.secrets": list(old.secret_names),
        "target.log_max_gb": (old.policy.log_max_bytes or 0) / 1e9,
        "target.queue": old.policy.queue,
        "target.max_restarts": old.policy.max_restarts,
        "target.max_runtime_s": old.policy.max_runtime_s,
        "target.stall_timeout_s": old.policy.stall_timeout_s,
    }
    return {key: value for key, value in settings.items() if value not in (None, [], "")}
