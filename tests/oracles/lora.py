"""Adapters, layer by layer and through their files, compared with PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.oracles.measure import Oracle, largest_difference, scaled_difference, worst
from tests.oracles.reference import SHAPES, save_hf
from tests.support.tiny import tiny_shape
from trainer.export.adapter import write_adapter
from trainer.export.model import sequence_logits
from trainer.models.adapter_files import PREFIX, adapter_weights, load_adapter, lora_spec
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import load_pretrained
from trainer.models.lora import attach, linear_names, lora_of, merge
from trainer.schema import LoraConfig

SHAPE = tiny_shape()
IDS = torch.randint(101, (1, 40), generator=torch.Generator().manual_seed(1))


def save_both(
    folder: Path, targets: str | list[str], *, rslora: bool = False, shape: DecoderShape = SHAPE
) -> peft.PeftModel:
    """PEFT's model with random adapters of rank 4 and alpha 8; base and adapter are written into the folder."""
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(save_hf(shape, folder / "base"), settings).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(folder / "adapter")
    return theirs


def ours_from(folder: Path, shape: DecoderShape = SHAPE) -> Decoder:
    """Our model with the base and the adapter of the folder."""
    decoder = Decoder(shape)
    spec = lora_spec(LoraConfig(adapter=str(folder / "adapter")), linear_names(decoder))
    assert spec is not None
    attach(decoder, spec)
    load_pretrained(decoder, folder / "base")
    load_adapter(decoder, folder / "adapter")
    return decoder


# --- one layer --------------------------------------------------------------------------------------------------------


def layers(folder: Path, *, rslora: bool) -> Iterator[tuple[nn.Module, nn.Module, Tensor]]:
    """Every linear module of ours and PEFT's, and an input for both."""
    theirs = save_both(folder, "all-linear", rslora=rslora)
    ours = ours_from(folder)
    for name in linear_names(ours):
        module = ours.get_submodule(name)
        x = torch.randn(3, 7, module.in_features, generator=torch.Generator().manual_seed(2))
        yield module, theirs.base_model.model.get_submodule(name), x


def outputs_difference(folder: Path, *, rslora: bool) -> float:
    return worst(largest_difference(ours(x), theirs(x)) for ours, theirs, x in layers(folder, rslora=rslora))


def grads_of(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    pairs = {name.partition(".")[0]: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    return {"x": x.grad, **pairs}


def grads_difference(folder: Path, *, rslora: bool) -> float:
    pairs = ((grads_of(ours, x), grads_of(theirs, x)) for ours, theirs, x in layers(folder, rslora=rslora))
    return worst(scaled_difference(mine, other) for mine, other in pairs)


def bf16_error(folder: Path) -> float:
    """As a multiple of PEFT's under autocast, both against PEFT in fp32."""
    mine, other = [], []
    for ours, theirs, x in layers(folder, rslora=False):
        with torch.no_grad():
            exact = theirs(x)
            mine.append(largest_difference(ours(x.bfloat16()).float(), exact))
            with torch.autocast("cpu", torch.bfloat16):
                other.append(largest_difference(theirs(x).float(), exact))
    return worst(mine) / worst(other)


def merge_difference(folder: Path, *, rslora: bool) -> float:
    theirs = save_both(folder, "all-linear", rslora=rslora)
    ours = ours_from(folder)
    spec = lora_of(ours)
    assert spec is not None
    merged = merge({name: p.detach() for name, p in ours.named_parameters()}, spec)
    expected = theirs.merge_and_unload().state_dict()
    return worst(largest_difference(tensor, expected[name]) for name, tensor in merged.items())


# --- files ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def theirs_in_ours(folder: Path) -> float:
    differences = []
    for name, shape in SHAPES.items():
        expected = save_both(folder / name, ["q_proj", "v_proj"], shape=shape)(IDS).logits[0]
        ours = ours_from(folder / name, shape)
        differences.append(largest_difference(sequence_logits(ours, IDS[0].tolist()), expected))
    return worst(differences)


def ours_in_theirs(folder: Path) -> tuple[Decoder, Any]:
    """Our model, and PEFT's from the adapter that we wrote."""
    save_both(folder, ["q_proj", "v_proj"])
    ours = ours_from(folder)
    spec = lora_of(ours)
    assert spec is not None
    pairs = {name: p.detach() for name, p in adapter_weights(ours).items()}
    write_adapter(folder / "written", pairs, spec=spec, shape=SHAPE, base_name=None)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return ours, peft.PeftModel.from_pretrained(base, folder / "written").eval()


def changed_tensors(folder: Path) -> float:
    """Names on one side only, and tensors that differ in a bit."""
    ours, theirs = ours_in_theirs(folder)
    loaded = {name.removeprefix(PREFIX): value for name, value in peft.get_peft_model_state_dict(theirs).items()}
    mine = adapter_weights(ours)
    differing = sum(not torch.equal(mine[name], loaded[name]) for name in mine.keys() & loaded.keys())
    return float(len(mine.keys() ^ loaded.keys()) + differing)


@torch.no_grad()
def written_logits(folder: Path) -> float:
    ours, theirs = ours_in_theirs(folder)
    return largest_difference(sequence_logits(ours, IDS[0].tolist()), theirs(IDS).logits[0])


def _layer_rows(rslora: bool) -> list[Oracle]:
    inputs = f"every linear module, r 4, alpha 8, {'rslora' if rslora else 'plain'}"
    functions = {
        "output of a LoRA layer": outputs_difference,
        "gradients of a LoRA layer": grads_difference,
        "merged LoRA weights": merge_difference,
    }
    return [
        Oracle(name, "PEFT LoraModel", inputs, 1e-6, partial(function, rslora=rslora))
        for name, function in functions.items()
    ]


FAMILIES = "q_proj and v_proj; Qwen2, Qwen3, Llama"
TWO = "q_proj and v_proj, Qwen3"
ORACLES = [
    *_layer_rows(False),
    *_layer_rows(True),
    Oracle("error of a LoRA layer in bf16", "that of PEFT under autocast", "every linear module", 2, bf16_error),
    Oracle("logits with an adapter that PEFT wrote", "PEFT LoraModel", FAMILIES, 1e-5, theirs_in_ours),
    Oracle("tensors of an adapter that we wrote", "PEFT from_pretrained", TWO, 0, changed_tensors),
    Oracle("logits with an adapter that we wrote", "PEFT from_pretrained", TWO, 1e-5, written_logits),
]
