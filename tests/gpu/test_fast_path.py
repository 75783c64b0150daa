"""The fast path on CUDA: exact within bf16's own error, nothing waits for the device, graphs change no loss."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from trainer.batch import IGNORE, Batch
from trainer.data.loader import Data
from trainer.dist import Dist
from trainer.metrics.log import MetricsLog
from trainer.models.attention import attention, document_blocks, document_mask, fastest_kernels, tuned_tiles
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.losses import chunked_cross_entropy, sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.schema import Config, DataConfig, OptimConfig, ParallelConfig, TargetConfig, TrainConfig
from trainer.train.graphs import CudaCapture, GraphedMicroBatches
from trainer.train.run import Run
from trainer.train.step import train_step

DEVICE = torch.device("cuda")
SHAPE = DecoderShape("qwen2", 4096, 256, 512, 3, 4, 2, 64)


def documents(rows: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Documents of 20 to 200 tokens, and padding in the second half of the last row."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(20, 200, (rows, length), generator=generator).cumsum(1)
    doc_ids = torch.searchsorted(ends, torch.arange(length).expand(rows, -1).contiguous(), right=True)
    doc_ids[-1, length // 2 :] = -1
    return doc_ids


def packed(rows: int, length: int, *, seed: int) -> Batch:
    doc_ids = documents(rows, length, seed=seed)
    ids = torch.randint(SHAPE.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    places = torch.arange(length).expand(rows, -1)
    positions = places - (places * starts).cummax(1).values
    last = starts.roll(-1, 1) | (doc_ids < 0)
    labels = ids.roll(-1, 1).masked_fill(last, IGNORE)
    return Batch(ids, labels, positions, doc_ids, torch.nonzero(labels.flatten() != IGNORE).flatten())


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("length", [1, 100, 257, 1024])
def test_flex_attention_is_within_twice_the_error_of_the_dense_mask_in_bf16(head_dim, length):
    doc_ids = documents(2, length).to(DEVICE)
    made = [torch.randn(2, heads, length, head_dim, device=DEVICE) for heads in (6, 2, 2, 6)]

    def run(dtype, mask, tiles=None):
        q, k, v = (x.to(dtype).requires_grad_() for x in made[:3])
        out = attention(q, k, v, mask, tiles)
        return [out, *torch.autograd.grad(out, (q, k, v), made[3].to(dtype))]

    exact = run(torch.float64, document_mask(doc_ids))
    dense = run(torch.bfloat16, document_mask(doc_ids))
    flex = run(torch.bfloat16, document_blocks(doc_ids), tuned_tiles(DEVICE, head_dim))
    for mine, other, expected in zip(flex, dense, exact, strict=True):
        assert (mine - expected).norm() <= 2 * (other - expected).norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [False, True], ids=["labels", "targets"])
def test_chunked_cross_entropy_is_within_twice_the_error_of_torch(dtype, known):
    hidden = torch.randn(5000, 256, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(50_001, 256, device=DEVICE, requires_grad=True)
    labels = torch.randint(50_001, (5000,), device=DEVICE)
    labels[::3] = IGNORE
    targets = torch.nonzero(labels != IGNORE).flatten() if known else None

    def plain(kind):
        leaves = [hidden.detach().to(kind).requires_grad_(), weight.detach().to(dtype).to(kind).requires_grad_()]
        loss = F.cross_entropy(
            (leaves[0] @ leaves[1].T).to(torch.promote_types(kind, torch.float32)), labels, reduction="sum"
        )
        return torch.autograd.grad(loss / 7, leaves)

    exact, theirs = plain(torch.float64), plain(dtype)
    ours = torch.autograd.grad(
        chunked_cross_entropy(hidden, weight, labels=labels, targets=targets) / 7, (hidden, weight)
    )
    for mine, other, expected in zip(ours, theirs, exact, strict=True):
        assert (mine - expected).norm() <= 2 * (other - expected).norm() + 1e-5 * expected.norm()


class Steps:
    """In the place of a TrainLoader: `count` pinned micro-batches a step."""

    def __init__(self, count: int) -> None:
        self._count = count

    def step_batches(self, step: int) -> list[Batch]:
        return [packed(2, 512, seed=10 * step + i).pin() for i in range(self._count)]


def make_run(*, graphs: bool, micro_batches: int = 2, backend: str = "pytorch") -> Run:
    torch._dynamo.reset()
    config = Config(
        target=TargetConfig(train_backend=backend),
        data=DataConfig(seq_len=512),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(micro_batch_size=2, precision="bf16"),
        parallel=ParallelConfig(compile=True),
    )
    dist = Dist(0, 0, 1, DEVICE)
    backend_made = make_backend(config, dist)
    module = backend_made.prepare(build_model(config, SHAPE))
    fill_weights(config, module, None)
    run = Run(
        config=config,
        run_dir=Path(),
        dist=dist,
        backend=backend_made,
        module=module,
        optimizer=build_optimizer(module, config.optim),
        data=Data(Steps(micro_batches), None, None),
        loss_fn=sft_loss,
        log=MetricsLog(Path(), total_steps=9, enabled=False),
    )
    return replace(run, graphed=GraphedMicroBatches(module, sft_loss, CudaCapture())) if graphs else run


def losses(run: Run, steps: int) -> list[float]:
    with fastest_kernels():
        values = [train_step(run, step, lr=1e-3).read() for step in range(steps)]
    return [value[0] / value[1] for value in values]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_through_cuda_graphs_have_the_losses_of_plain_ones(micro_batches):
    plain, graphed = (losses(make_run(graphs=g, micro_batches=micro_batches), 6) for g in (False, True))
    assert graphed == pytest.approx(plain, rel=2e-3)  # sums over targets alone and over all positions round differently
    assert len(set(plain)) == 6


@pytest.mark.parametrize(("graphs", "backend"), [(False, "pytorch"), (True, "pytorch"), (False, "fsdp")])
def test_a_step_never_waits_for_the_device(graphs, backend):
    run = make_run(graphs=graphs, backend=backend)
    losses(run, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with fastest_kernels():
            train_step(run, 2, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_packed_bf16_is_within_twice_the_bf16_error_of_transformers():
    """Gradients of the fast path, and of transformers under autocast, against those of transformers in fp32."""
    from transformers import AutoModelForCausalLM

    from trainer.models.families.decoder_shape import shape_to_hf_config

    run = make_run(graphs=False)
    with torch.device(DEVICE):
        theirs = AutoModelForCausalLM.from_config(shape_to_hf_config(SHAPE), attn_implementation="sdpa")
    theirs.float().load_state_dict(run.module.state_dict(), strict=False)
    theirs.tie_weights()
    ids = torch.randint(SHAPE.vocab_size, (2, 512), device=DEVICE)
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORE
    batch = Batch(ids, labels, torch.arange(512, device=DEVICE).expand(2, -1), torch.zeros_like(ids))

    def grads(autocast):
        theirs.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = theirs(input_ids=ids).logits
        F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").backward()
        return {name: p.grad.clone() for name, p in theirs.named_parameters()}

    torch.backends.cuda.matmul.allow_tf32 = False
    exact, low = grads(False), grads(True)
    with fastest_kernels():
        sft_loss(run.module, batch).total.backward()
    for name, parameter in run.module.named_parameters():
        error, bound = (parameter.grad - exact[name]).norm(), (low[name] - exact[name]).norm()
        assert error <= 2 * bound, (name, (error / bound).item())
