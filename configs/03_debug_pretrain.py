"""Pretraining in one process, small enough for a laptop: a model with random weights learns to spell from plain text.

Hardware: one GPU, or 2 CPU cores with `target.device=cpu`.
Time: under a minute on 2 CPU cores, a few seconds on a GPU. Nothing is downloaded: a 0.8 M parameter model reads the
docstrings of Python's standard library, byte by byte.

    python train.py configs/03_debug_pretrain.py target.device=cpu

Your own texts, tokenized once and then mapped by every run and every rank:

    python train.py tokenize notes/ more.jsonl --tokenizer Qwen/Qwen3-0.6B --out corpus.tokens
    python train.py configs/03_debug_pretrain.py data.train=corpus.tokens data.tokenizer=Qwen/Qwen3-0.6B
"""

from trainer.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TargetConfig, TrainConfig

config = Config(
    recipe="pretrain",
    run=RunConfig(name="debug-pretrain"),
    target=TargetConfig(gpu_ranks=[0], train_backend="pytorch", device="auto"),
    model=ModelConfig(
        family="qwen3", hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2
    ),
    data=DataConfig(train=["builtin:stdlib-docs"], seq_len=512),
    optim=OptimConfig(learning_rate=3e-3),
    train=TrainConfig(steps=60, micro_batch_size=4, eval_every=20, eval_batches=8, save_every=30),
)
