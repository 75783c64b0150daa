"""Whether a program's few settings are right at a glance, so that the trainer's rules need not be loaded to say so.

A launch waits for what it loads, and the rules of a training config are many. What is not plain here may still be
right: then the rules decide, and it is they that say what is wrong.
"""

from __future__ import annotations

import re

from trainer.schema import AUTO_GPUS, TargetConfig

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"(?!TORCHFERRY_|CUDA_|MASTER_|RANK\Z|LOCAL_|WORLD_)[A-Za-z_][A-Za-z0-9_]*")
"""Names of variables but for those that begin like one of a launcher's own."""


def is_plain(name: str, target: TargetConfig) -> bool:
    """Whether a run of this name at this place breaks no rule, whatever program it runs."""
    variables = [*target.env, *target.secrets]
    return (
        _NAME.fullmatch(name) is not None
        and _are_plain_gpus(target.gpu_ranks)
        and len(set(variables)) == len(variables)
        and all(_VARIABLE.fullmatch(variable) for variable in variables)
        and all(text is None or _is_plain_text(text) for text in (target.ssh, target.python, target.root))
        and target.max_restarts >= 0
        and target.log_max_gb >= 0
        and all(seconds is None or seconds > 0 for seconds in (target.max_runtime_s, target.stall_timeout_s))
    )


def _are_plain_gpus(gpus: list[int | str]) -> bool:
    if len(gpus) == 1 and isinstance(gpus[0], str):
        return AUTO_GPUS.fullmatch(gpus[0]) is not None
    return len(set(gpus)) == len(gpus) > 0 and all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus)


def _is_plain_text(text: str) -> bool:
    return bool(text.strip()) and not text.startswith("-")
