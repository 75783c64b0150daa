"""What a compiled block is said to keep, against what the compiler's partitioner chooses for blocks of real widths.

The partitioner sees shapes alone, so a 7B block is traced here in two seconds, without weights and without a compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode

from trainer.config.load import config_from_dict
from trainer.memory.activations import Kernels, count_activations
from trainer.models.attention import document_blocks
from trainer.models.build import build_model
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.figures import Micro
from trainer.parallel.blocks import recompute_blocks
from trainer.parallel.partition import kept_by, partition_budget

ROWS, LENGTH = 4, 2048
TOKENS = ROWS * LENGTH
WIDTHS = {
    "qwen2.5-7b": DecoderShape("qwen2", 1000, 3584, 18944, 1, 28, 4, 128),
    "qwen2.5-1.5b": DecoderShape("qwen2", 1000, 1536, 8960, 1, 12, 2, 128),
    "qwen3-0.6b": DecoderShape("qwen3", 1000, 1024, 3072, 1, 16, 8, 128),
    "llama-3.2-1b": DecoderShape("llama", 1000, 2048, 8192, 1, 32, 8, 64),
}


def decoder_of(shape: DecoderShape, *, gathered: bool = True, **sections: Any) -> Decoder:
    """The model on meta; under FSDP (`gathered`) a block sees its weights cast."""
    decoder = build_model(
        config_from_dict({"target": {"device": "cpu"}, "train": {"precision": "bf16"}, **sections}), shape
    )
    for parameter in decoder.parameters() if gathered else ():
        parameter.data = parameter.data.bfloat16()
    return decoder


def kept_by_partitioner(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, *, budget: float, packed: bool) -> int:
    """Bytes that the partitioner keeps of the first block, each storage once, without its inputs."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    kept: dict[Any, Tensor] = {}

    def partition(graph: Any, inputs: Any, **options: Any) -> Any:
        graph = _recursive_joint_graph_passes(graph) or graph
        forward, backward = min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)
        for node in backward.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, Tensor) and not node.name.startswith(("pri", "tan")):
                kept[value.untyped_storage()._cdata] = value
        return forward, backward

    def run_nothing(graph: Any, _inputs: Any) -> Any:
        return graph.forward

    compiler = aot_autograd(
        fw_compiler=run_nothing, bw_compiler=run_nothing, partition_fn=partition, decompositions=select_decomp_table
    )
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, functorch_config.patch(activation_memory_budget=budget):
        shape = decoder.shape
        block = fake_copy(decoder.blocks[0], mode)
        x = torch.empty(ROWS, LENGTH, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        tables = [torch.empty(ROWS, LENGTH, shape.head_dim // 2) for _ in range(2)]
        mask = document_blocks(torch.zeros(ROWS, LENGTH, dtype=torch.int64)) if packed else None
        torch.compile(block.forward, backend=compiler, fullgraph=True, dynamic=False)(x, *tables, mask)
    return sum(value.untyped_storage().nbytes() for value in kept.values())


def fake_copy(block: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    for module in block.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
    return block


CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "7b": ("qwen2.5-7b", 1.0, {}),
    "7b, half": ("qwen2.5-7b", 0.5, {}),
    "normed queries, all products": ("qwen3-0.6b", 0.7, {}),
    "normed queries, few products": ("qwen3-0.6b", 0.3, {}),
    "packed, half": ("qwen2.5-1.5b", 0.5, {"packed": True}),
    "weights cast inside": ("qwen2.5-1.5b", 1.0, {"gathered": False}),
    "weights cast inside, half": ("qwen2.5-1.5b", 0.5, {"gathered": False}),
    "lora, all products": ("llama-3.2-1b", 0.7, {"lora": {"rank": 16}}),
    "lora of q and v": ("qwen2.5-1.5b", 1.0, {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}),
}


LONG = ("7b", "normed queries, few products", "weights cast inside", "lora of q and v")
"""Cases that the others nearly hold."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.soak] if c in LONG else []) for c in CASES])
def test_compiled_block_is_said_to_keep_what_the_partitioner_chooses(case, monkeypatch):
    name, share, options = CASES[case]
    gathered, packed = options.get("gathered", True), options.get("packed", False)
    decoder = decoder_of(WIDTHS[name], gathered=gathered, **{k: v for k, v in options.items() if k == "lora"})
    micro = Micro(TOKENS, LENGTH, packed, c=2, triton=True, compiled=True, gathered=gathered)
    block = decoder.block_memory(decoder.blocks[0], micro)
    said, budget = kept_by(block, share), partition_budget(block, share)
    chosen = kept_by_partitioner(monkeypatch, decoder, budget=budget, packed=packed)
    assert said.values + said.casts == pytest.approx(chosen, rel=0.02)


def test_selective_checkpointing_keeps_the_attention_of_packed_rows_too(monkeypatch):
    values = {"data": {"seq_len": LENGTH}, "train": {"micro_batch_size": ROWS, "precision": "bf16"}}
    decoder = decoder_of(WIDTHS["qwen2.5-1.5b"], **values)
    recompute_blocks(decoder, "selective", 1)
    chosen = kept_by_partitioner(monkeypatch, decoder, budget=1.0, packed=True)
    config = config_from_dict({**values, "parallel": {"activation_checkpointing": "selective"}})
    one, none = (
        count_activations(d, config, Kernels(triton=True, compiled=True), gathered=True).kept
        for d in (decoder, decoder_of(replace(WIDTHS["qwen2.5-1.5b"], num_layers=0), **values))
    )
    entry = TOKENS * 2 * 1536
    assert one - none == pytest.approx(chosen + entry, rel=0.02)
