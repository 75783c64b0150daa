"""The section `parallel`: how the model is spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.schema.key import AT_LEAST_0, AT_LEAST_1, Limit, key


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread and how memory is saved."""

    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] | None
    ) = key(None, elsewhere=("fsdp_sharding_strategy", "ShardingStrategy"))
    """FSDP; upper or lower case. FULL_SHARD: a group's gathered parameters are freed after its forward. SHARD_GRAD_OP:
    they are kept until the step's last backward. NO_SHARD: ddp. HYBRID_SHARD: FULL_SHARD within each of `dp_replicate`
    replicas. _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within each. None: as `reshard_after_forward` says. Both None: with
    `memory` auto, parameters stay gathered if nothing is recomputed and they fit; otherwise FULL_SHARD. None on several
    nodes: one replica on each node, unless `dp_replicate` says otherwise; FULL_SHARD shards over all nodes."""
    reshard_after_forward: bool | int | None = key(None, limit=AT_LEAST_0, elsewhere=("fsdp_reshard_after_forward",))
    """FSDP: free a group's gathered parameters after its forward. A number N: shard them over N ranks only, so that the
    backward gathers within those; N must be more than 1 and a proper divisor of the ranks that share the parameters.
    None: as `sharding_strategy` says; the two may not contradict each other. Both None: with `memory` auto, parameters
    stay gathered from a step's first forward to its last backward, if nothing is recomputed and they fit. Otherwise
    they are freed."""
    dp_replicate: int | None = key(None, limit=AT_LEAST_1)
    """FSDP: number of replicas; each is sharded over ranks / replicas ranks. It must divide the number of ranks. None:
    one replica on each node of several; on one node a single one, and HYBRID_SHARD requires a number."""
    reduce_dtype: Literal["fp32", "bf16"] = key("fp32", elsewhere=("MixedPrecision.reduce_dtype",))
    """Dtype of the gradient reduction over several ranks (ddp, fsdp)."""
    wrap_policy: Literal["transformer", "size", "classes"] = key(
        "transformer", aliases=("auto_wrap_policy",), elsewhere=("fsdp_auto_wrap_policy",)
    )
    """FSDP: which modules form a group, whose parameters are gathered together. `transformer`: each block; `size`:
    modules of at least `min_num_params`; `classes`: the modules of `wrap_classes`. Modules in no group belong to the
    root module's group."""
    min_num_params: int = key(100_000_000, limit=AT_LEAST_1, elsewhere=("fsdp_min_num_params",))
    """Parameters of a group with `wrap_policy` size."""
    wrap_classes: list[str] = key(
        [],
        aliases=("transformer_layer_cls_to_wrap",),
        elsewhere=("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls"),
    )
    """Class names for `wrap_policy` classes: Block, Attention, MLP …, or Hugging Face's, such as Qwen3DecoderLayer."""
    ignored_modules: list[str] = key([], elsewhere=("fsdp_ignored_modules",))
    """FSDP: patterns of Hugging Face module names (*.embed_tokens, *.mlp) that every rank holds whole."""
    forward_prefetch: bool | int = key(False, limit=AT_LEAST_0, elsewhere=("fsdp_forward_prefetch",))
    """FSDP: how many groups ahead of the running one are gathered in the forward; true: 1."""
    backward_prefetch_depth: int = key(1, limit=AT_LEAST_1)
    """FSDP: the same in the backward; 1 is built in."""
    sync_module_states: bool = key(False, elsewhere=("fsdp_sync_module_states",))
    """Rank 0 alone reads the pretrained weights and sends them; false: every rank reads its own share."""
    cpu_offload: bool | None = key(None, aliases=("offload_params",), elsewhere=("fsdp_offload_params", "CPUOffload"))
    """FSDP: parameters, gradients and optimizer state live on the CPU, where the optimizer steps. None: false, unless
    `memory` is auto and nothing else fits."""
    memory: Literal["auto", "manual"] = "auto"
    """auto, on a GPU: a memory plan chooses those of `activation_checkpointing`, `reshard_after_forward`,
    `reduce_every_micro_batch` and `cpu_offload` that are not set. It takes the least recomputation that fits. A
    memory plan that runs out of memory gives way to the next one: before the first step at once if that is possible,
    otherwise at the next start in the same run folder. manual: nothing is chosen."""
    activation_checkpointing: Literal["none", "budget", "selective", "full"] | None = key(
        None, aliases=("gradient_checkpointing",), elsewhere=("fsdp_activation_checkpointing",)
    )
    """`full`: a block's activations are computed again in the backward pass; `selective`: all but the outputs of
    matrix products and attention; `budget`: the compiler keeps `activation_budget` of them. None: `memory` chooses."""
    activation_budget: float = key(0.5, limit=Limit("0 to 1", lambda v: 0 <= v <= 1))
    """`activation_checkpointing` budget: the share (0 to 1) of a compiled block's activations that is kept; what costs
    most to compute again is kept first."""
    reduce_every_micro_batch: bool | None = None
    """FSDP: whether the gradients of each micro-batch are reduced, or wait, whole, for the step's last one (faster, and
    the memory of a whole gradient). None: they wait, unless `memory` is auto and they do not fit."""
    checkpoint_every: int = key(1, limit=AT_LEAST_1)
    """Recompute every n-th block (see `activation_checkpointing`). Not about saved checkpoints: see
    train.save_every."""
    compile: bool | None = key(None, aliases=("torch_compile",), elsewhere=("dynamo_backend",))
    """torch.compile each block. None: on a GPU where Triton runs, otherwise not. true: also on a CPU, where compiling
    takes about a minute."""
    cuda_graphs: bool | None = None
    """One launch for forward and backward of a micro-batch of packed rows, in one process. None: on a GPU, for models
    so small that launching their kernels takes longer than running them."""
