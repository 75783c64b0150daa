"""One rank of a measurement: what an asynchronous save costs the training. Run under torchrun by test_async_save.py.

`python -m torch.distributed.run --standalone --nproc-per-node=N -m tests.gpu.async_save FOLDER [tiny]`: rank 0 prints
one JSON object, every list in it seconds of single steps. Without `tiny` the model has the shape of Qwen2.5-1.5B, in
fp32 with AdamW: 18.5 GB of state.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from trainer.batch import Batch
from trainer.checkpoint.retention import Keep
from trainer.checkpoint.shards import reshard
from trainer.dist import Dist, gather, start_dist, stop_dist
from trainer.models.build import build_model
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import init_random
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.saver.writer import AsyncSave, Writer
from trainer.schema import Config, OptimConfig, ParallelConfig, TargetConfig, TrainConfig
from trainer.tensors import local_tensor
from trainer.train.step import apply_update

NORM = "model.norm.weight"
SHAPES = {
    "tiny": DecoderShape(
        family="qwen2",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
    ),
    "1.5B": DecoderShape(
        family="qwen2",
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
    ),
}


SAVES = ("first", "second", "third")


def measure(dist: Dist, folder: Path, shape: DecoderShape) -> dict[str, Any]:
    """Saves with steps before, during and after them, and what each holds of a tensor that the step after it changes.

    `during` has every step from the start of a save to its end; `copying` is the first of them.
    """
    config = Config(
        target=TargetConfig(gpu_ranks=list(range(dist.world_size))),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(precision="bf16"),
        parallel=ParallelConfig(activation_checkpointing="full"),
    )
    backend = make_backend(config, dist)
    module = backend.prepare(build_model(config, shape))
    init_random(module, 0)
    optimizer = build_optimizer(module, config.optim)
    step = partial(one_step, backend, module, optimizer, batch_of(shape, dist))
    writer = Writer(dist, beside=AsyncSave(wait_from_bytes=0))
    began = time.perf_counter()
    result: dict[str, Any] = {"synchronous": writer.prepare(module, optimizer)}
    result["prepare_blocked_s"] = time.perf_counter() - began
    result["first_step_s"], result["while_allocating"] = step(), []
    while any(gather(not writer.is_ready(), dist.control_group)):
        result["while_allocating"].append(step())
    result["allocated_after_s"] = time.perf_counter() - began
    result["before"] = [step() for _ in range(20)]
    norm = local_tensor(next(p for name, p in module.named_parameters() if name.endswith(NORM)))
    for number, save in enumerate(SAVES, start=1):
        reshard(module)
        expected = norm.detach().clone()
        began = time.perf_counter()
        writer.start(folder, number, module, optimizer, {}, keep=Keep(last=1))
        result[f"{save}_blocked_s"] = time.perf_counter() - began
        during = [step()]  # at once, before the copy can have been written
        assert not torch.equal(norm, expected), "the step has not changed what is looked at"
        while any(gather(not writer.has_ended(), dist.control_group)):
            during.append(step())
        written = writer.result()
        assert written is not None
        result[f"{save}_during"], result[f"{save}_copying_s"] = during, during[0]
        result[f"{save}_written_s"], result[f"{save}_note"] = written.seconds, written.note
        result[f"{save}_holds_the_old_value"] = holds(written.path, expected, dist)
        result[f"after_{save}"] = [step() for _ in range(5)]
    writer.close()
    return {**result, "summary": summary(result)}


def summary(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each list of steps: their number, median, mean and slowest in seconds, and mean and slowest as a multiple of
    the mean and the median of the steps before."""
    before = result["before"]
    return {
        name: {
            "steps": len(steps),
            "median_s": statistics.median(steps),
            "mean_s": statistics.mean(steps),
            "slowest_s": max(steps),
            "mean_ratio": statistics.mean(steps) / statistics.mean(before),
            "slowest_ratio": max(steps) / statistics.median(before),
        }
        for name, steps in result.items()
        if isinstance(steps, list) and steps
    }


def one_step(backend: Any, module: Any, optimizer: Any, batch: Batch) -> float:
    """Seconds of one optimizer step, the device's work for it included."""
    began = time.perf_counter()
    backend.sync(True)
    sft_loss(module, batch, packed=False).total.backward()
    backend.scale_grads(torch.tensor(1e-3, device=batch.input_ids.device))
    apply_update(optimizer, 1e-6, torch.tensor(True, device=batch.input_ids.device))
    if batch.input_ids.is_cuda:
        torch.cuda.current_stream().synchronize()  # not the stream of a copy beside it
    return time.perf_counter() - began


def batch_of(shape: DecoderShape, dist: Dist) -> Batch:
    length = min(1024, shape.hidden_size)
    ids = torch.randint(shape.vocab_size, (1, length))
    positions = torch.arange(length)[None]
    return Batch(ids, ids.roll(-1, 1), positions, torch.zeros_like(ids)).to(dist.device)


def holds(path: Path, expected: torch.Tensor, dist: Dist) -> bool:
    """Whether this rank's part of the norm in the checkpoint is what it was when the save began."""
    key = f"model.{NORM}"
    size = dcp.FileSystemReader(path).read_metadata().state_dict_metadata[key].size
    whole = {key: torch.empty(size)}
    dcp.load(whole, checkpoint_id=path, no_dist=True)
    length = len(expected)
    start = 0 if length == size[0] else dist.rank * -(-size[0] // dist.world_size)
    return torch.equal(whole[key][start : start + length], expected.cpu())


def main() -> None:
    folder, size = Path(sys.argv[1]), "tiny" if "tiny" in sys.argv else "1.5B"
    dist = start_dist("cuda" if torch.cuda.is_available() else "cpu")
    result = measure(dist, folder, SHAPES[size])
    if dist.is_main:
        result["card"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(json.dumps(result))
        shutil.rmtree(folder, ignore_errors=True)
    stop_dist()


if __name__ == "__main__":
    main()
