"""A failing rank's report: one paragraph with a hint, and a file that records which rank of the node failed first."""

from __future__ import annotations

import fcntl
import json
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.console import shown
from trainer.failures.comm_errors import comm_facts, explain, is_comm_error
from trainer.run_folder import write_outcome
from trainer.typed import InvalidData, read_json
from trainer.words import first_line

FAILURE_FILE = "control/failure.json"
"""In the run folder, written by the first rank that fails. The others end silently: theirs are only consequences."""

HINTS = (
    (
        "CUDA out of memory",
        "lower train.micro_batch_size or micro_batch_tokens (train.global_batch_size keeps the batch), set "
        "parallel.activation_checkpointing=full, lower data.seq_len, or use more GPUs with target.train_backend=fsdp",
    ),
    ("NCCL", "run again with train.debug_distributed=info; `nvidia-smi topo -m` shows how the GPUs are linked"),
    ("CUDA error", "run again with target.env.CUDA_LAUNCH_BLOCKING=1 to see the call that failed"),
    ("process group has not been initialized", "start with `python train.py CONFIG`, which starts the ranks itself"),
    ("No space left on device", "free some space, or move run.dir to a larger disk"),
    (
        "backend='inductor' raised",
        "parallel.compile=false runs without the compiler; where earlier starts got through, their cache may be "
        "damaged: remove compile/ in ~/.cache/torchferry, or in cache/ below a host's root",
    ),
)


def hint_for(message: str) -> str:
    """What to try, for the most frequent failures; empty for others."""
    return next((hint for sign, hint in HINTS if sign in message), "")


def is_ours(error: BaseException) -> bool:
    """Whether the trainer raised this on purpose: its message is complete, and a stack trace would only hide it."""
    return type(error).__module__.startswith("trainer.")


def is_lost_peer(error: BaseException) -> bool:
    """Whether a connection to another rank broke, usually because that rank ended."""
    known = explain(str(error))
    return known is not None and known.is_lost_peer


def describe(error: BaseException) -> str:
    """One paragraph: the error, its place, and what to do."""
    if is_ours(error):
        return f"Error: {error if getattr(error, 'has_lines', False) else shown(error)}"
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted in {place_of(error)}; the last checkpoint is as it was"
    message = str(error).strip()
    if isinstance(error, SystemExit):
        code = "" if error.code is None else error.code
        return f"Error: exit({code}) was called in the middle of the run\n  in {place_of(error)}"
    known, own = explain(message), first_line(error)
    if known is None:
        lines = [f"Error: {own}", f"  in {place_of(error)}"]
    elif known.is_lost_peer:  # not an error of this rank
        lines = [f"Error: {known.cause}", f"  in {place_of(error)}: {own}"]
    else:
        lines = [f"Error: {own}", f"  in {place_of(error)}", f"cause: {known.cause}"]
    hint = hint_for(message) if known is None else known.advice
    facts = [f"  {fact}" for fact in comm_facts()] if is_comm_error(message) else []
    return "\n".join([*lines, *([f"hint: {hint}"] if hint else []), *facts])


def place_of(error: BaseException) -> str:
    """The innermost line of the trainer that the error passed through, else the innermost line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    ours = [frame for frame in frames if f"{os.sep}trainer{os.sep}" in frame.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.name})"


def claim_failure(run_dir: Path, rank: int, message: str) -> bool:
    """Whether this is the first rank of this start to fail; if so, writes FAILURE_FILE and outcome.json."""
    path = run_dir / FAILURE_FILE
    if has_failed(run_dir):
        return False
    with suppress(OSError):  # a full or read-only disk may be the cause: then report without the files
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".tmp_failure_{rank}.json")
        aside.write_text(json.dumps({"start": start_id(), "rank": rank, "message": message}))
        with path.with_suffix(".lock").open("w") as lock:  # ranks that find the same error arrive at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            if has_failed(run_dir):
                aside.unlink()
                return False
            aside.replace(path)
        write_outcome(run_dir, {"state": "failed", "rank": rank, "error": message})
    return True


def has_failed(run_dir: Path) -> bool:
    """Whether a rank of this start has failed already."""
    try:
        return bool(read_json(run_dir / FAILURE_FILE, dict[str, Any]).get("start") == start_id())
    except (OSError, InvalidData):
        return False


def start_id() -> str:
    """An ID that is equal for all ranks of one start by torchrun or srun, and different for the next."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    if "RANK" in os.environ and names[0] not in os.environ and "SLURM_STEP_ID" in os.environ:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return ":".join(os.environ.get(name, "0") for name in names)
    return ":".join(os.environ.get(name, str(os.getpid())) for name in names)


def write_traceback(run_dir: Path, rank: int, error: BaseException) -> Path | None:
    """Write the full stack trace into the run folder, and return its path; None if it cannot be written."""
    path = run_dir / f"traceback_rank_{rank}.txt"
    try:
        path.write_text("".join(traceback.format_exception(error)), errors="surrogateescape")
    except OSError:
        return None
    return path
