from trainer.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TargetConfig, TrainConfig

config = Config(
    run=RunConfig(name="sft"),
    target=TargetConfig(gpu_ranks=[0], train_backend="pytorch", device="cpu"),
    model=ModelConfig(family="qwen3", hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1),
    data=DataConfig(train=["rows.jsonl"], seq_len=64),
    optim=OptimConfig(learning_rate=2e-3),
    train=TrainConfig(steps=2, micro_batch_size=2, precision="fp32"),
)
