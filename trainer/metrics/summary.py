"""What a model's parameters are: how many, how many of them are trained, and in which dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterSummary:
    """Numbers of parameters, over all ranks; a tied one counts once."""

    total: int
    trainable: int
    by_dtype: dict[str, int]
    """The most frequent first."""
    example: dict[str, str]
    """A parameter's name for each dtype."""

    @property
    def frozen(self) -> int:
        return self.total - self.trainable

    def render(self) -> list[str]:
        """`parameters: 1,234 in all, 1,034 trained, 200 frozen (16.2 %); float32`, and a line for mixed dtypes."""
        counts = f"parameters: {self.total:,} in all, {self.trainable:,} trained"
        if self.frozen:
            counts += f", {self.frozen:,} frozen ({self.frozen / self.total:.1%})"
        if len(self.by_dtype) < 2:
            return [f"{counts}; {next(iter(self.by_dtype), 'no dtype')}"]
        mixed = ", ".join(f"{count:,} {dtype} (e.g. {self.example[dtype]})" for dtype, count in self.by_dtype.items())
        return [counts, f"mixed dtypes: {mixed}"]


def summarize(module: nn.Module) -> ParameterSummary:
    """The summary of a module, sharded or not."""
    total = trainable = 0
    counts: dict[str, int] = {}
    example: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        counts[dtype] = counts.get(dtype, 0) + parameter.numel()
        example.setdefault(dtype, name)
    by_dtype = dict(sorted(counts.items(), key=lambda item: -item[1]))
    return ParameterSummary(total, trainable, by_dtype, example)
