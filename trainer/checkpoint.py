"""Checkpoints that are complete or absent, and load at any number of ranks.

A checkpoint is written aside (`.tmp_step_N`), synced to disk, marked COMPLETE and then renamed, so a folder with the
final name is whole whenever the process was killed. Older ones go only after that. Model and optimizer are stored by
`torch.distributed.checkpoint` in shards; each rank adds its own random state; `state.json` holds what is global.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.dist import Dist, barrier, on_rank0, sum_over_ranks
from trainer.parallel.tensors import fsdp_modules, local_tensor
from trainer.schema import CHECKPOINT_MARKER

STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # written last by torch.distributed.checkpoint
STEP_NAME = re.compile(r"step_(\d{6,})")
DAMAGED = "If a file is damaged, remove this folder: an earlier checkpoint is taken then"
HEADROOM_BYTES = 8 * 2**20  # metadata, random states and the file system's own blocks


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder and what to do."""


@dataclass(frozen=True)
class Resumed:
    """What a loaded checkpoint says beside weights and optimizer."""

    step: int
    world_size: int
    extra: dict[str, Any]


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict, dist: Dist) -> Path:
    """Write `folder/step_NNNNNN` and return it; every rank calls this at the same step border.

    `extra` is plain JSON, the same on all ranks (data position, config). Raises CheckpointError on every rank when any
    rank could not write or holds a weight that is not finite; what was there before is then as it was, and the partial
    folder is gone.
    """
    aside, final = folder / f".tmp_{step_name(step)}", folder / step_name(step)
    state = _sharded_state(model, optimizer)
    _on_all(lambda: _check_finite(model, f"{final} not written"), final, dist)
    _check_space(folder, state, dist)
    try:
        _on_rank0(lambda: _make_empty(aside), aside, dist)
        _write_shards(state, aside, dist)
        _on_all(lambda: _write_random_state(aside / f"random_{dist.rank}.pt"), aside, dist)
        _on_rank0(lambda: _commit(aside, final, {"step": step, "world_size": dist.world_size, **extra}), aside, dist)
    except CheckpointError:
        barrier(dist)  # no rank may still write into the folder that rank 0 removes
        if dist.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist) -> Resumed:
    """Fill model, optimizer and random state in place from a complete checkpoint, and return the rest.

    Any world size may load. The random state is restored only where the world size is the one that saved: at another
    there is no state to continue. The optimizer keeps its own settings (weight decay, betas, eps).
    """
    resumed = read_info(path)
    _read_shards(path, model, optimizer, dist)
    _check_finite(model, f"cannot load {path}. {DAMAGED}")
    if resumed.world_size == dist.world_size:
        with _reading(path):
            _read_random_state(path / f"random_{dist.rank}.pt")
    return resumed


def read_info(path: Path) -> Resumed:
    """What a checkpoint says beside weights and optimizer, to be judged before they are loaded."""
    if not is_complete(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {CHECKPOINT_MARKER} file")
    with _reading(path):
        info = json.loads((path / STATE_FILE).read_text())
        return Resumed(info.pop("step"), info.pop("world_size"), info)


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in the folder; None when there is none."""
    complete = [path for path in _steps(folder).values() if is_complete(path)]
    return complete[-1] if complete else None


def agree_on_newest(folder: Path, dist: Dist) -> Path | None:
    """`newest_complete` as rank 0 sees it: on a network file system the ranks may see different folders."""
    return on_rank0(dist, lambda: newest_complete(folder))


def prune(folder: Path, keep_last: int, *, newest: int) -> list[Path]:
    """Delete the complete checkpoints that retention no longer wants, and return them. Rank 0 only."""
    steps = {step: path for step, path in _steps(folder).items() if is_complete(path)}
    doomed = [steps[step] for step in to_delete(list(steps), keep_last, newest=newest)]
    for path in doomed:
        (path / CHECKPOINT_MARKER).unlink()  # first, so that a kill half way leaves no folder that looks complete
        shutil.rmtree(path, ignore_errors=True)
    return doomed


def to_delete(steps: Sequence[int], keep_last: int, *, newest: int) -> list[int]:
    """Which of the saved steps go when only the `keep_last` last ones up to `newest`, just saved, stay; 0 keeps those.

    Steps after it always go: the run went back behind them, and a resume would take them for its own.
    """
    own = sorted(step for step in steps if step <= newest)
    return (own[:-keep_last] if keep_last > 0 else []) + sorted(step for step in steps if step > newest)


def is_complete(path: Path) -> bool:
    """Whether a save into this folder ran to its end."""
    return (path / CHECKPOINT_MARKER).exists() and (path / METADATA_FILE).exists()


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def _steps(folder: Path) -> dict[int, Path]:
    """The folders with a checkpoint's final name, by step, ascending."""
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := STEP_NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


# --- model and optimizer ---------------------------------------------------------------------------------------------


def _sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer state by parameter name, sharded as they live; independent of ranks and wrapping."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    for group in fsdp_modules(model):
        group.reshard()  # an evaluation leaves the root group gathered, and then its parameters are not the optimizer's
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _write_shards(state: dict[str, Any], folder: Path, dist: Dist) -> None:
    import torch.distributed.checkpoint as dcp

    def write() -> None:
        with _no_group_warning():
            dcp.save(state, checkpoint_id=folder, **_dcp_group(dist))

    _on_all(write, folder, dist)


def _read_shards(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _sharded_state(model, optimizer)
    try:
        with _no_group_warning():
            dcp.load(state, checkpoint_id=path, **_dcp_group(dist))
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"cannot load {path}: {_first_cause(error)}. {DAMAGED}") from error
    configured = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, settings in zip(optimizer.param_groups, configured, strict=True):
        group.update(settings)  # loading has put the saved run's settings there, and a changed config would do nothing


def _dcp_group(dist: Dist) -> dict[str, Any]:
    """The CPU group: a slow disk must not run into NCCL's time-out. One process needs no group at all."""
    return {"no_dist": True} if dist.world_size == 1 else {"process_group": dist.control_group}


@contextmanager
def _no_group_warning() -> Iterator[None]:
    """torch warns that it takes a run without a process group for one process: it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_cause(error: Exception) -> str:
    failures = getattr(error, "failures", {})
    cause = next((failure[0] for failure in failures.values()), error)
    return next(iter(str(cause).splitlines()), type(cause).__name__)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a file of a checkpoint is an error about that checkpoint."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"cannot load {path}: {type(error).__name__}: {_first_cause(error)}. {DAMAGED}"
        ) from error


def _check_finite(model: nn.Module, what: str) -> None:
    bad = [name for name, parameter in model.named_parameters() if not local_tensor(parameter).isfinite().all()]
    if bad:
        raise CheckpointError(f"{', '.join(bad[:3])}: values that are not finite; {what}")


# --- random state ----------------------------------------------------------------------------------------------------


def _write_random_state(path: Path) -> None:
    with path.open("wb") as file:
        torch.save(random_state(), file)
        file.flush()
        os.fsync(file.fileno())


def _read_random_state(path: Path) -> None:
    set_random_state(torch.load(path, weights_only=True))


def random_state() -> dict[str, Any]:
    """The state of every generator of this process: Python's, NumPy's where it is in use, torch's on CPU and CUDA."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue every generator from `random_state()`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- folders ---------------------------------------------------------------------------------------------------------


def _make_empty(folder: Path) -> None:
    for killed in folder.parent.glob(".tmp_step_*"):  # an earlier start may have been killed while writing one
        shutil.rmtree(killed, ignore_errors=True)
    folder.mkdir(parents=True)


def _commit(aside: Path, final: Path, info: dict[str, Any]) -> None:
    """Give a completely written folder its marker and its name."""
    _write_synced(aside / STATE_FILE, json.dumps(info, indent=1))
    _sync_folder(aside)
    _write_synced(aside / CHECKPOINT_MARKER, "")
    _sync_folder(aside)
    replaced = aside.with_name(f"{aside.name}_replaced")
    if final.exists():  # an incomplete folder of the same step, or a complete one of a run started over
        final.rename(replaced)  # in one piece: half deleted it could still look complete
    aside.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(folder: Path, state: dict[str, Any], dist: Dist) -> None:
    """Raise on every rank, before anything is written, when the disk has no room for all ranks' shards."""
    local = torch.tensor(_local_bytes(state), dtype=torch.int64)
    needed = int(sum_over_ranks(local, dist)) + HEADROOM_BYTES

    def check() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(_no_space(folder, needed, free))

    _on_rank0(check, folder, dist)


def _local_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts and lists that this rank holds."""
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        return local.numel() * local.element_size()
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_local_bytes(child) for child in children)


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"no room for a checkpoint in {folder}: it needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free. "
        f"Free some space, or lower train.keep_last"
    )


# --- the same verdict on every rank -----------------------------------------------------------------------------------


def _on_rank0(act: Callable[[], None], folder: Path, dist: Dist) -> None:
    """Do something on rank 0 and raise on every rank when it fails."""
    _on_all(act if dist.rank == 0 else lambda: None, folder, dist)


def _on_all(act: Callable[[], None], folder: Path, dist: Dist) -> None:
    """Do something on every rank; when it fails on one, raise CheckpointError on all."""
    failure: Exception | None = None
    try:
        act()
    except Exception as error:
        failure = error
    if _on_any(failure is not None, dist):
        raise _as_checkpoint_error(failure, folder) from failure


def _as_checkpoint_error(failure: Exception | None, folder: Path) -> CheckpointError:
    if isinstance(failure, CheckpointError):
        return failure
    reason = "another rank failed" if failure is None else _first_cause(failure)
    with suppress(OSError):
        free = shutil.disk_usage(folder.parent).free
        reason += f" ({free / 2**20:.0f} MiB free)"
    return CheckpointError(f"cannot write the checkpoint {folder}: {reason}")


def _on_any(flag: bool, dist: Dist) -> bool:
    """Whether the flag is set on any rank; on the control group, whose time-out allows for slow disks."""
    if dist.control_group is None:
        return flag
    value = torch.tensor(int(flag))
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=dist.control_group)
    return bool(value)
