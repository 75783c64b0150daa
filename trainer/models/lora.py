"""Low-rank adapters: a product's output gets scaling * B(A(dropout(x))) added (arXiv 2106.09685), as PEFT computes it.

One pair A [rank, in], B [out, rank] for each Hugging Face name of a linear module. An adapter is an object that a
Linear calls on its input. Its two matrices are the Linear's submodules, so the model keeps Hugging Face's names and the
adapters have PEFT's: `….q_proj.lora_A.weight`. A module that holds several names in one tensor can call several.
Like all products, those of the adapters are in the input's dtype: with bf16 the same as PEFT under autocast.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.layers import Linear
from trainer.models.patterns import no_match
from trainer.models.protocol import Model

ALL_LINEAR = "all-linear"
PAIR = ("lora_A", "lora_B")


@dataclass(frozen=True)
class LoraSpec:
    """Everything that defines an adapter, except its weights. `targets`: whole names of the modules with a pair."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    targets: tuple[str, ...]

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def render_lora(module: nn.Module) -> list[str]:
    """One line about the adapters; no line without adapters."""
    spec = lora_of(module)
    if spec is None:
        return []
    kind = "rslora" if spec.rslora else "lora"
    scale = f"alpha {spec.alpha:g}, so scaled by {spec.scaling:g}"
    return [f"{kind}: rank {spec.rank}, {scale}, dropout {spec.dropout:g}, beside {len(spec.targets)} linear modules"]


class Adapter:
    """Called by a Linear with its input and its product; adds the low-rank product."""

    def __init__(self, down: Linear, up: Linear, spec: LoraSpec) -> None:
        self.down, self.up = down, up
        self.scaling, self.dropout = spec.scaling, spec.dropout

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if self.dropout and self.down.training:
            x = F.dropout(x, self.dropout)
        return torch.add(out, self.up(self.down(x)), alpha=self.scaling)


def attach(model: Model, spec: LoraSpec) -> None:
    """Give every target its pair, in fp32 and uninitialized, freeze all else, and set `model.lora` to the spec."""
    model.requires_grad_(False)
    for name in spec.targets:
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear)
        place = {"device": linear.weight.device, "dtype": torch.float32}
        down, up = (Linear(size, out, bias=False, **place) for size, out in _sizes(linear, spec.rank))
        for child, module in zip(PAIR, (down, up), strict=True):
            linear.add_module(child, module)
        linear.adapter = Adapter(down, up, spec)
    model.lora = spec


def _sizes(linear: Linear, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (linear.in_features, rank), (rank, linear.out_features)


def lora_of(module: nn.Module) -> LoraSpec | None:
    """The adapters of a model, wrapped or not; None without adapters."""
    return next((child.lora for child in module.modules() if isinstance(child, Model)), None)


def linear_modules(model: Model) -> Iterator[tuple[str, Linear]]:
    """The modules that can have an adapter, with their names: all linear modules in the blocks."""
    for name, child in model.named_modules():
        if isinstance(child, Linear) and name != "lm_head" and not name.endswith(PAIR):
            yield name, child


def linear_names(model: Model) -> list[str]:
    return [name for name, _ in linear_modules(model)]


def choose_targets(targets: Iterable[str], names: list[str]) -> tuple[str, ...]:
    """The modules that match `lora.targets`, in the model's order. Raises ConfigError for an entry without a match."""
    chosen: set[str] = set()
    for target in targets:
        found = [name for name in names if is_target(name, target)]
        if not found:
            raise no_match(target, [*names, *dict.fromkeys(name.rpartition(".")[2] for name in names)], "lora.targets")
        chosen.update(found)
    return tuple(name for name in names if name in chosen)


def is_target(name: str, target: str) -> bool:
    """Whether a target matches a module's name: by its end, as in PEFT, by a pattern, or because it means all."""
    return target == ALL_LINEAR or name == target or name.endswith(f".{target}") or fnmatchcase(name, target)


def is_adapter(parameter_name: str) -> bool:
    """Whether a parameter belongs to an adapter and not to the model."""
    return parameter_name.removesuffix(".weight").endswith(PAIR)


def split_adapter(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's tensors by name, and its adapters' tensors by name."""
    base = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    return base, {name: tensor for name, tensor in tensors.items() if is_adapter(name)}


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """PEFT's initial values: A uniform in +-1 / sqrt(in) (Kaiming, a = sqrt 5), B zero; only seed and name decide."""
    if "lora_B" in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def merge(tensors: Mapping[str, Tensor], spec: LoraSpec) -> dict[str, Tensor]:
    """The model's tensors with the adapters added: W + scaling * B A."""
    merged, pairs = split_adapter(tensors)
    for name in spec.targets:
        down, up = (pairs[f"{name}.{child}.weight"].float() for child in PAIR)
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = (weight.float() + spec.scaling * (up @ down)).to(weight.dtype)
    return merged
