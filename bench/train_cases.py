"""The rows that bench/train.py can run: models by their shapes, contenders with their settings, grouped in named
cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 SXM, from the vendor's datasheet."""

SHAPES: dict[str, dict[str, int]] = {
    # Qwen2.5; "-l14" has half the layers, so that it fits two GPUs where the whole model needs four
    "7b": {"hidden": 3584, "inter": 18944, "layers": 28, "heads": 28, "kv": 4, "head_dim": 128, "vocab": 152064},
    "7b-l14": {"hidden": 3584, "inter": 18944, "layers": 14, "heads": 28, "kv": 4, "head_dim": 128, "vocab": 152064},
    "1.5b": {"hidden": 1536, "inter": 8960, "layers": 28, "heads": 12, "kv": 2, "head_dim": 128, "vocab": 151936},
    "0.5b": {"hidden": 896, "inter": 4864, "layers": 24, "heads": 14, "kv": 2, "head_dim": 64, "vocab": 151936},
    "tiny": {"hidden": 64, "inter": 160, "layers": 2, "heads": 4, "kv": 2, "head_dim": 16, "vocab": 512},
}
TIED = ("1.5b", "0.5b", "tiny")
WORKS = {
    "lora.rank": "LoRA", "lora": "LoRA", "train.float8": "float8", "optim.optimizer": "8-bit AdamW",
    "model.freeze": "frozen", "parallel.cpu_offload": "CPU offload", "train.grad_accum_steps": "accumulation",
}  # fmt: skip
"""Options, ours or a peer's, that change what is computed: such rows are only compared with each other."""


def doc_tokens(model: str) -> tuple[int, int]:
    """The range of document lengths in packed rows, both ends included; lengths are drawn evenly from it."""
    return (4, 32) if model == "tiny" else (256, 2048)


def work_of(options: Mapping[str, Any]) -> str:
    """How a row's options change the work itself; empty: full training in bf16."""
    return ", ".join(WORKS[name] for name in options if name in WORKS)


def hf_config(model: str) -> dict[str, Any]:
    """The config.json of a shape; our models and Hugging Face's are built from it."""
    s = SHAPES[model]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": s["vocab"],
        "hidden_size": s["hidden"],
        "intermediate_size": s["inter"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv"],
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": model in TIED,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def count_params(model: str) -> int:
    """Parameters that take part in a matrix product: with the head, without an untied input table."""
    s = SHAPES[model]
    q, kv = s["heads"] * s["head_dim"], s["kv"] * s["head_dim"]
    layer = s["hidden"] * (2 * q + 2 * kv) + q + 2 * kv + 3 * s["hidden"] * s["inter"] + 2 * s["hidden"]
    return s["layers"] * layer + s["hidden"] + s["vocab"] * s["hidden"]


def flops_per_token(model: str, seq_len: int) -> float:
    """6N + 12·L·H·Dh·T: attention is not halved for causality, recomputation is not counted."""
    s = SHAPES[model]
    return 6.0 * count_params(model) + 12.0 * s["layers"] * s["heads"] * s["head_dim"] * seq_len


@dataclass(frozen=True)
class Contender:
    """One row of a table: a contender and its settings."""

    who: str
    """ours, raw, titan, hf, liger, trl."""
    model: str
    seq_len: int
    micro_batch: int
    gpus: int = 1
    label: str = ""
    """The difference in its settings, for the table."""
    packed: bool = False
    """Whether documents are packed into rows; otherwise every row is one document of full length."""
    cache: str = ""
    """The name of a compile cache of this report, which is empty for the first row with it; "": the user's cache."""
    options: dict[str, Any] = field(default_factory=dict)
    """Overrides of our config, or settings of the peer's script."""

    @property
    def key(self) -> str:
        """The row's name in a baseline."""
        rows = "packed" if self.packed else "fixed"
        return f"{self.who} {self.model} {self.gpus}x{self.micro_batch}x{self.seq_len} {rows} {self.label}".strip()


def contender_of(
    who: str,
    model: str,
    seq_len: int,
    micro_batch: int,
    *,
    gpus: int = 1,
    label: str = "",
    packed: bool = False,
    cache: str = "",
    **options: Any,
) -> Contender:
    """A row. Options are settings of a peer's script in bench/peers/, or keys of our config with `__` for the dot."""
    named = {name.replace("__", "."): value for name, value in options.items()}
    return Contender(who, model, seq_len, micro_batch, gpus, label, packed, cache, named)


ours = partial(contender_of, "ours")


def _small(model: str, batches: tuple[int, int]) -> list[Contender]:
    """One GPU at 2048 tokens: the smaller micro-batch for all, the larger one where it may be the contender's best."""
    small, large = batches
    return [
        ours(model, 2048, small),
        ours(model, 2048, large),
        contender_of("titan", model, 2048, small, label="no AC", ac="none"),
        contender_of("trl", model, 2048, small, label="no AC", ac="none"),
        contender_of("hf", model, 2048, small, label="no AC", ac="none"),
        contender_of("liger", model, 2048, large, label="no AC", ac="none"),
    ]


def _four_a_step(label: str, **options: Any) -> Contender:
    return ours("7b-l14", 4096, 2, gpus=2, label=label, train__grad_accum_steps=4, **options)


CASES: dict[str, list[Contender]] = {
    "0.5b": _small("0.5b", (8, 16)),
    "1.5b": _small("1.5b", (4, 8)),
    "launch": [
        ours("0.5b", 2048, 1, packed=True),
        ours("0.5b", 2048, 1, packed=True, label="no graphs", parallel__cuda_graphs="false"),
    ],
    "raw": [
        ours("0.5b", 2048, 8), contender_of("raw", "0.5b", 2048, 8, wrap="autocast"),
        ours("1.5b", 2048, 4), contender_of("raw", "1.5b", 2048, 4, wrap="autocast"),
    ],
    "packed": [
        *(one for model, rows in (("0.5b", 4), ("1.5b", 2)) for one in (
            ours(model, 4096, rows), ours(model, 4096, rows, packed=True),
            contender_of("trl", model, 4096, rows, packed=True, label="default packing, no AC", ac="none"))),
    ],
    "7b-l14": [
        ours("7b-l14", 4096, 4, gpus=2),
        ours("7b-l14", 4096, 4, gpus=2, label="NCCL_MAX_CTAS=8", target__env="{NCCL_MAX_CTAS: '8'}"),
        ours("7b-l14", 4096, 4, gpus=2, label="reshards", parallel__reshard_after_forward="true"),
        ours("7b-l14", 4096, 4, gpus=2, packed=True),
        ours("7b-l14", 4096, 2, gpus=2),
        contender_of("titan", "7b-l14", 4096, 4, gpus=2, label="no AC", ac="none"),
        contender_of("titan", "7b-l14", 4096, 4, gpus=2, label="no AC, never reshards", ac="none", reshard="never"),
        contender_of("titan", "7b-l14", 4096, 2, gpus=2, label="no AC", ac="none"),
        contender_of("titan", "7b-l14", 4096, 4, gpus=2, label="selective AC", ac="selective"),
        contender_of("liger", "7b-l14", 4096, 4, gpus=2, label="full AC", ac="fsdp"),
        contender_of("liger", "7b-l14", 4096, 8, gpus=2, label="full AC", ac="fsdp"),
        contender_of("trl", "7b-l14", 4096, 2, gpus=2, label="full AC", ac="gc"),
        contender_of("trl", "7b-l14", 4096, 4, gpus=2, label="full AC", ac="gc"),
        contender_of("trl", "7b-l14", 4096, 2, gpus=2, packed=True, label="default packing, full AC", ac="gc"),
        contender_of("hf", "7b-l14", 4096, 2, gpus=2, label="full AC", ac="fsdp"),
    ],
    "accum": [
        _four_a_step("4 a step"),
        _four_a_step("4 a step, reshards", parallel__reshard_after_forward="true"),
        _four_a_step("4 a step, each reduced", parallel__reduce_every_micro_batch="true"),
    ],
    "lora": [
        ours("7b", 4096, 1, label="LoRA", lora__rank=16),
        ours("7b", 4096, 2, label="LoRA", lora__rank=16),
        contender_of("trl", "7b", 4096, 1, label="LoRA, no AC", ac="none", lora=16),
        contender_of("trl", "7b", 4096, 2, label="LoRA, full AC", ac="gc", lora=16),
    ],
    "options": [
        ours("1.5b", 2048, 4),
        ours("1.5b", 2048, 4, label="adamw8bit", optim__optimizer="adamw8bit"),
        ours("1.5b", 2048, 4, label="frozen embedding", model__freeze="model.embed_tokens.*"),
        ours("1.5b", 2048, 4, label="cpu_offload", target__train_backend="fsdp", parallel__cpu_offload="true"),
        ours("1.5b", 2048, 4, packed=True),
        ours("1.5b", 2048, 4, packed=True, label="float8", train__float8="on"),  # only packed rows have equal lengths
    ],
    "start": [
        ours("1.5b", 2048, 4, label="nothing compiled before", cache="start"),
        ours("1.5b", 2048, 4, label="started before", cache="start"),
        contender_of("hf", "1.5b", 2048, 4, label="no AC", ac="none"),
    ],
    "tiny": [
        ours("tiny", 64, 2),
        ours("tiny", 64, 2, packed=True),
        contender_of("raw", "tiny", 64, 2, compile=False),
        contender_of("hf", "tiny", 64, 2, label="no AC", ac="none"),
        contender_of("trl", "tiny", 64, 2, packed=True, label="default packing, no AC", ac="none"),
        contender_of("trl", "tiny", 64, 2, label="LoRA, no AC", ac="none", lora=4),
    ],
}  # fmt: skip
