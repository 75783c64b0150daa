"""Model and optimizer as `torch.distributed.checkpoint` stores them: by name, in shards, for any number of ranks.

The optimizer's state is stored by parameter name only. Its groups and their settings (learning rate, decay) come from
the config and are not in a checkpoint, so that they may change.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.checkpoint.folders import ChecksummingWriter, Manifest
from trainer.checkpoint.reader import PlainReader
from trainer.checkpoint.states import State, leaves
from trainer.dist import Group
from trainer.tensors import fsdp_modules
from trainer.words import first_few

# torch warns that it assumes one process without a process group: correct. (A context would cover only one thread.)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Model and optimizer state by parameter name, sharded as in memory. The tensors are not copies."""
    reshard(model)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=_options(model))
    return {"model": model_state(model), "optimizer": optimizer_state["state"]}


def model_state(model: nn.Module) -> State:
    """The model's tensors by name, without frozen ones, which a run fills before it loads a checkpoint."""
    return get_model_state_dict(model, options=_options(model))


def reshard(model: nn.Module) -> None:
    """Reshard FSDP's modules. After an evaluation the root is still gathered, and then its parameters are not the ones
    that the optimizer holds."""
    for group in fsdp_modules(model):
        group.reshard()


def write_shards(state: State, folder: Path, group: Group) -> Manifest:
    """Write this rank's part of the state, synced to disk. Every rank of the group must call this.

    Returns the length and checksum of each file that this rank has written.

    If one rank fails, raises torch's CheckpointException (a BaseException, not an Exception) on every rank.
    """
    writer = ChecksummingWriter(folder)
    dcp.save(state, storage_writer=writer, **_dcp_group(group))
    return writer.manifest


def read_shards(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
    """Fill model and optimizer from a checkpoint of any number of ranks; the optimizer keeps its own settings."""
    state = sharded_state(model, optimizer)
    _read(path, state, group)
    settings = get_optimizer_state_dict(model, optimizer, options=_options(model))["param_groups"]
    set_model_state_dict(model, state["model"], options=_options(model))
    loaded = {"state": state["optimizer"], "param_groups": settings}
    set_optimizer_state_dict(model, optimizer, loaded, options=_options(model))


def read_model_shards(path: Path, model: nn.Module, group: Group) -> None:
    """Fill only the model from a checkpoint of any number of ranks."""
    reshard(model)
    state = model_state(model)
    _read(path, {"model": state}, group)
    set_model_state_dict(model, state, options=_options(model))


def read_all_shards(path: Path) -> State:
    """All tensors of a checkpoint, unsharded on the CPU, in one process without a process group."""
    kept = PlainReader(path).read_metadata().state_dict_metadata
    flat: State = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in kept.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _read(path, flat, None)
    state: State = {"model": {}, "optimizer": {}}
    for name, tensor in flat.items():
        part, _, rest = name.partition(".")
        if part == "model":
            state["model"][rest] = tensor
        elif part == "optimizer":
            parameter, _, key = rest.rpartition(".")
            state["optimizer"].setdefault(parameter, {})[key] = tensor
    return state


def differences(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """How the checkpoint's tensors differ from the model's (and the optimizer's): names, and sizes OLD -> NEW."""
    kept = PlainReader(path).read_metadata().state_dict_metadata
    state = {"model": model_state(model)} if optimizer is None else sharded_state(model, optimizer)
    now = {name.strip("/").replace("/", "."): value for name, value in leaves(state)}
    there = {name for name in kept if name.startswith("model.") or optimizer is not None}
    sizes = {
        name: (list(entry.size), list(tensor.shape))
        for name, tensor in now.items()
        if name.startswith("model.") and isinstance(entry := kept.get(name), TensorStorageMetadata)
    }
    return [
        *(f"{name} {before} -> {after}" for name, (before, after) in sizes.items() if before != after),
        *_names("only the checkpoint has", sorted(there - set(now))),
        *_names("only this run has", sorted(set(now) - set(kept))),
    ]


def _names(what: str, names: list[str]) -> list[str]:
    return [f"{what} {first_few(names, 2)}"] if names else []


def _read(path: Path, state: State, group: Group) -> None:
    dcp.load(state, storage_reader=PlainReader(path), **_dcp_group(group))


def _options(model: nn.Module) -> StateDictOptions:
    any_frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return StateDictOptions(ignore_frozen_params=any_frozen, strict=not any_frozen)


def _dcp_group(group: Group) -> dict[str, Any]:
    """dcp's arguments for a CPU group: a slow disk must not cause an NCCL timeout. One process needs no group."""
    return {"no_dist": True} if group is None else {"process_group": group}
