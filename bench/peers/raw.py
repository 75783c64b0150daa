"""A plain-torch Qwen2 under FSDP2 with per-block torch.compile: no masks, no options, no checkpoints.

python raw.py '[{"model": "0.5b", "seq": 2048, "mb": 8, "wrap": "autocast"}, …]': settings one after the other.
"""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from common import SHAPES, TIED, StepClock, init_dist, rank, report, run_settings, world
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

DEFAULTS = {
    "model": "7b",
    "seq": 4096,
    "mb": 1,
    "accum": 1,
    "ac": "none",  # none | full (eager checkpoint around the compiled block) | mlp (recompute gate/up only)
    "budget": 1.0,  # the partitioner's activation_memory_budget inside the compiled block; 0 saves its input only
    "attn": "cudnn",  # cudnn | flash
    "reshard": True,  # reshard_after_forward of the blocks
    "prefetch": 0,  # explicit forward prefetch depth; 0 leaves FSDP2's own order
    "bprefetch": 0,  # likewise in the backward pass
    "reduce": "fp32",  # dtype of the gradient reduce-scatter
    "compile": True,
    "chunk": 4096,
    "wrap": "fsdp",  # wrap: fsdp | autocast (one GPU, no FSDP)
    "group": 1,  # blocks per FSDP unit
    "sync": True,  # with accum > 1: reduce-scatter each micro-batch's gradients (less memory) or only the last's
    "warm": 4,
    "steps": 8,
    "clip": True,
}


class Block(nn.Module):
    def __init__(self, s, ac):
        super().__init__()
        h, d = s["hidden"], s["head_dim"]
        self.nh, self.nkv, self.d, self.ac = s["heads"], s["kv"], d, ac
        self.norm1 = nn.Parameter(torch.empty(h))
        self.norm2 = nn.Parameter(torch.empty(h))
        self.qkv = nn.Linear(h, (self.nh + 2 * self.nkv) * d)
        self.o = nn.Linear(self.nh * d, h, bias=False)
        self.gate_up = nn.Linear(h, 2 * s["inter"], bias=False)
        self.down = nn.Linear(s["inter"], h, bias=False)
        self.run = self._run
        self.mlp_fn = self._mlp

    def _attn(self, x, cos, sin):
        b, t, h = x.shape
        y = F.rms_norm(x, (h,), self.norm1.to(x.dtype), 1e-6)
        q, k, v = self.qkv(y).view(b, t, -1, self.d).split((self.nh, self.nkv, self.nkv), 2)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return x + self.o(a.transpose(1, 2).reshape(b, t, -1))

    def _mlp(self, x):
        y = F.rms_norm(x, (x.shape[-1],), self.norm2.to(x.dtype), 1e-6)
        g, u = self.gate_up(y).chunk(2, -1)
        return x + self.down(F.silu(g) * u)

    def _run(self, x, cos, sin):
        x = self._attn(x, cos, sin)
        if self.ac == "mlp":
            return checkpoint(self._mlp, x, use_reentrant=False)
        return self._mlp(x)

    def forward(self, x, cos, sin):
        if self.ac == "full":
            return checkpoint(self.run, x, cos, sin, use_reentrant=False)
        return self.run(x, cos, sin)


def rope(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


@triton.jit
def _ce_kernel(x_ptr, label_ptr, loss_ptr, scale, n_cols: tl.constexpr, BLOCK: tl.constexpr):
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


def softmax_grad_(logits, labels, scale):
    """Turns bf16 logits into their loss gradient in place; returns the summed loss."""
    if logits.is_cuda or INTERPRET:
        loss = torch.empty(logits.shape[0], device=logits.device)
        labels = labels.contiguous()
        _ce_kernel[(logits.shape[0],)](logits, labels, loss, scale, logits.shape[1], BLOCK=8192, num_warps=16)
        return loss.sum()
    x = logits.float().log_softmax(-1)
    loss = -x.gather(1, labels[:, None]).sum()
    logits.copy_((x.exp() - F.one_hot(labels, x.shape[-1])) * scale)
    return loss


class ChunkedCE(torch.autograd.Function):
    """lm_head and cross entropy together, a chunk of tokens at a time; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, x, w, labels, chunk):
        n = x.shape[0]
        loss, dw, dx = x.new_zeros((), dtype=torch.float32), None, torch.empty_like(x)
        for i in range(0, n, chunk):
            xs = x[i : i + chunk]
            logits = xs @ w.t()
            loss = loss + softmax_grad_(logits, labels[i : i + chunk], 1.0 / n)
            torch.mm(logits, w, out=dx[i : i + chunk])
            if dw is None:
                dw = logits.t() @ xs
            else:
                dw.addmm_(logits.t(), xs)
        ctx.save_for_backward(dx, dw)
        return loss / n

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return dx.mul_(g), dw.mul_(g), None, None  # g is 1 here


class Head(nn.Module):
    def __init__(self, s, chunk, tied):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(s["hidden"]))
        self.weight = tied if tied is not None else nn.Parameter(torch.empty(s["vocab"], s["hidden"]))
        self.chunk = chunk

    def forward(self, x, labels, dtype):
        w = self.weight.to(dtype)
        y = F.rms_norm(x, (x.shape[-1],), self.norm.to(dtype), 1e-6)
        return ChunkedCE.apply(y.flatten(0, 1), w, labels.flatten(), self.chunk)


class Model(nn.Module):
    def __init__(self, s, c):
        super().__init__()
        self.embed = nn.Embedding(s["vocab"], s["hidden"])
        self.blocks = nn.ModuleList(Block(s, c["ac"]) for _ in range(s["layers"]))
        self.head = Head(s, c["chunk"], self.embed.weight if s["tie"] else None)

    def forward(self, ids, labels, cos, sin):
        x = self.embed(ids).to(torch.bfloat16)
        for b in self.blocks:
            x = b(x, cos, sin)
        return self.head(x, labels, torch.bfloat16)


def build(c, dev):
    s = {**SHAPES[c["model"]], "tie": c["model"] in TIED}
    with torch.device("meta"):
        m = Model(s, c)
    if c["compile"]:
        for b in m.blocks:
            b.run = torch.compile(b._run, fullgraph=True, dynamic=False)
    if c["wrap"] == "fsdp":
        mesh = dist.init_device_mesh(dev.type, (world(),))
        mp = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32 if c["reduce"] == "fp32" else torch.bfloat16, cast_forward_inputs=False
        )
        kw = {"mesh": mesh, "mp_policy": mp}
        units = [list(m.blocks[i : i + c["group"]]) for i in range(0, s["layers"], c["group"])]
        for u in units:
            fully_shard(u if len(u) > 1 else u[0], reshard_after_forward=c["reshard"], **kw)
        if c["model"] not in TIED:
            fully_shard(m.embed, reshard_after_forward=True, **kw)
            fully_shard(m.head, reshard_after_forward=False, **kw)
        fully_shard(m, reshard_after_forward=False, **kw)
        firsts = [u[0] for u in units]
        if c["prefetch"]:
            order = firsts + ([] if c["model"] in TIED else [m.head])
            for i, b in enumerate(order):
                b.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + c["prefetch"]])
        if c["bprefetch"]:
            order = firsts[::-1]
            for i, b in enumerate(order):
                b.set_modules_to_backward_prefetch(order[i + 1 : i + 1 + c["bprefetch"]])
    m.to_empty(device=dev)
    g = torch.Generator(dev).manual_seed(1 + rank())
    with torch.no_grad():
        for n, p in m.named_parameters():
            t = p.to_local() if hasattr(p, "to_local") else p
            if "norm" in n:
                t.fill_(1.0)
            elif n.endswith("bias"):
                t.zero_()
            else:
                t.normal_(0, 0.02, generator=g)
    return m


def run_one(c, dev):
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = c["budget"]
    s = SHAPES[c["model"]]
    m = build(c, dev)
    opt = torch.optim.AdamW(m.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    d = s["head_dim"]
    ang = torch.arange(c["seq"], device=dev).float()[:, None] / (1e6 ** (torch.arange(0, d, 2, device=dev).float() / d))
    cos, sin = ang.cos()[None, :, None], ang.sin()[None, :, None]
    order = {"cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}[
        c["attn"]
    ]
    if dev.type == "cpu":
        order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    g = torch.Generator(dev).manual_seed(100 + rank())
    batches = [torch.randint(0, s["vocab"], (c["mb"], c["seq"] + 1), device=dev, generator=g) for _ in range(4)]
    clock, loss = StepClock(), None
    amp = torch.autocast(dev.type, torch.bfloat16, enabled=c["wrap"] == "autocast")
    with sdpa_kernel(order, set_priority=True):
        clock.mark()
        for step in range(c["warm"] + c["steps"]):
            for a in range(c["accum"]):
                ids = batches[(step * c["accum"] + a) % 4]
                if c["accum"] > 1 and c["wrap"] == "fsdp" and not c["sync"]:
                    m.set_requires_gradient_sync(a == c["accum"] - 1)
                with amp:
                    loss = m(ids[:, :-1], ids[:, 1:], cos, sin)
                (loss / c["accum"] if c["accum"] > 1 else loss).backward()
            if c["clip"]:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True)
            opt.step()
            opt.zero_grad(set_to_none=True)
            clock.mark()
    report(clock, c["warm"], loss.item())


def main():
    dev = init_dist()
    torch.set_float32_matmul_precision("high")
    run_settings(lambda c: run_one(dict(DEFAULTS, **c), dev))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
