"""The decoder, its loss, its packing and its export, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.oracles.measure import Oracle, largest_difference, scaled_difference, worst
from tests.oracles.reference import SHAPES, both_models, from_folder, hf_labels, save_hf
from tests.support.tiny import ALONE, export_model, packed_batch, tiny_shape
from trainer.batch import Batch
from trainer.export.model import sequence_logits
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.layers import logits_head
from trainer.models.losses import sft_loss

IDS = torch.randint(101, (1, 40), generator=torch.Generator().manual_seed(1))
DOCUMENTS = [5, 9, 7, 3, 8]


def shapes_of(family: str, folder: Path) -> Iterator[tuple[DecoderShape, Path]]:
    for name, shape in SHAPES.items():
        if name.startswith(family):
            yield shape, folder / name


def logits_difference(folder: Path, *, family: str) -> float:
    differences = []
    for shape, own in shapes_of(family, folder):
        ours, theirs = both_models(own, shape)
        with torch.no_grad():
            expected = theirs(IDS).logits[0]
        differences.append(largest_difference(sequence_logits(ours, IDS[0].tolist()), expected))
    return worst(differences)


def loss_difference(folder: Path) -> float:
    differences = []
    for shape, own in shapes_of("", folder):
        ours, theirs = both_models(own, shape)
        batch = packed_batch([[20], [20]], length=20)
        with torch.no_grad():
            expected = theirs(batch.input_ids, labels=hf_labels(batch)).loss
            for packed in (True, False):
                loss = sft_loss(ours, batch, packed=packed)
                differences.append(largest_difference(loss.total / loss.count / expected, torch.ones(())))
    return worst(differences)


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.float() for name, parameter in module.named_parameters()}


def grads_difference(folder: Path) -> float:
    """Tied models too: their matrix gets the gradient of both its uses."""
    differences = []
    for shape, own in shapes_of("", folder):
        ours, theirs = both_models(own, shape)
        batch = packed_batch([[30]], length=30)
        loss = sft_loss(ours, batch)
        (loss.total / loss.count).backward()
        theirs(batch.input_ids, labels=hf_labels(batch)).loss.backward()
        differences.append(scaled_difference(grads_of(ours), grads_of(theirs)))
    return worst(differences)


# --- bf16: the error against fp32, as a multiple of the one that transformers in bf16 has ----------------------------


def bf16_logits_error(folder: Path) -> float:
    shape = tiny_shape()
    theirs = save_hf(shape, folder)
    ours = from_folder(folder, shape, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        exact = theirs(IDS).logits[0]
        reference = theirs.bfloat16()(IDS).logits[0].float()
    return ((sequence_logits(ours, IDS[0].tolist()) - exact).norm() / (reference - exact).norm()).item()


def bf16_grads_error(folder: Path) -> float:
    shape = tiny_shape()
    theirs = save_hf(shape, folder)
    ours = from_folder(folder, shape, compute_dtype=torch.bfloat16)
    batch = packed_batch([[40]], length=40)
    exact = gradient_of_transformers(theirs, batch)
    reference = gradient_of_transformers(theirs.bfloat16(), batch)
    loss = sft_loss(ours, batch)
    (loss.total / loss.count).backward()
    return ((flat(grads_of(ours)) - exact).norm() / (reference - exact).norm()).item()


def gradient_of_transformers(model: nn.Module, batch: Batch) -> Tensor:
    model.zero_grad()
    model(batch.input_ids, labels=hf_labels(batch)).loss.backward()
    return flat(grads_of(model))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


# --- packing ----------------------------------------------------------------------------------------------------------


def packed_logits_difference(folder: Path) -> float:
    """Both of transformers' ways: positions that restart within one row, and every document by itself."""
    differences = []
    batch = packed_batch([DOCUMENTS], length=sum(DOCUMENTS))
    for shape, own in shapes_of("", folder):
        ours, theirs = both_models(own, shape)
        with torch.no_grad():
            got = ours(batch.input_ids, batch.positions, batch.doc_ids, head=logits_head)[0]
            together = theirs(batch.input_ids, position_ids=batch.positions, use_cache=False).logits[0]
            alone = torch.cat([theirs(ids).logits[0] for ids in batch.input_ids.split(DOCUMENTS, dim=1)])
        differences += [largest_difference(got, together), largest_difference(got, alone)]
    return worst(differences)


def packed_loss_difference(folder: Path) -> float:
    ours, theirs = both_models(folder, tiny_shape())
    batch = packed_batch([DOCUMENTS], length=sum(DOCUMENTS))
    loss = sft_loss(ours, batch)
    total = torch.zeros(())
    for ids, labels in zip(batch.input_ids.split(DOCUMENTS, dim=1), hf_labels(batch).split(DOCUMENTS, 1), strict=True):
        with torch.no_grad():
            total += theirs(ids, labels=labels, num_items_in_batch=int(loss.count)).loss
    return largest_difference((loss.total / loss.count).detach() / total, torch.ones(()))


# --- export -----------------------------------------------------------------------------------------------------------


def reloaded(folder: Path) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A model of every family, and what transformers makes of its export."""
    for shape, own in shapes_of("", folder):
        decoder, _ = both_models(own / "given", shape)
        export_model(own / "out", decoder, shape=shape, rows=[[1, 2, 3]], dist=ALONE)
        yield decoder, AutoModelForCausalLM.from_pretrained(own / "out", dtype=torch.float32).eval()


def exported_weights_difference(folder: Path) -> float:
    found = []
    for ours, theirs in reloaded(folder):
        expected = dict(theirs.named_parameters())
        assert expected.keys() == dict(ours.named_parameters()).keys()
        found += [largest_difference(weight, expected[name]) for name, weight in ours.named_parameters()]
    return worst(found)


def exported_logits_difference(folder: Path) -> float:
    found = []
    for ours, theirs in reloaded(folder):
        with torch.no_grad():
            found.append(largest_difference(sequence_logits(ours, IDS[0].tolist()), theirs(IDS).logits[0]))
    return worst(found)


ALL = "Qwen2, Qwen3, Llama; 2 layers, GQA, tied and untied, rope scaling linear and llama3"
HF = "transformers, eager, fp32"


def _logits(family: str, inputs: str) -> Oracle:
    return Oracle(f"logits, {family}", HF, inputs, 1e-5, partial(logits_difference, family=family.lower()))


ORACLES = [
    _logits("Qwen2", "tied with GQA, untied with MHA"),
    _logits("Qwen3", "tied, untied with wide heads"),
    Oracle(
        "logits, Llama", HF, "plain, rope scaling linear and llama3", 1e-5, partial(logits_difference, family="llama")
    ),
    Oracle("SFT loss, relative", "transformers' loss on labels", f"{ALL}; labels with -100", 1e-6, loss_difference),
    Oracle("gradients of the SFT loss", "transformers' loss on labels", ALL, 1e-5, grads_difference),
    Oracle("error of logits in bf16", "that of transformers in bf16", "Qwen3, 40 tokens", 2.0, bf16_logits_error),
    Oracle("error of gradients in bf16", "that of transformers in bf16", "Qwen3, 40 tokens", 2.0, bf16_grads_error),
    Oracle(
        "logits of packed documents",
        "transformers with position ids, and each document alone",
        f"{ALL}; 5 documents in a row",
        1e-5,
        packed_logits_difference,
    ),
    Oracle(
        "loss of packed documents, relative",
        "transformers, each document alone",
        "5 documents",
        1e-6,
        packed_loss_difference,
    ),
    Oracle("weights of an export", "transformers from_pretrained", ALL, 0.0, exported_weights_difference),
    Oracle("logits of an export", "transformers from_pretrained", ALL, 1e-5, exported_logits_difference),
]
