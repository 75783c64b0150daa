"""The section `train`: the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, SEED, key


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how large a batch, how often to look and to save."""

    steps: int | None = key(200, limit=AT_LEAST_1, aliases=("max_steps",))
    """Optimizer steps; None: given by `epochs`. A run may be resumed with more or fewer: the learning rate is then
    what a run of the new length has at that step."""
    epochs: float | None = key(None, limit=ABOVE_0, aliases=("num_epochs", "num_train_epochs"))
    """Passes over the training examples, instead of `steps`; a .py config must then set steps=None."""
    micro_batch_size: int = key(4, limit=AT_LEAST_1, aliases=("batch_size", "per_device_train_batch_size"))
    """Rows that a rank processes at once. A row is one sequence of data.seq_len tokens; see `data`."""
    micro_batch_tokens: int | None = key(None, limit=AT_LEAST_1, aliases=("max_tokens",))
    """Instead of `micro_batch_size`: at most this many tokens per rank and forward, padding included; rows of similar
    length go together. Requires data.packing=false and global_batch_size; excludes grad_accum_steps. None: off."""
    grad_accum_steps: int | None = key(None, limit=AT_LEAST_1, aliases=("gradient_accumulation_steps",))
    """Forwards per optimizer step; None: from global_batch_size, else 1."""
    global_batch_size: int | None = key(None, limit=AT_LEAST_1)
    """Rows per optimizer step over all ranks; need not be a multiple of the number of ranks."""
    precision: Literal["auto", "bf16", "fp32"] = key(
        "auto",
        aliases=("dtype", "mixed_precision", "bf16"),
        elsewhere=("MixedPrecision.param_dtype",),
    )
    """Dtype of matrix products. Parameters, optimizer state, norms, softmax and loss are fp32, except where you set
    lora.base_dtype (the frozen model), optim.optimizer=adamw8bit (its state) or parallel.reduce_dtype (the gradient
    reduction). `auto`: that of the checkpoint that the run resumes; else bf16 where every device has it in hardware
    (NVIDIA from Ampere on, CPUs with AVX512-BF16, AMX or ARM's bf16), and fp32 elsewhere, where a product in bf16 takes
    50 times as long."""
    float8: Literal["off", "auto", "on"] = "off"
    """The matrix products of the blocks in float8, each tensor scaled by its largest value (torchao; extra `lowbit`);
    those of head and adapters stay bf16. Needs compute capability 8.9, compiled blocks, packed rows, sizes that 16
    divides. `auto`: where a few blocks, timed at the start, are 1.05 times as fast with it. MFU is still of the bf16
    peak."""
    seed: int = key(0, limit=SEED)
    """Decides first weights, order of the data and dropout."""
    deterministic: bool = False
    """Deterministic kernels (slower on CUDA): bitwise repeatable runs."""
    log_every: int = key(1, limit=AT_LEAST_1, aliases=("logging_steps",))
    """Steps between records of the metrics. A record covers all steps since the one before, and the end of a run adds
    one. Its MFU is (6 N + 12 x layers x heads x head size x T) x tokens/s of a GPU / the card's dense bf16 peak. N:
    parameters in matrix products (frozen ones count 4 N, not 6 N). T: length of a token's own document, averaged over
    the tokens. Padding and recomputation do not count; attention is not halved for causality."""
    eval_every: int = key(50, limit=AT_LEAST_0, aliases=("eval_steps",))
    """Steps between evaluations; 0: only before the first and after the last step."""
    eval_batches: int | None = key(None, limit=AT_LEAST_1)
    """Batches per rank of one evaluation; None: all."""
    save_every: int = key(100, limit=AT_LEAST_0, aliases=("save_steps",))
    """Steps between checkpoints; 0: only at the end, or when the run is stopped."""
    async_save: bool = True
    """Training continues while a checkpoint is written. Each rank copies its model and optimizer state into the host's
    memory (pinned on CUDA; free GPU memory serves as a buffer). A separate process beside each rank (300 MiB) writes
    the copy. One checkpoint is written at a time. False, or too little host memory for the copy: training waits."""
    keep_last: int = key(2, limit=AT_LEAST_0, aliases=("save_total_limit",))
    """Complete checkpoints kept, the newest; 0: all."""
    keep_best: int = key(0, limit=AT_LEAST_0)
    """Also keep this many checkpoints with the lowest held-out loss. Each save must have an evaluation: `save_every`
    must be a multiple of `eval_every`."""
    keep_every: int = key(0, limit=AT_LEAST_0)
    """Also keep, without limit, every checkpoint whose step is a multiple of this; 0: none."""
    resume: str = key("auto", aliases=("resume_from_checkpoint",))
    """`auto`: from the newest complete checkpoint of the run folder, if any; a damaged one is reported, renamed
    to `.bad_step_N`, and the one before it is used. `never`: start anew. Or the path of a checkpoint, which must be
    undamaged."""
    max_nonfinite_steps: int = key(10, limit=AT_LEAST_1)
    """A step whose loss or gradient is NaN or infinite is skipped (the weights stay) and reported; after this many in a
    row the run ends with an error. 1: the first one ends the run, and each step is checked before it is saved."""
    early_stop_patience: int | None = key(None, limit=AT_LEAST_1)
    """End the run, as if this were its last step, after this many evaluations in a row that did not improve on
    the best; None: never."""
    early_stop_min_delta: float = key(0.0, limit=AT_LEAST_0)
    """By how much an evaluation's loss must lie below the best to count as better."""
    hang_timeout_s: float = key(600.0, limit=AT_LEAST_0)
    """A run in which no rank makes progress for this long ends and names the late rank with its stack; reading data,
    saving and exporting may take longer. 0: no watchdog."""
    profile_steps: list[int] = key([], limit=AT_LEAST_1)
    """Steps to trace, counted from 1. For each, every rank writes into RUN/profile/ a trace for chrome://tracing or
    Perfetto and a table of where the step's time went (text and JSON). Rank 0 also prints its table. Tracing slows the
    step down."""
    memory_snapshot_steps: list[int] = key([], limit=AT_LEAST_1)
    """Steps of which every rank writes its GPU's allocations into RUN/profile/, for pytorch.org/memory_viz."""
    debug_distributed: Literal["off", "info", "detail"] = "off"
    """What torch and NCCL tell of the ranks' communication: `info`: set-up, and a record of the collectives when one
    hangs; `detail`: every collective is checked over all ranks too (slow)."""
    stop_after_steps: int | None = key(None, limit=AT_LEAST_1)
    """Stop after this many steps, counted from where this start began. The schedule stays that of the whole run (for
    tests, and for machines that are rented for a short time)."""
