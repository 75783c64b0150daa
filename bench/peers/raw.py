"""A plain-torch Qwen2 with a compiled block: no masks, no options, no checkpoints. The card's speed without a trainer.

python raw.py '[{"model": "0.5b", "seq": 2048, "mb": 8, "wrap": "autocast"}, …]': runs the settings in turn. wrap:
fsdp (FSDP2 per block, gradients reduced in fp32), autocast (one GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from common import SHAPES, TIED, Settings, StepClock, init_dist, rank, report, run_settings, world
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

DEFAULTS: Settings = {
    "model": "7b", "seq": 4096, "mb": 1, "compile": True, "wrap": "fsdp", "warm": 4, "steps": 8,
}  # fmt: skip
HEAD_TOKENS = 4096
"""Tokens whose logits are in memory at a time."""
ATTENTION = {
    "cuda": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "cpu": [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION],
}


class Block(nn.Module):
    def __init__(self, s: dict[str, Any], c: Settings) -> None:
        super().__init__()
        h, d = s["hidden"], s["head_dim"]
        self.nh, self.nkv, self.d = s["heads"], s["kv"], d
        self.norm1 = nn.Parameter(torch.empty(h))
        self.norm2 = nn.Parameter(torch.empty(h))
        self.qkv = nn.Linear(h, (self.nh + 2 * self.nkv) * d)
        self.o = nn.Linear(self.nh * d, h, bias=False)
        self.gate_up = nn.Linear(h, 2 * s["inter"], bias=False)
        self.down = nn.Linear(s["inter"], h, bias=False)
        self.run = torch.compile(self._run, fullgraph=True, dynamic=False) if c["compile"] else self._run

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, h = x.shape
        y = F.rms_norm(x, (h,), self.norm1.to(x.dtype), 1e-6)
        q, k, v = self.qkv(y).view(b, t, -1, self.d).split((self.nh, self.nkv, self.nkv), 2)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(F.rms_norm(x, (h,), self.norm2.to(x.dtype), 1e-6)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.run(x, cos, sin)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


@triton.jit  # type: ignore[untyped-decorator]
def _ce_kernel(  # type: ignore[no-untyped-def]  # Triton's language: its arguments are pointers and constants
    x_ptr, label_ptr, loss_ptr, scale, n_cols: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    p = x_ptr + row * n_cols
    offs = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), -1e30, tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, n_cols, BLOCK):
        x = tl.load(p + i + offs, mask=i + offs < n_cols, other=-1e30).to(tl.float32)
        new = tl.maximum(m, x)
        z = z * tl.exp(m - new) + tl.exp(x - new)
        m = new
    top = tl.max(m, 0)
    total = tl.sum(z * tl.exp(m - top), 0)
    label = tl.load(label_ptr + row)
    at = tl.load(p + label).to(tl.float32)
    tl.store(loss_ptr + row, top + tl.log(total) - at)
    inv = scale / total
    for i in range(0, n_cols, BLOCK):
        cols = i + offs
        x = tl.load(p + cols, mask=cols < n_cols, other=-1e30).to(tl.float32)
        g = tl.exp(x - top) * inv - tl.where(cols == label, scale, 0.0)
        tl.store(p + cols, g.to(x_ptr.dtype.element_ty), mask=cols < n_cols)


def softmax_grad_(logits: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Turns bf16 logits into their loss gradient in place; returns the summed loss."""
    if logits.is_cuda:
        loss = torch.empty(logits.shape[0], device=logits.device)
        labels = labels.contiguous()
        _ce_kernel[(logits.shape[0],)](logits, labels, loss, scale, logits.shape[1], BLOCK=8192, num_warps=16)
        return loss.sum()
    x = logits.float().log_softmax(-1)
    loss = -x.gather(1, labels[:, None]).sum()
    logits.copy_((x.exp() - F.one_hot(labels, x.shape[-1])) * scale)
    return loss


class ChunkedCE(torch.autograd.Function):
    """lm_head and cross entropy together, one chunk of tokens at a time; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        n = x.shape[0]
        loss, dw, dx = x.new_zeros((), dtype=torch.float32), None, torch.empty_like(x)
        for i in range(0, n, HEAD_TOKENS):
            xs = x[i : i + HEAD_TOKENS]
            logits = xs @ w.t()
            loss = loss + softmax_grad_(logits, labels[i : i + HEAD_TOKENS], 1.0 / n)
            torch.mm(logits, w, out=dx[i : i + HEAD_TOKENS])
            dw = logits.t() @ xs if dw is None else dw.addmm_(logits.t(), xs)
        ctx.save_for_backward(dx, dw)
        return loss / n

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = ctx.saved_tensors
        return dx.mul_(g), dw.mul_(g), None  # g is 1 here


class Head(nn.Module):
    def __init__(self, s: dict[str, Any], tied: Tensor | None) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(s["hidden"]))
        self.weight = tied if tied is not None else nn.Parameter(torch.empty(s["vocab"], s["hidden"]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = F.rms_norm(x, (x.shape[-1],), self.norm.to(x.dtype), 1e-6)
        apply: Callable[..., Tensor] = ChunkedCE.apply
        return apply(y.flatten(0, 1), self.weight.to(x.dtype), labels.flatten())


class Model(nn.Module):
    def __init__(self, c: Settings) -> None:
        super().__init__()
        s, self.tied = SHAPES[c["model"]], c["model"] in TIED
        self.embed = nn.Embedding(s["vocab"], s["hidden"])
        self.blocks = nn.ModuleList(Block(s, c) for _ in range(s["layers"]))
        self.head = Head(s, self.embed.weight if self.tied else None)

    def forward(self, ids: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed(ids).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, cos, sin)
        loss: Tensor = self.head(x, labels)
        return loss


def build(c: Settings, device: torch.device) -> Model:
    with torch.device("meta"):
        model = Model(c)
    if c["wrap"] == "fsdp":
        shard(model, device)
    model.to_empty(device=device)
    fill(model, torch.Generator(device).manual_seed(1 + rank()))
    return model


def shard(model: Model, device: torch.device) -> None:
    # FSDP would cast the rope's tables, which are inputs of the blocks
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": dist.init_device_mesh(device.type, (world(),)), "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True, **options)
    if not model.tied:
        fully_shard(model.embed, reshard_after_forward=True, **options)
        fully_shard(model.head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)


@torch.no_grad()
def fill(model: Model, source: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if "norm" in name:
            local.fill_(1.0)
        elif name.endswith("bias"):
            local.zero_()
        else:
            local.normal_(0, 0.02, generator=source)


def rotations(c: Settings, device: torch.device) -> tuple[Tensor, Tensor]:
    size = SHAPES[c["model"]]["head_dim"]
    frequencies = 1e6 ** (torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.arange(c["seq"], device=device).float()[:, None] / frequencies
    return angles.cos()[None, :, None], angles.sin()[None, :, None]


def run_one(c: Settings, device: torch.device) -> None:
    torch._dynamo.reset()
    model = build(c, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    cos, sin = rotations(c, device)
    source, size = torch.Generator(device).manual_seed(100 + rank()), (c["mb"], c["seq"] + 1)
    rows = [torch.randint(0, SHAPES[c["model"]]["vocab"], size, device=device, generator=source) for _ in range(4)]
    clock = StepClock()
    with sdpa_kernel(ATTENTION[device.type], set_priority=True):
        clock.mark()
        for step in range(c["warm"] + c["steps"]):
            ids = rows[step % 4]
            with torch.autocast(device.type, torch.bfloat16, enabled=c["wrap"] == "autocast"):
                loss = model(ids[:, :-1], ids[:, 1:], cos, sin)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.mark()
    report(clock, c["warm"], loss=loss.item())


def main() -> None:
    device = init_dist()
    torch.set_float32_matmul_precision("high")
    run_settings(lambda c: run_one({**DEFAULTS, **c}, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
