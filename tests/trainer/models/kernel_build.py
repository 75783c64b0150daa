"""Builds Triton's kernels for GPUs that need not be here, and tells what each takes: run by test_kernels.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.batch import IGNORE
from trainer.kernels import adamw8bit, cross_entropy, triton_adamw8bit, triton_cross_entropy

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
VOCABULARY = 151936
MOMENTS = {
    f"{m}_{part}_ptr": kind for m in "mv" for part, kind in (("codes", "*u8"), ("scale", "*fp32"), ("qmap", "*fp32"))
}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, int], int]] = {
    # name: kernel, types of its arguments, what is known when it is compiled, warps; as the trainer calls it
    "softmax_gradient": (
        triton_cross_entropy.softmax_gradient,
        {"x_ptr": "*bf16", "labels_ptr": "*i64", "losses_ptr": "*fp32", "stride": "i32"},
        {"n_cols": VOCABULARY, "IGNORE": IGNORE, "BLOCK": cross_entropy.BLOCK},
        16,
    ),
    "scale": (
        triton_cross_entropy.scale,
        {"x_ptr": "*bf16", "factor_ptr": "*fp32", "size": "i32"},
        {"BLOCK": cross_entropy.BLOCK},
        4,
    ),
    "adamw8bit": (
        triton_adamw8bit.step,
        {"p_ptr": "*fp32", "g_ptr": "*fp32", **MOMENTS, "rates_ptr": "*fp32", "found_inf_ptr": "*fp32"}
        | {
            "divisor_ptr": "*fp32",
            "decay": "fp32",
            "weight1": "fp32",
            "weight2": "fp32",
            "eps": "fp32",
            "n_blocks": "i32",
        },
        {"BLOCK": adamw8bit.BLOCK, "ROWS": adamw8bit.ROWS},
        4,
    ),
}


def build(name: str, capability: int) -> dict[str, int]:
    """Registers of a thread, and the bytes of local memory that it spills into."""
    kernel, types, known, warps = KERNELS[name]
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=known)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {word: int(size) for word, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown)}


if __name__ == "__main__":
    print(json.dumps({name: {c: build(name, int(c)) for c in sys.argv[1:]} for name in KERNELS}))
