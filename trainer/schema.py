"""Everything that can be configured, with its unit and its rule beside it, and the names of a run folder's files.

This module imports neither torch nor yaml: the deployer reads it on a laptop that has neither.
`trainer.config.load` loads files and overrides into these classes and checks the rules that span fields.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

# --- the run folder: what a training run writes, and where -----------------------------------------------------------

METRICS_FILE = "metrics.jsonl"  # one JSON object a line; training steps and evaluations
CONFIG_FILE = "config.yaml"  # the resolved config
OUTCOME_FILE = "outcome.json"  # how the run ended: the last file of rank 0, or by the rank that failed first
CHECKPOINTS_DIR = "checkpoints"  # step_NNNNNN/ each with a COMPLETE marker
CHECKPOINT_MARKER = "COMPLETE"
EXPORT_DIR = "export"  # Hugging Face format
ADAPTER_DIR = "adapter"  # inside it, PEFT's format
MEMORY_PLAN_FILE = "memory_plan.json"  # what parallel.memory=auto has chosen, and which plans ran out of memory
STOP_FILE = "control/stop.json"  # its existence asks the ranks to save and stop at the next step border

RUN_DIR_ENV = "TORCHFERRY_RUN_DIR"  # the run folder, set by whoever launches
JOB_ID_ENV = "TORCHFERRY_JOB_ID"  # marks every process of a job
CACHE_ENV = "TORCHFERRY_CACHE"  # where compiled code is kept, set by the deployer: below the host's root
STARTED_ENV = "TORCHFERRY_STARTED_S"  # when the launcher began, in seconds since the machine started
RESTARTED_ENV = "TORCHFERRY_RESTARTED"  # set when the host started the job again after a failure, by itself


def gpu_count(gpu_ranks: Sequence[int | str]) -> int:
    """How many GPUs `target.gpu_ranks` names, or asks for as auto:N."""
    auto = AUTO_GPUS.fullmatch(str(gpu_ranks[0])) if len(gpu_ranks) == 1 else None
    return int(auto[1]) if auto else len(gpu_ranks)


AUTO_GPUS = re.compile(r"auto:([1-9][0-9]?)")


@dataclass(frozen=True)
class TargetConfig:
    """Where the job runs and on which devices."""

    gpu_ranks: list[int | str] = field(default_factory=lambda: [0])
    """The host's own GPU indices as nvidia-smi shows them, or UUIDs (GPU-…, MIG-…); one process for each, in order.
    ["auto:2"]: the two freest, chosen on the host when the job starts."""
    train_backend: Literal["auto", "pytorch", "ddp", "fsdp"] = "auto"
    """`pytorch`: one process. `auto`: pytorch with one GPU, fsdp with several."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: CUDA, and an error where there is none. `cpu`: a gloo process for each of gpu_ranks, no visible GPU."""
    ssh: str | None = None
    """`[user@]host[:port]` or an alias of ~/.ssh/config; None: this machine. `--ssh` overrides it."""
    python: str | None = None
    """The interpreter on the host; None: found or built there."""
    root: str = "~/.torchferry"
    """Folder on the host that holds code, jobs and environments."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job. Not for secrets: see `secrets`."""
    secrets: list[str] = field(default_factory=list)
    """Names of variables taken from the client's environment; their values are written nowhere."""
    queue: bool = False
    """Wait on the host until the GPUs are free, first in, first out, instead of refusing when they are not."""
    max_restarts: int = 0
    """How often the host itself starts the job again after a failure, from the newest complete checkpoint."""
    max_runtime_s: float | None = None
    """The job is asked to save and stop after so many seconds, all its attempts together; None: no limit."""
    stall_timeout_s: float | None = None
    """An attempt without a step (a program of your own: without output) for so long ends as failed; None: no limit."""
    log_max_gb: float = 10.0
    """A rank's log that grows beyond this loses its oldest part, and says so; 0: no limit."""


@dataclass(frozen=True)
class ModelConfig:
    """Which causal language model is trained: a Hugging Face name or folder, or a fresh one of the given shape."""

    name: str | None = None
    """Hugging Face name or local folder (config.json and safetensors). None: build from the fields below."""
    init: Literal["auto", "pretrained", "random"] = "auto"
    """`auto`: pretrained when `name` is given, random otherwise. `random` with a name takes only its config."""
    family: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    """Architecture and its parameter names: qwen2 has biases on q, k and v; qwen3 norms q and k; llama has neither."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 384
    """Width inside the gated MLP."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads of each block."""
    num_kv_heads: int = 2
    """Key-value heads; it must divide num_heads."""
    head_dim: int | None = None
    """None: hidden_size / num_heads."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    tie_embeddings: bool = True
    """The embedding matrix is the output head as well."""
    max_position_embeddings: int = 4096
    """Positions that the model is said to know; data.seq_len may not be more."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as they are: patterns (`*`, `?`, `[0-3]`) of Hugging Face's parameter names, such as
    `model.embed_tokens.*`. Not together with `lora`, which freezes the whole model."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside a frozen model, in PEFT's terms and file format. None without `rank` or `adapter`."""

    rank: int | None = None
    """Rows of A and columns of B; None: that of `adapter`, or no LoRA at all."""
    alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; None: that of `adapter`, else 16."""
    dropout: float | None = None
    """Share of the adapter's input that is dropped in training; None: that of `adapter`, else 0."""
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead; None: as `adapter` does, else false."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear modules that get an adapter: `q_proj`, a whole name, a pattern (`model.layers.[0-3].*`), or
    `all-linear`: every one but the head. Empty: those of `adapter`, else all-linear."""
    adapter: str | None = None
    """Folder of a PEFT adapter to start from (adapter_config.json and adapter_model.safetensors)."""
    merge_export: bool = False
    """Export also the whole model with the adapters added to its weights; export/adapter is written always."""
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage of the frozen model; the adapters are fp32. `auto`: bf16 when train.precision is bf16: products and so
    losses are the same, but a merged export then holds the model's weights as bf16 has them."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture; a plain text in its place is its path alone."""

    path: str
    """As the entries of `data.train`: a file, a data set or `builtin:stdlib-docs`."""
    weight: float | None = None
    """Its share of the rows, relative to the other sources' weights; all sources have one or none has. None: every
    source gives its own rows once an epoch."""
    repeat: float = 1.0
    """How often an epoch holds each of its rows; 0.5: half of them. Not together with `weight`."""
    limit: int | None = None
    """Conversations read from it at most; None: all."""


def as_sources(entries: Sequence[str | SourceConfig]) -> list[SourceConfig]:
    """The entries of `data.train` or `data.eval`, each with its settings."""
    return [SourceConfig(entry) if isinstance(entry, str) else entry for entry in entries]


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes tokens, and which of them are targets."""

    train: list[str | SourceConfig] = field(default_factory=lambda: ["builtin:stdlib-docs"])
    """JSONL, JSON or Parquet files, names or folders of Hugging Face data sets, or `builtin:stdlib-docs`; a mapping
    {path, weight, repeat, limit} in place of a text says how much of it. With recipe=pretrain: .tokens files as
    `train.py tokenize` makes them, .txt or .md files or folders of them, or rows with a column `text`."""
    eval: list[str | SourceConfig] = field(default_factory=list)
    """Held-out data, same kinds. Empty: `eval_fraction` of train (builtin: its held-out modules)."""
    eval_fraction: float = 0.05
    """Share of the training rows held out when `eval` is empty; 0: no evaluation."""
    train_split: str = "train"
    """Split of the Hugging Face data sets in `train`."""
    eval_split: str = "test"
    """Split of those in `eval`."""
    schema: Literal[
        "auto", "messages", "conversations", "prompt_completion", "instruction_output", "question_answer"
    ] = "auto"
    """The columns of a row; `auto`: by their names. messages and conversations hold turns, the others two texts."""
    tokenizer: str = "auto"
    """`auto`: the model's own when it has a name, else `builtin:bytes`; or a name or folder."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's template."""
    system_prompt: str | None = None
    """Put before conversations that have no system turn."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are targets: the assistant's turns with their end token (the template's newline after it is
    none), or everything."""
    seq_len: int = 512
    """Tokens per row of a batch."""
    packing: bool = True
    """Several conversations per row; they never see each other."""
    overlong: Literal["drop", "truncate"] = "truncate"
    """A conversation longer than seq_len: left out and counted, or its end cut off."""
    max_train_rows: int | None = None
    """Conversations read from `train` at most; None: all."""
    max_eval_rows: int | None = 256
    """Held-out conversations at most; None: all."""
    shuffle: bool = True
    """A new order of the rows in every epoch, by train.seed; false: as read."""
    workers: int = 0
    """Processes that tokenize the data at the start; 0: the training process does it."""
    streaming: bool = False
    """Begin after the first window instead of reading everything first; each rank reads, needs `train.steps`."""
    stream_window: int = 4096
    """Conversations that are shuffled and packed together when streaming; two windows are held in memory."""


@dataclass(frozen=True)
class GroupConfig:
    """Optimizer settings of some parameters; the first group whose pattern matches a parameter has it."""

    pattern: str
    """`*`, `?` and `[0-3]` in Hugging Face's parameter names: `lm_head.*`, `*.lora_B.weight`."""
    lr_scale: float = 1.0
    """Their learning rate is the scheduled one times this."""
    weight_decay: float | None = None
    """In place of optim.weight_decay; one-dimensional parameters do not decay here either. None: optim.weight_decay."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: torchao's, whose state takes 2 bytes a parameter in place of 8 (extra `lowbit`)."""
    learning_rate: float = 1e-3
    """At the end of the warm-up."""
    min_learning_rate: float = 0.0
    """Where the decay ends, same unit as learning_rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. wsd: it stays, and falls in the last `decay_steps` (a cosine)."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises linearly from 0 (wsd: from min_learning_rate); null: 10, and never more
    than a fifth of the run."""
    decay_steps: int | None = None
    """WSD only: length of the final decay; None: a fifth of all steps."""
    beta1: float = 0.9
    """Decay of Adam's mean of the gradients."""
    beta2: float = 0.95
    """Decay of Adam's mean of their squares."""
    eps: float = 1e-8
    """Added to the root of Adam's second mean."""
    weight_decay: float = 0.01
    """Decoupled; not applied to norms, biases and other one-dimensional parameters."""
    max_grad_norm: float = 1.0
    """Global norm; 0: no clipping."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Parameters with a learning rate or weight decay of their own: {pattern, lr_scale, weight_decay}, first match."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How learning_rate and min_learning_rate grow with the batch: times rows per step / base_batch_size (`linear`), or
    its square root (`sqrt`, the rule for Adam)."""
    base_batch_size: int | None = None
    """Rows per step that learning_rate was tuned for; needed by lr_scaling."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how large a batch, how often to look and to save."""

    steps: int | None = 200
    """Optimizer steps; None: given by `epochs`. A run may be resumed with more or fewer: the learning rate is then
    what a run of the new length has at that step."""
    epochs: float | None = None
    """Passes over the training rows; exclusive with steps."""
    micro_batch_size: int = 4
    """Rows per rank per forward."""
    micro_batch_tokens: int | None = None
    """Tokens per rank per forward, padding counted: rows of like length together, instead of `micro_batch_size` rows.
    For unpacked rows (data.packing=false), and with global_batch_size. None: off."""
    grad_accum_steps: int | None = None
    """Forwards per optimizer step; None: from global_batch_size, else 1."""
    global_batch_size: int | None = None
    """Rows per optimizer step over all ranks; need not divide by the ranks."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Matrix products; parameters, optimizer state, norms, softmax and loss are fp32 always. `auto`: that of the
    checkpoint that the run resumes; else bf16 where every device has it in hardware (NVIDIA from Ampere on, CPUs with
    AVX512-BF16, AMX or ARM's bf16), and fp32 elsewhere, where a product in bf16 takes 50 times as long."""
    float8: Literal["off", "auto", "on"] = "off"
    """The products of the blocks in float8, each tensor scaled by its largest value (torchao; extra `lowbit`); those of
    head and adapters stay bf16. Needs compute capability 8.9, compiled blocks, packed rows, sizes that 16 divides.
    `auto`: where a few blocks, timed at the start, are 1.05 times as fast with it. MFU is still of the bf16 peak."""
    seed: int = 0
    """Decides first weights, order of the data and dropout."""
    deterministic: bool = False
    """Deterministic kernels (slower on CUDA): bitwise repeatable runs."""
    log_every: int = 1
    """Steps between records of the metrics, each over all steps since the one before; the end of a run adds one.
    Their MFU is (6 N + 12 layers x heads x head size x L) x tokens/s / the card's dense bf16 peak: N the parameters
    that multiply, 4 N of the frozen ones, L the length of the document that a token stands in, averaged over the
    tokens; padding and recomputation count for nothing, and attention is not halved for being causal."""
    eval_every: int = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    eval_batches: int | None = None
    """Batches per rank of one evaluation; None: all."""
    save_every: int = 100
    """Steps between checkpoints; 0: only at the end, which a stop is too."""
    async_save: bool = True
    """Checkpoints are written while training goes on, by a process beside each rank (300 MiB) from a copy in the host's
    memory (model and optimizer state of this rank, pinned on CUDA, by way of what GPU memory is free); one at a time.
    False, or too little host memory for the copy: training waits."""
    keep_last: int = 2
    """Complete checkpoints kept, the newest; 0: all."""
    keep_best: int = 0
    """Kept besides: so many checkpoints of the lowest held-out loss, taken where evaluation and save fall together."""
    keep_every: int = 0
    """Kept besides, for ever: those of steps that this divides; 0: none."""
    resume: str = "auto"
    """`auto`: from the newest complete checkpoint of the run folder, if any; a damaged one is named, set aside as
    `.bad_step_N`, and the one before is taken. `never`; or a checkpoint's path, which must be whole."""
    nonfinite: Literal["skip", "abort"] = "skip"
    """A step whose loss or gradient is NaN or infinite never touches the weights. `skip`: it is told and the run goes
    on; `abort`: the first one ends the run."""
    max_nonfinite_steps: int = 10
    """Skipped non-finite steps in a row before the run ends with an error."""
    early_stop_patience: int | None = None
    """End the run, as if this were its last step, after so many evaluations in a row that were no better than the
    best; None: never."""
    early_stop_min_delta: float = 0.0
    """By how much an evaluation's loss must lie below the best to count as better."""
    hang_timeout_s: float = 600.0
    """A run in which no rank gets on for so long ends, naming the late rank with its stack; reading data, saving and
    exporting may take longer. 0: no watchdog."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps (counted from 1) of which every rank writes a trace for chrome://tracing or Perfetto into RUN/profile/, and
    a table of where the step went, as text and JSON; rank 0 prints its own. Tracing slows such a step down."""
    memory_snapshot_steps: list[int] = field(default_factory=list)
    """Steps of which every rank writes its GPU's allocations into RUN/profile/, for pytorch.org/memory_viz."""
    debug_distributed: Literal["off", "info", "detail"] = "off"
    """What torch and NCCL tell of the ranks' communication: `info`: set-up, and a record of the collectives when one
    hangs; `detail`: every collective is checked over all ranks too (slow)."""
    stop_after_steps: int | None = None
    """End after this many steps of this start though the schedule goes on (for tests and short leases)."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread and how memory is saved."""

    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] | None
    ) = None
    """FSDP, in any case of letters. FULL_SHARD: a group's gathered parameters are freed after its forward.
    SHARD_GRAD_OP: they are kept until the step's last backward. NO_SHARD: ddp. HYBRID_SHARD and _HYBRID_SHARD_ZERO2:
    the same two within each of `dp_replicate` replicas. None: as `reshard_after_forward` says, else FULL_SHARD."""
    reshard_after_forward: bool | int | None = None
    """FSDP: free a group's gathered parameters after its forward. A number: keep them sharded over so many ranks, so
    that the backward gathers within those only. None: as `sharding_strategy` says, which it may not contradict; where
    that says nothing either, `memory` auto keeps them, from a step's first forward to its last backward, where nothing
    is recomputed and they fit."""
    dp_replicate: int | None = None
    """Hybrid sharding: number of replicas, each sharded over the other ranks; it must divide the number of ranks."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the gradient reduction over several ranks (ddp, fsdp)."""
    buffer_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Only fp32: the one buffer, the rotary frequencies, would lose positions in less."""
    wrap_policy: Literal["transformer", "size", "classes"] = "transformer"
    """FSDP: what is gathered together. `transformer`: each block; `size`: modules of at least `min_num_params`;
    `classes`: the modules of `wrap_classes`. What is in no group is in the root's."""
    min_num_params: int = 100_000_000
    """Parameters of a group with `wrap_policy` size."""
    wrap_classes: list[str] = field(default_factory=list)
    """Class names for `wrap_policy` classes: Block, Attention, MLP …, or Hugging Face's, such as Qwen3DecoderLayer."""
    ignored_modules: list[str] = field(default_factory=list)
    """FSDP: patterns of Hugging Face module names (*.embed_tokens, *.mlp) that every rank holds whole."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "NONE"] | None = None
    """FSDP1's word. BACKWARD_PRE is built in; the others are refused: see `backward_prefetch_depth`."""
    forward_prefetch: bool | int = False
    """FSDP: how many groups ahead of the running one are gathered in the forward; true: 1."""
    backward_prefetch_depth: int = 1
    """FSDP: the same in the backward; 1 is built in."""
    limit_all_gathers: bool | None = None
    """FSDP1's word. true is built in, false is refused."""
    use_orig_params: bool | None = None
    """FSDP1's word, without effect: FSDP2 has no flat parameter."""
    sync_module_states: bool = False
    """Rank 0 alone reads the pretrained weights and sends them; false: every rank reads its own share."""
    cpu_offload: bool | None = None
    """FSDP: parameters, gradients and optimizer state live on the CPU, where the optimizer steps. None: false, unless
    `memory` is auto and nothing else fits."""
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"] = "SHARDED_STATE_DICT"
    """Checkpoints are sharded always and load at any number of ranks. FULL_STATE_DICT asks for the weights in one
    piece, which is the export: it must then be on. The optimizer too: `train.py export RUN --full-state FILE`.
    LOCAL_STATE_DICT is refused."""
    memory: Literal["auto", "manual"] = "auto"
    """On a GPU, auto: what is not set of `activation_checkpointing`, `reshard_after_forward`,
    `reduce_every_micro_batch` and `cpu_offload` is chosen so that the run fits with the least recomputation, and after
    a failure for want of memory the next attempt in the same run folder takes less. manual: nothing is chosen."""
    activation_checkpointing: Literal["none", "budget", "selective", "full"] | None = None
    """`full`: a block's activations are computed again in the backward pass; `selective`: all but the outputs of
    matrix products and attention; `budget`: the compiler keeps `activation_budget` of them. None: `memory` chooses."""
    activation_budget: float = 0.5
    """`activation_checkpointing` budget: the share (0 to 1) of a compiled block's activations that is kept; what costs
    most to compute again is kept first."""
    reduce_every_micro_batch: bool | None = None
    """FSDP: whether the gradients of each micro-batch are reduced, or wait, whole, for the step's last one (faster, and
    the memory of a whole gradient). None: they wait, unless `memory` is auto and they do not fit."""
    checkpoint_every: int = 1
    """Activation checkpointing of every n-th block."""
    compile: bool | None = None
    """torch.compile each block. None: on a GPU for which Triton is installed; on the CPU it costs a minute."""
    cuda_graphs: bool | None = None
    """One launch for forward and backward of a micro-batch of packed rows, in one process. None: on a GPU, for models
    so small that launching their kernels takes longer than running them."""


@dataclass(frozen=True)
class RunConfig:
    """The name and the outputs of a run."""

    name: str = "run"
    """Begins the name of the run folder and the id of a job."""
    dir: str = "runs"
    """Parent of the run folder of a `train.py` started by hand; a deployed job has its own folder."""
    export: bool = True
    """Write the final model in Hugging Face format, reopened and compared."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Where the numbers go besides metrics.jsonl: RUN/tensorboard/, Weights & Biases."""
    tracker_project: str = "torchferry"
    """The project of Weights & Biases that the run belongs to."""


@dataclass(frozen=True)
class Config:
    """A whole job. `configs/NAME.py` defines `config = Config(...)`; YAML files say the same."""

    recipe: Literal["sft", "pretrain"] = "sft"
    """What is trained; `sft`: a causal language model on conversations; `pretrain`: one on plain text."""
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    files: list[str] = field(default_factory=list)
    """Git-ignored data or model paths to ship, relative to the project; like `--include`."""
    script: str | None = None
    """A program of your own, run instead of the trainer; the trainer's sections are then not allowed to be set."""
    args: list[str] = field(default_factory=list)
    """Arguments of `script`."""
    torchrun: bool = True
    """Start `script` under torchrun, one process per entry of gpu_ranks."""
