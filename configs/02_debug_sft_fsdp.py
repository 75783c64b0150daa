"""Supervised fine-tuning sharded over four GPUs with FSDP2: does a host train, save and export with several ranks?

Hardware: 4 GPUs of one host; fewer with `target.gpu_ranks=0,1`, none with `target.device=cpu` (CPU processes, gloo).
Time: about a minute with 2 processes on 2 CPU cores, a few seconds on GPUs. Nothing is downloaded: a 0.8 M parameter
model with random weights learns bytes of questions and answers from the docstrings of Python's standard library.

    python deploy.py configs/02_debug_sft_fsdp.py --ssh root@host:port
    python deploy.py configs/02_debug_sft_fsdp.py target.device=cpu target.gpu_ranks=0,1

Your model and your data, a Hugging Face name or folder and a JSONL file (and then optim.learning_rate=1e-5):

    python deploy.py configs/02_debug_sft_fsdp.py --ssh HOST model.name=Qwen/Qwen2.5-0.5B-Instruct data.train=my.jsonl
"""

from trainer.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TargetConfig, TrainConfig

config = Config(
    run=RunConfig(name="debug-sft-fsdp"),
    target=TargetConfig(gpu_ranks=[0, 1, 2, 3], train_backend="fsdp", device="auto"),
    model=ModelConfig(
        family="qwen3", hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2
    ),
    data=DataConfig(train=["builtin:stdlib-docs"], seq_len=512, max_eval_rows=64),
    optim=OptimConfig(learning_rate=2e-3),
    train=TrainConfig(steps=60, micro_batch_size=4, eval_every=20, save_every=30),
)
