"""A whole config, and the section `run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainer.schema.data import DataConfig
from trainer.schema.key import SAMPLE_TOKENS, key
from trainer.schema.model import LoraConfig, ModelConfig
from trainer.schema.optim import OptimConfig
from trainer.schema.parallel import ParallelConfig
from trainer.schema.target import TargetConfig
from trainer.schema.train import TrainConfig


@dataclass(frozen=True)
class RunConfig:
    """The name and the outputs of a run."""

    name: str = "run"
    """Begins the name of the run folder and the id of a job."""
    dir: str = key("runs", aliases=("output_dir",))
    """Parent of the run folder of a local `torchferry train`; a deployed job has its own folder."""
    export: bool = True
    """Write the model in Hugging Face format, reopened and compared."""
    export_from: Literal["auto", "best", "last"] = "auto"
    """Which step's weights are exported: the last one's, or those of the lowest held-out loss, which are then saved at
    each evaluation that is the best so far. `auto`: the best where train.early_stop_patience ends the run."""
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Where the numbers go besides metrics.jsonl: RUN/tensorboard/, Weights & Biases."""
    sample_prompts: list[str] = field(default_factory=list)
    """Prompts that the model answers at each evaluation: at most 16, each of at most 4000 characters; as the user's
    turn with recipe=sft, else as plain text. The answers (greedy decoding) go into RUN/samples.jsonl, the log and the
    trackers. Training is the same bit for bit; each token of an answer costs a forward over all prompts."""
    sample_tokens: int = key(64, limit=SAMPLE_TOKENS)
    """At most this many tokens per answer; the end token ends it earlier."""
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
    """Further git-ignored paths to send, relative to the project, like `--include`. Paths that data, model, lora and
    train.resume name are sent anyway."""
    script: str | None = None
    """Your own program, run instead of the trainer. Then recipe, model, lora, data, optim, train, parallel and `run`
    must not be set, except run.name and run.dir."""
    args: list[str] = field(default_factory=list)
    """Arguments of `script`."""
    torchrun: bool = True
    """Start `script` under torchrun, one process per entry of gpu_ranks."""


DEFAULT_RATES = {"random weights": 1e-3, "LoRA": 2e-4, "the weights of a pretrained model": 1e-5}
"""The learning rate for what is trained, where a config names none."""


def kind_of_training(config: Config) -> str:
    """The kind of training, a key of DEFAULT_RATES."""
    if config.lora.rank is not None or config.lora.adapter is not None:
        return "LoRA"
    is_random = config.model.init == "random" or config.model.name is None
    return "random weights" if is_random else "the weights of a pretrained model"


def learning_rate_of(config: Config) -> float:
    """The learning rate of a run that begins anew."""
    given = config.optim.learning_rate
    return DEFAULT_RATES[kind_of_training(config)] if given is None else given


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of dotted keys; of target.secrets they are names to add. Nothing is checked."""
    for dotted, value in changes.items():
        if dotted == "target.secrets":
            value = [*config.target.secrets, *(name for name in value if name not in config.target.secrets)]
        config = with_key(config, dotted, value)
    return config


def with_key(config: Config, dotted: str, value: Any) -> Config:
    """The config with another value of a dotted key, or of an entry such as target.env.NAME; nothing is checked."""
    section, _, name = dotted.partition(".")
    if not name:
        return replace(config, **{section: value})
    name, _, entry = name.partition(".")
    inner = getattr(config, section)
    if entry:
        value = {**getattr(inner, name), entry: value}
    return replace(config, **{section: replace(inner, **{name: value})})
