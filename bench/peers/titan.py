"""torchtitan 0.2.2 (0.3.0 needs torch 2.12) on its Qwen3 model in Qwen2.5's shapes, synthetic tokens. CUDA only.

python titan.py '[{"model": "0.5b", "seq": 2048, "mb": 8, "ac": "none"}, …]'; ac: selective (by op), full, none, or a
number (memory budget); reshard: default, always, never. With torchtitan's prefetch, compiled blocks and loss, and fp32
reduction.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import SHAPES, TIED, Settings, StepClock, init_dist, rank, report, run_settings, world

DEFAULTS: Settings = {
    "model": "7b", "seq": 4096, "mb": 1, "ac": "selective", "reshard": "default", "compile": True,
    "warm": 4, "steps": 8,
}  # fmt: skip


class Tokens:
    """A dataloader in torchtitan's form: (inputs, labels) pairs of random tokens on the CPU."""

    def __init__(self, c: Settings) -> None:
        source, size = torch.Generator().manual_seed(5 + rank()), (c["mb"], c["seq"] + 1)
        self.rows = [torch.randint(0, SHAPES[c["model"]]["vocab"], size, generator=source) for _ in range(4)]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for rows in self.rows:
                yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def register_model(c: Settings) -> None:
    """Registers it as "bench" among torchtitan's models."""
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3 import Qwen3ModelArgs
    from torchtitan.protocols import train_spec as specs

    s = SHAPES[c["model"]]
    args = Qwen3ModelArgs(
        dim=s["hidden"],
        n_layers=s["layers"],
        n_heads=s["heads"],
        n_kv_heads=s["kv"],
        vocab_size=s["vocab"],
        head_dim=s["head_dim"],
        hidden_dim=s["inter"],
        qk_norm=False,
        max_seq_len=c["seq"],
        enable_weight_tying=c["model"] in TIED,
    )
    specs._extra_train_specs["bench"] = dataclasses.replace(
        qwen3.get_train_spec(),
        model_args={"bench": args},
        build_tokenizer_fn=None,
        state_dict_adapter=None,
        build_dataloader_fn=lambda **_: Tokens(c),
    )


def build_job(c: Settings) -> Any:
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.model.name, job.model.flavor = "bench", "bench"
    job.job.dump_folder = tempfile.mkdtemp()
    job.training.local_batch_size, job.training.seq_len = c["mb"], c["seq"]
    job.training.steps, job.training.max_norm = c["warm"] + c["steps"], 1.0
    job.optimizer.name, job.optimizer.lr, job.optimizer.implementation = "AdamW", 1e-5, "fused"
    job.lr_scheduler.warmup_steps = 2
    job.metrics.log_freq = 1000
    job.compile.enable = c["compile"]
    job.parallelism.fsdp_reshard_after_forward = c["reshard"]
    checkpointing = job.activation_checkpoint
    if isinstance(c["ac"], (int, float)):
        checkpointing.mode, checkpointing.memory_budget = "memory_budget", c["ac"]
    else:
        checkpointing.mode, checkpointing.selective_ac_option = c["ac"], "op"
    return job


def run_one(c: Settings) -> None:
    from torchtitan import train as titan

    torch._dynamo.reset()
    register_model(c)
    titan.dist_utils.init_distributed = lambda *_, **__: world()  # init_dist() did it already
    trainer = titan.Trainer(build_job(c))
    clock, data = StepClock(), trainer.batch_generator(trainer.dataloader)
    clock.mark()
    for _ in range(c["warm"] + c["steps"]):
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(data)
        clock.mark()
    report(clock, c["warm"])
    trainer.close()


def main() -> None:
    init_dist()
    run_settings(lambda c: run_one({**DEFAULTS, **c}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
