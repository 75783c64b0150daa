"""Parameters, gradients and optimizer state are sharded over the ranks by FSDP2, in the groups of the wrap plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.dist import ensure_group
from trainer.models.protocol import Model
from trainer.parallel.backend import Backend
from trainer.parallel.plan import ROOT, Group, WrapPlan
from trainer.parallel.wrapping import ignored_names
from trainer.tensors import fsdp_modules

if TYPE_CHECKING:
    from trainer.schema import Config


class FSDPBackend(Backend):
    """Each group of the plan is gathered when it runs; the root group holds the parameters of no other group.

    A tied matrix is in the root group, so it is gathered once for both uses.
    """

    name = "fsdp"

    def _spread(self, model: Model) -> nn.Module:
        ensure_group(self.dist)
        self._mesh = _mesh(self.dist.device.type, self.plan)
        settings = self._settings(ignored=self._whole(model))
        self._modules: dict[str, FSDPModule] = {}
        for group in self.plan.groups:
            kept = group.kept  # FSDP2's argument has the opposite meaning: True frees the gathered copy
            reshard = not kept if isinstance(kept, bool) else kept
            module = fully_shard(model.get_submodule(group.name), reshard_after_forward=reshard, **settings)
            module.set_unshard_in_backward(group.needed_again)
            self._modules[group.name] = module
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and it is not needed
        self._prefetch(model)
        return self._give_storage(model)

    def rearrange(self, config: Config) -> None:
        super().rearrange(config)
        for group, module in self._grouped():
            if isinstance(group.kept, bool):
                module.set_reshard_after_forward(not group.kept, recurse=False)

    def _settings(self, *, ignored: set[nn.Parameter]) -> dict[str, Any]:
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,  # the rotary tables stay fp32
        )
        settings: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy, "ignored_params": ignored}
        if self.options.cpu_offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=self.dist.device.type == "cuda")
        return settings

    def _prefetch(self, model: Model) -> None:
        """Set explicitly what is gathered ahead, if it is more than FSDP2's default."""
        running = _in_running_order(model)
        ahead, behind = int(self.options.forward_prefetch), self.options.backward_prefetch_depth
        for i, module in enumerate(running):
            if ahead:
                module.set_modules_to_forward_prefetch(running[i + 1 : i + 1 + ahead])
            if behind > 1:
                module.set_modules_to_backward_prefetch(running[max(0, i - behind) : i][::-1])

    def _give_storage(self, model: Model) -> Model:
        if not self.options.cpu_offload:
            self._allocate(model)
        else:
            model.to_empty(device="cpu")
            model.reset_buffers(self.dist.device)
        for parameter in self._whole(model):
            parameter.data = parameter.data.to(self.dist.device)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._sum_whole)
        return model

    def _grouped(self) -> Iterator[tuple[Group, FSDPModule]]:
        """The groups of the plan with their modules."""
        return ((group, self._modules[group.name]) for group in self.plan.groups)

    def _whole(self, model: Model) -> set[nn.Parameter]:
        """Parameters that are not sharded."""
        names = ignored_names(model, self.options.ignored_modules)
        return {p for name in names for p in model.get_submodule(name).parameters()}

    def sync(self, last: bool) -> None:
        self._last = last
        root, every = self._modules[ROOT], bool(self.options.reduce_every_micro_batch)
        root.set_requires_gradient_sync(last or every)
        root.set_requires_all_reduce(last)  # over replicas; the reduce-scattered sums are kept until then
        root.set_is_last_backward(last or every)
        for group, module in self._grouped():
            if group.kept is True:  # the next micro-batch uses the gathered copy again
                module.set_reshard_after_backward(last, recurse=False)

    def forget_failed_pass(self) -> None:
        forget_iteration(self.module)

    def _sum_whole(self, parameter: Tensor) -> None:
        """Sum the gradient of an unsharded parameter over all ranks after the last micro-batch."""
        if self._last and parameter.grad is not None:
            summed = parameter.grad.to(self.reduce_dtype)
            torch_dist.all_reduce(summed)
            parameter.grad.copy_(summed)

    def _sum_of_squares(self) -> Tensor:
        """Sharded gradients are summed over one copy of the model. The others count once, because every rank holds
        them."""
        grads = self._grads()
        sharded = self._squares(grad for grad in grads if isinstance(grad, DTensor))
        torch_dist.all_reduce(sharded, group=self._mesh.get_group("dp_shard"))
        return sharded + self._squares(grad for grad in grads if not isinstance(grad, DTensor))


def _mesh(device_type: str, plan: WrapPlan) -> DeviceMesh:
    """[dp_shard], or [dp_replicate, dp_shard] for several copies."""
    if plan.replicas == 1 and plan.strategy not in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        return init_device_mesh(device_type, (plan.shards,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (plan.replicas, plan.shards), mesh_dim_names=("dp_replicate", "dp_shard"))


def _in_running_order(model: Model) -> list[FSDPModule]:
    """The groups below the root in the order of the forward pass.

    This is the order of registration; only norms that are separate groups would be gathered too late, and these are
    small.
    """
    _, *below = fsdp_modules(model)
    return below


# --- after an exception ----------------------------------------------------------------------------------------------


def forget_iteration(root: nn.Module) -> None:
    """Free gathered copies, delete unreduced gradients, and reset FSDP's state for the next forward."""
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
    """For torch 2.11 and 2.12: the same as `_reset_iter_state` in torch 2.13, if all streams have finished."""
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
