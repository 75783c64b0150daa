"""The section `target`: where a job runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainer.schema.key import ABOVE_0, AT_LEAST_0, BELOW, JOB, key


def gpu_count(gpu_ranks: Sequence[int | str]) -> int:
    """How many GPUs `target.gpu_ranks` names, or asks for as auto:N."""
    auto = AUTO_GPUS.fullmatch(str(gpu_ranks[0])) if len(gpu_ranks) == 1 else None
    return int(auto[1]) if auto else len(gpu_ranks)


AUTO_GPUS = re.compile(r"auto:([1-9][0-9]?)")


@dataclass(frozen=True)
class TargetConfig:
    """Where the job runs and on which devices."""

    gpu_ranks: list[int | str] = key(
        [0],
        aliases=("gpus", "devices", "nproc_per_node"),
        elsewhere=("torchrun --nproc-per-node", "CUDA_VISIBLE_DEVICES", "gpu_ids", "num_processes"),
    )
    """The host's own GPU indices as nvidia-smi shows them, or UUIDs (GPU-…, MIG-…); one process for each, in order.
    ["auto:2"]: the two freest, chosen on the host when the job starts."""
    train_backend: Literal["auto", "pytorch", "ddp", "fsdp"] = key(
        "auto", aliases=("backend",), elsewhere=("distributed_type",)
    )
    """`pytorch`: one process. `auto`: pytorch with one GPU, fsdp with several."""
    device: Literal["auto", "cuda", "cpu"] = key("auto", elsewhere=("use_cpu",))
    """`auto`: CUDA, and an error where there is none. `cpu`: a gloo process for each of gpu_ranks, no visible GPU."""
    ssh: str | None = key(None, aliases=("host",))
    """`[user@]host[:port]` or an alias of ~/.ssh/config; None: this machine. `--ssh` overrides it."""
    python: str | None = None
    """The interpreter on the host; None: found or built there."""
    root: str = "~/.torchferry"
    """Folder on the host that holds code, jobs and environments."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job. Not for secrets: see `secrets`."""
    secrets: list[str] = field(default_factory=list)
    """Names of variables taken from the client's environment; their values are written nowhere."""
    queue: bool = key(False, supervised=True)
    """Wait on the host until the GPUs are free, first in, first out, instead of refusing when they are not."""
    after: list[str] = key([], limit=JOB, supervised=True)
    """Ids of jobs of the same host and root. The job starts once all of them have succeeded, and never when one fails,
    is stopped or is lost. Then it claims its GPUs, and waits for them in the queue even if `queue` is false."""
    max_restarts: int = key(0, limit=AT_LEAST_0, elsewhere=("torchrun --max-restarts",), supervised=True)
    """How often the host itself starts the job again after a failure, from the newest complete checkpoint."""
    max_runtime_s: float | None = key(None, limit=ABOVE_0, supervised=True)
    """The job is asked to save and stop after this many seconds, counted from the first start of its ranks. Restarts by
    the host count into the same time; a `resume` begins it again. None: no limit."""
    stall_timeout_s: float | None = key(None, limit=ABOVE_0, supervised=True)
    """An attempt without a step (your own program: without output) for this long ends as failed; None: no limit."""
    idle_timeout_s: float | None = key(None, limit=ABOVE_0, supervised=True)
    """An attempt whose GPUs all stay below 5 % use for this long, once its ranks run, ends as failed; None: never."""
    log_max_gb: float = key(10.0, limit=AT_LEAST_0, supervised=True)
    """A rank's log that grows beyond this loses its oldest part, and says so; 0: no limit."""
    outputs: list[str] = key([], limit=BELOW, supervised=True)
    """Files or folders of the project that the job writes, or patterns of them (`*.pt`, `plots/**`); they come home
    with its results, to results/ID/code."""
    env_file: str | None = key(None, aliases=("dotenv",), supervised=True)
    """A file of NAME=VALUE lines on the client, such as .env: variables of the job whose values are written nowhere."""
    setup: str | None = key(None, supervised=True)
    """A shell command that runs on the host before the job. Later jobs reuse what it made. It runs again only if the
    command, the interpreter, or a file or folder that the command names changes."""
    setup_timeout_s: float = key(3600.0, limit=ABOVE_0, supervised=True)
    """A setup that takes longer is ended, and the job fails."""
