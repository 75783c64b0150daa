"""FSDP2 after a forward or backward that an exception ended: as after a step, with nothing gathered or under way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.tensors import fsdp_modules


def forget_iteration(root: nn.Module) -> None:
    """Free what is gathered, drop gradients that wait, and let the next forward begin anew."""
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # nothing reads or writes the buffers any more
    if hasattr(state, "_reset_iter_state"):  # since torch 2.13
        state._reset_iter_state()
    else:
        _reset(state)
    for module in fsdp_modules(root):
        for group in _groups(module._get_fsdp_state()):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _reset(root: Any) -> None:
    """What torch 2.13 does in `_reset_iter_state`, for 2.11 and 2.12, when no stream has anything left to do."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root._comm_ctx.all_gather_state = None
    root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        for group in _groups(state):
            for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state"):
                setattr(group, name, None)
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
