"""torchtitan 0.2.2 (0.3.0 needs torch 2.12) on its Qwen3 model in Qwen2.5's shapes, synthetic tokens.

python titan.py '[{"model": "0.5b", "seq": 2048, "mb": 8, "ac": "none"}, …]'; ac: selective (by op), full, none, or a
number (memory budget). Its own prefetch, compiled blocks and loss, fp32 reduction.
"""

import tempfile

import torch
import torch.distributed as dist
from common import SHAPES, TIED, StepClock, init_dist, rank, report, run_settings, world

DEFAULTS = {
    "model": "7b",
    "seq": 4096,
    "mb": 1,
    "ac": "selective",
    "compile": True,
    "reshard": "default",
    "warm": 4,
    "steps": 8,
}


class Tokens:
    """A dataloader in torchtitan's form: (inputs, labels) pairs of random tokens on the CPU."""

    def __init__(self, mb, seq, vocab):
        g = torch.Generator().manual_seed(5 + rank())
        self.x = [torch.randint(0, vocab, (mb, seq + 1), generator=g) for _ in range(4)]

    def __iter__(self):
        i = 0
        while True:
            x = self.x[i % 4]
            i += 1
            yield {"input": x[:, :-1].contiguous()}, x[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def run_one(c, dev):
    import dataclasses

    from torchtitan import train as titan
    from torchtitan.config import JobConfig
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3 import Qwen3ModelArgs
    from torchtitan.protocols import train_spec as specs

    torch._dynamo.reset()
    s = SHAPES[c["model"]]
    margs = Qwen3ModelArgs(
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
    spec = dataclasses.replace(
        qwen3.get_train_spec(),
        model_args={"bench": margs},
        build_tokenizer_fn=None,
        state_dict_adapter=None,
        build_dataloader_fn=lambda **kw: Tokens(c["mb"], c["seq"], s["vocab"]),
    )
    specs._extra_train_specs["bench"] = spec
    titan.dist_utils.init_distributed = lambda *a, **kw: world()  # init_dist() below did it already
    job = JobConfig()
    job.model.name, job.model.flavor = "bench", "bench"
    job.job.dump_folder = tempfile.mkdtemp()
    t = job.training
    t.local_batch_size, t.seq_len, t.steps, t.max_norm = c["mb"], c["seq"], c["warm"] + c["steps"], 1.0
    job.optimizer.name, job.optimizer.lr, job.optimizer.implementation = "AdamW", 1e-5, "fused"
    job.lr_scheduler.warmup_steps = 2
    job.metrics.log_freq = 1000
    job.compile.enable = c["compile"]
    job.parallelism.fsdp_reshard_after_forward = c["reshard"]
    a = job.activation_checkpoint
    if isinstance(c["ac"], (int, float)):
        a.mode, a.memory_budget = "memory_budget", c["ac"]
    else:
        a.mode, a.selective_ac_option = c["ac"], "op"
    tr = titan.Trainer(job)
    clock = StepClock()
    data = tr.batch_generator(tr.dataloader)
    clock.mark()
    for _step in range(t.steps):
        tr.step += 1
        tr.gc_handler.run(tr.step)
        tr.train_step(data)
        clock.mark()
    report(clock, c["warm"], float("nan"))
    tr.close()


def main():
    dev = init_dist()
    run_settings(lambda c: run_one(dict(DEFAULTS, **c), dev))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
