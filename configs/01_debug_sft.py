"""Supervised fine-tuning in one process, small enough for a laptop: does training work on this machine?

Hardware: one GPU, or 2 CPU cores with `target.device=cpu`.
Time: under a minute on 2 CPU cores, a few seconds on a GPU. Nothing is downloaded: a 0.8 M parameter model with random
weights learns bytes of questions and answers from the docstrings of Python's standard library.

    python train.py configs/01_debug_sft.py target.device=cpu

Your model and your data, a Hugging Face name or folder and a JSONL file (and then optim.learning_rate=1e-5):

    python train.py configs/01_debug_sft.py model.name=Qwen/Qwen2.5-0.5B-Instruct data.train=my.jsonl
"""

from trainer.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TargetConfig, TrainConfig

config = Config(
    run=RunConfig(name="debug-sft"),
    target=TargetConfig(gpu_ranks=[0], train_backend="pytorch", device="auto"),
    model=ModelConfig(
        family="qwen3", hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2
    ),
    data=DataConfig(train=["builtin:stdlib-docs"], seq_len=512, max_eval_rows=64),
    optim=OptimConfig(learning_rate=2e-3),
    train=TrainConfig(steps=60, micro_batch_size=4, eval_every=20, save_every=30),
)
