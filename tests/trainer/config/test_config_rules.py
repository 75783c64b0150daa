"""What a config may not say, what it may just say, and keys that have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import error_of
from trainer.config.keys import known_keys, limits
from trainer.config.load import (
    check_config,
)
from trainer.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)


def target(**values: Any) -> Config:
    return Config(target=TargetConfig(**values))


def train(ranks: int = 1, **values: Any) -> Config:
    return Config(train=TrainConfig(**values), target=TargetConfig(gpu_ranks=list(range(ranks))))


NAME_RULE = "it may hold only letters, digits, '.', '_' and '-', at most 100, not starting with '.' or '-'"
RULES = [
    (target(gpu_ranks=[]), "target.gpu_ranks is empty\nhint: name one GPU index for each process; with target.device"),
    (
        target(gpu_ranks=[0, 1, 0]),
        "target.gpu_ranks is [0, 1, 0]: it names 0 twice\nhint: name each GPU once; each gets one process",
    ),
    (target(gpu_ranks=[1, "01"]), "target.gpu_ranks is [1, '01']: it names 01 twice"),
    (
        target(gpu_ranks=["GPU-ABCD", "GPU-abcd"]),
        "target.gpu_ranks is ['GPU-ABCD', 'GPU-abcd']: it names GPU-abcd twice",
    ),
    (target(gpu_ranks=[0, -1]), "target.gpu_ranks holds -1, a GPU index is 0 or more"),
    (target(gpu_ranks=["-2"]), "target.gpu_ranks holds -2, a GPU index is 0 or more"),
    (
        target(gpu_ranks=["cuda:0"]),
        "target.gpu_ranks holds 'cuda:0', expected an index such as 0 or a UUID such as GPU-8932f937-…",
    ),
    (target(gpu_ranks=["auto:0"]), "target.gpu_ranks holds 'auto:0', not a number of GPUs"),
    (target(gpu_ranks=["auto"]), "target.gpu_ranks holds 'auto', not a number of GPUs"),
    (target(gpu_ranks=["auto:2", 1]), "target.gpu_ranks is ['auto:2', 1], auto:N stands alone"),
    (
        target(gpu_ranks=["auto:2"], train_backend="pytorch"),
        "target.train_backend is pytorch, one process, but target.gpu_ranks names 2 GPUs: ['auto:2']",
    ),
    (
        target(gpu_ranks=["GPU-8932f937", 1]),
        "target.gpu_ranks is ['GPU-8932f937', 1], CUDA takes indices or UUIDs, not both",
    ),
    (
        target(gpu_ranks=[0, 1], train_backend="pytorch"),
        "target.train_backend is pytorch, one process, but target.gpu_ranks names 2 GPUs: [0, 1]\nhint: use ddp",
    ),
    (target(env={"A-B": "1"}), "target.env holds 'A-B', not a name of an environment variable"),
    (target(env={"1A": "1"}), "target.env holds '1A', not a name of an environment variable"),
    (target(secrets=["A=b"]), "target.secrets holds 'A=b', not a name of an environment variable\nhint: a secret is"),
    (target(secrets=["T"], env={"T": "x"}), "T is in both target.env and target.secrets\nhint: keep one of them"),
    (target(secrets=["T", "T"]), "target.secrets names T twice"),
    (
        target(env={"CUDA_VISIBLE_DEVICES": "1"}),
        "target.env may not set CUDA_VISIBLE_DEVICES: target.gpu_ranks says which GPUs the job sees",
    ),
    (target(env={"RANK": "1"}), "target.env may not set RANK: torchrun sets it for every process"),
    (target(secrets=["TORCHFERRY_RUN_DIR"]), "target.secrets may not set TORCHFERRY_RUN_DIR: it is the launcher's own"),
    (target(ssh="-oProxyCommand=x"), "target.ssh is '-oProxyCommand=x', it may not start with '-'"),
    (target(ssh=""), "target.ssh is empty"),
    (Config(run=RunConfig(name="../x")), f"run.name is '../x', {NAME_RULE}"),
    (Config(run=RunConfig(name="-x")), f"run.name is '-x', {NAME_RULE}"),
    (Config(run=RunConfig(name=".x")), f"run.name is '.x', {NAME_RULE}"),
    (Config(run=RunConfig(name="a b")), f"run.name is 'a b', {NAME_RULE}"),
    (Config(run=RunConfig(name="x\n")), f"run.name is 'x\\n', {NAME_RULE}"),
    (Config(data=DataConfig(train=[])), "data.train is empty\nhint: name a JSONL or Parquet file or a dataset"),
    (Config(data=DataConfig(train=["a", " "])), "data.train[1] is empty"),
    (Config(data=DataConfig(seq_len=1)), "data.seq_len is 1, must be 2 or more"),
    (Config(data=DataConfig(seq_len=8192)), "data.seq_len is 8192, more than model.max_position_embeddings, 4096"),
    (Config(data=DataConfig(eval_fraction=1.0)), "data.eval_fraction is 1.0, must be 0 or more and less than 1"),
    (Config(model=ModelConfig(init="pretrained")), "model.init is pretrained, but model.name is null\nhint: set model"),
    (
        Config(model=ModelConfig(hidden_size=100, num_heads=3, num_kv_heads=3)),
        "model.hidden_size is 100, not a multiple of model.num_heads, 3\nhint: change one of them or set model",
    ),
    (
        Config(model=ModelConfig(hidden_size=12, num_heads=4)),
        "model.hidden_size 12 / model.num_heads 4 = 3 per head, must be an even number of 2 or more",
    ),
    (Config(model=ModelConfig(head_dim=7)), "model.head_dim is 7, must be an even number of 2 or more"),
    (
        Config(model=ModelConfig(num_heads=4, num_kv_heads=3)),
        "model.num_heads is 4, not a multiple of model.num_kv_heads, 3",
    ),
    (Config(model=ModelConfig(num_layers=0)), "model.num_layers is 0, must be 1 or more"),
    (train(steps=None), "neither train.steps nor train.epochs is given\nhint: set one of them"),
    (train(steps=None, epochs=0.0), "train.epochs is 0.0, must be more than 0"),
    (train(steps=0), "train.steps is 0, must be 1 or more"),
    (train(micro_batch_size=-4), "train.micro_batch_size is -4, must be 1 or more"),
    (train(seed=2**32), "train.seed is 4294967296, must be 0 to 4294967295"),
    (
        train(4, global_batch_size=3),
        "train.global_batch_size is 3, less than one row for each of 4 processes\nhint: make it 4 or more",
    ),
    (
        train(2, global_batch_size=64, micro_batch_size=4, grad_accum_steps=2),
        "train.global_batch_size is 64, but micro_batch_size 4 x grad_accum_steps 2 x 2 processes = 16\nhint: set only",
    ),
    (
        Config(train=TrainConfig(micro_batch_tokens=4096, global_batch_size=8)),
        "train.micro_batch_tokens is 4096, but with data.packing every row has data.seq_len tokens, 512\nhint: set "
        "train.micro_batch_size=8 instead",
    ),
    (
        Config(train=TrainConfig(micro_batch_tokens=500, global_batch_size=8), data=DataConfig(packing=False)),
        "train.micro_batch_tokens is 500, less than one row of data.seq_len tokens, 512",
    ),
    (
        Config(train=TrainConfig(micro_batch_tokens=512), data=DataConfig(packing=False)),
        "train.micro_batch_tokens is 512, but train.global_batch_size is null: nothing says how many rows a step has",
    ),
    (
        Config(
            train=TrainConfig(micro_batch_tokens=512, global_batch_size=8, grad_accum_steps=2),
            data=DataConfig(packing=False),
        ),
        "train.grad_accum_steps is 2, but with train.micro_batch_tokens the tokens decide that",
    ),
    (
        Config(optim=OptimConfig(min_learning_rate=0.01)),
        "optim.min_learning_rate is 0.01, more than the default for random weights, 0.001",
    ),
    (
        Config(optim=OptimConfig(decay_steps=5)),
        "optim.decay_steps is 5, but optim.schedule is cosine; only wsd has a separate decay\nhint: drop decay_steps",
    ),
    (
        Config(optim=OptimConfig(schedule="wsd", decay_steps=195)),
        "optim.warmup_steps 10 + decay_steps 195 = 205, more than train.steps, 200",
    ),
    (
        Config(optim=OptimConfig(warmup_steps=201)),
        "optim.warmup_steps is 201, more than train.steps, 200\nhint: set optim.warmup_steps=20",
    ),
    (Config(optim=OptimConfig(beta2=1.0)), "optim.beta2 is 1.0, must be 0 or more and less than 1"),
    (Config(args=["--x"]), "args is ['--x'], but there is no script to take them\nhint: set script"),
    (Config(torchrun=False), "torchrun is false, which needs a script: the trainer has its own launcher"),
    (
        Config(script="a.py", train=TrainConfig(steps=5), model=ModelConfig(name="x")),
        "script is 'a.py', so the trainer does not run, but it is configured in: model, train\nhint: pass a script",
    ),
    (
        Config(script="a.py", target=TargetConfig(train_backend="fsdp")),
        "target.train_backend is fsdp, but script 'a.py' decides that\nhint: drop it",
    ),
]


@pytest.mark.parametrize(("config", "error"), RULES, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_broken_rule_is_named_with_its_numbers(config: Config, error: str) -> None:
    assert error_of(config).startswith(f"Error: {error}")


VALID = [
    Config(),
    target(gpu_ranks=[3], train_backend="ddp"),
    target(gpu_ranks=[0], train_backend="fsdp"),
    target(gpu_ranks=[0, 1], env={"_A1": ""}, secrets=["HF_TOKEN"]),
    train(2, global_batch_size=16, micro_batch_size=4, grad_accum_steps=2),
    train(2, global_batch_size=3),
    train(steps=10),
    train(steps=None, epochs=0.1),
    Config(model=ModelConfig(name="x", hidden_size=100, num_heads=3), data=DataConfig(seq_len=100_000)),
    Config(model=ModelConfig(hidden_size=100, num_heads=3, num_kv_heads=1, head_dim=32)),
    Config(optim=OptimConfig(schedule="wsd", decay_steps=190)),
    Config(script="a.py", args=["--x", ""], target=TargetConfig(gpu_ranks=[0, 1]), torchrun=False),
    Config(run=RunConfig(name="1.0_a-b")),
]


@pytest.mark.parametrize("config", VALID, ids=range(len(VALID)))
def test_config_at_the_edge_of_the_rules_is_accepted(config: Config) -> None:
    check_config(config)


def test_every_number_of_the_schema_has_a_limit() -> None:
    numbers = {key for key, kind in known_keys().items() if {int, float} & {kind, *getattr(kind, "__args__", ())}}
    assert numbers == set(limits()) - {"target.outputs", "target.after"}  # whose limits are of texts


def test_rule_names_the_line_of_its_key(load_config_file: Any) -> None:
    message = load_config_file("a.yaml", "target:\n  gpu_ranks:\n  - 0\n  - 0\n")
    assert message.splitlines()[:2] == ["Error: target.gpu_ranks is [0, 0]: it names 0 twice", "  in a.yaml:2"]
