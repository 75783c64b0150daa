"""Compiled blocks: what they compute in bf16 with fused products, how many graphs, and the way back to plain torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.exc import Unsupported

from tests.support.tiny import packed_batch, tiny_shape
from trainer.errors import ConfigError
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder import Decoder
from trainer.models.losses import sft_loss
from trainer.parallel import blocks
from trainer.schema import Config, LoraConfig, TrainConfig

BATCH = packed_batch([[4, 5], [9]], length=16)
SHAPE = replace(tiny_shape(), family="qwen2", num_layers=2)
WHOLE, ADAPTERS = LoraConfig(), LoraConfig(rank=2, targets=["q_proj", "up_proj"], base_dtype="fp32")


def model_of(lora: LoraConfig) -> Decoder:
    """Products in float64: weights are cast, as for bf16, and what fusing them changes is not lost in rounding."""
    config = Config(lora=lora, train=TrainConfig(precision="bf16"))
    decoder = build_model(config, SHAPE).to_empty(device="cpu")
    decoder.reset_buffers(torch.device("cpu"))
    decoder.compute_dtype = torch.float64
    fill_weights(config, decoder, None)
    with torch.no_grad():  # a second matrix of zeros would hide the first one's gradient
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name or name.endswith("bias"):
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    return decoder


def grads_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    sft_loss(decoder, BATCH).total.backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [WHOLE, ADAPTERS], ids=["whole", "lora"])
def test_fused_products_of_compiled_blocks_give_the_gradients_of_single_ones(lora):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoder = model_of(lora)
    blocks.compile_blocks(decoder, fixed_shapes=True)
    expected, found = grads_of(model_of(lora)), grads_of(decoder)
    assert found.keys() == expected.keys()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # blocks share one; the first of LoRA's differs
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_a_model_whose_compilation_is_taken_back_runs_as_plain_torch():
    decoder = model_of(WHOLE)
    blocks.compile_blocks(decoder, fixed_shapes=True)
    blocks.run_eagerly(decoder)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    grads_of(decoder)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


class Frames:
    """A compiler that compiles nothing and counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph.forward


def test_rows_of_every_length_and_number_are_trained_on_and_evaluated_with_few_graphs(monkeypatch):
    torch._dynamo.reset()
    decoder, frames = model_of(ADAPTERS), Frames()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=frames))
    blocks.compile_blocks(decoder, fixed_shapes=False)
    for length in (16, 24, 32, 8, 40):
        for rows in (4, 3, 1, 2):
            batch = packed_batch([[length - 1]] * rows, length=length)
            sft_loss(decoder, batch, packed=False).total.backward()
            with torch.no_grad():
                sft_loss(decoder, batch, packed=False)
    assert 8 < frames.count <= 30  # of block and norm together, however many lengths; torch alone ends at 8 of one


def test_compilation_failures_are_told_from_the_models():
    assert blocks.is_compile_failure(Unsupported("no"))
    assert not blocks.is_compile_failure(RuntimeError("shape"))


def test_what_triton_raises_for_want_of_a_c_compiler_is_a_failure_to_compile():
    source = 'raise RuntimeError("Failed to find C compiler. Please specify via CC")'
    with pytest.raises(RuntimeError) as caught:
        exec(source, {"__name__": "triton.runtime.build"})
    assert blocks.is_compile_failure(caught.value)


def decide(wanted: bool | None, kind: str, why_not: str | None) -> tuple[bool, str]:
    return blocks.decide_compile(wanted, torch.device(kind), why_not=why_not)


def test_compilation_is_left_to_gpus_unless_it_is_asked_for():
    assert decide(None, "cuda", None) == (True, "")
    assert decide(False, "cuda", None) == (False, "")
    assert decide(None, "cpu", "not on a GPU") == (False, "")
    assert decide(True, "cpu", "not on a GPU") == (True, "")


def test_compilation_asked_for_on_a_gpu_without_triton_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.compile is true, and Triton is not installed"):
        decide(True, "cuda", "Triton is not installed")
    assert decide(None, "cuda", "Triton is not installed") == (False, " (Triton is not installed)")
