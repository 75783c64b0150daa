"""The content of a checkpoint: nested dicts of tensors, functions to walk them, and each rank's random state."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import RANDOM_NAME, ChecksummedFile, Manifest
from trainer.tensors import local_tensor
from trainer.words import first_few

State = dict[str, Any]
"""Nested: {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, …}}}."""
Key = tuple[int, torch.Size, torch.dtype]


class ExtraState(Protocol):
    """State that a run keeps in addition to weights, optimizer, random numbers and its position in the data."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON: small, and the same on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from this state, on any number of ranks. Raises ModelError if it belongs to another run."""


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every value in nested dicts."""
    if isinstance(state, dict):
        for name, child in state.items():
            yield from leaves(child, f"{path}/{name}")
    else:
        yield path, state


def map_leaves(change: Callable[[str, Any], Any], state: Any, path: str = "") -> Any:
    """Nested dicts with `change(path, value)` in place of each value."""
    if isinstance(state, dict):
        return {name: map_leaves(change, child, f"{path}/{name}") for name, child in state.items()}
    return change(path, state)


def local_bytes(state: State) -> int:
    """Bytes of all tensors that this rank holds."""
    tensors = (local_tensor(leaf) for _, leaf in leaves(state) if isinstance(leaf, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def key_of(tensor: Tensor) -> Key:
    """Equal for two tensors only if they are the same part of the same memory."""
    return tensor.data_ptr() if is_plain(tensor) else id(tensor), tensor.shape, tensor.dtype


def is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def is_finite(tensor: Tensor) -> bool:
    """Whether every value is finite; in one pass and without a temporary copy."""
    if not is_plain(tensor) or not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite() & high.isfinite())


def not_finite(state: State) -> list[str]:
    """The paths of the tensors with a NaN or infinite value on this rank."""
    return [
        path.strip("/").replace("/", " ")
        for path, leaf in leaves(state)
        if isinstance(leaf, Tensor) and not is_finite(local_tensor(leaf))
    ]


def check_finite(state: State, verdict: str) -> None:
    """If tensors are not finite, raise CheckpointError with their names and the text `verdict`."""
    bad = not_finite(state)
    if bad:
        raise CheckpointError(f"{first_few(bad, 3)}: values that are not finite; {verdict}")


# --- random numbers --------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of this process's generators: Python's, NumPy's if it is imported, torch's on CPU and CUDA."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set every generator to a state from `random_state()`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_random_state(folder: Path, rank: int, state: dict[str, Any]) -> Manifest:
    """Write the state of one rank, synced to disk. Returns the file's length and checksum."""
    path = _file(folder, rank)
    with path.open("wb") as raw:
        file = ChecksummedFile(raw)
        torch.save(state, file)
        raw.flush()
        os.fsync(raw.fileno())
    return {path.name: file.entry()}


def read_random_state(folder: Path, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(_file(folder, rank), weights_only=True)
    return state


def random_name(rank: int) -> str:
    return f"random_{rank}.pt"


def is_random(name: str) -> bool:
    return RANDOM_NAME.fullmatch(name) is not None


def _file(folder: Path, rank: int) -> Path:
    return folder / random_name(rank)
