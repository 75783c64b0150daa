"""Rules of the keys that say which parameters are trained, and how fast. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.fields import show
from trainer.config.keys import Broken, field_kinds
from trainer.schema import Config, LoraConfig


def has_lora(config: Config) -> bool:
    """Whether adapters are trained in place of the model."""
    return config.lora.rank is not None or config.lora.adapter is not None


def base_dtype(config: Config) -> str:
    """Storage of the model's parameters: fp32 where they are trained, `lora.base_dtype` where LoRA freezes them."""
    if not has_lora(config):
        return "fp32"
    return config.train.precision if config.lora.base_dtype == "auto" else config.lora.base_dtype


def groups_rules(config: Config) -> Iterator[Broken]:
    """What a group of parameters, and the scaling of the learning rate, must keep."""
    for i, group in enumerate(config.optim.groups):
        key = f"optim.groups[{i}]"
        if not group.pattern.strip():
            yield Broken(f"{key}.pattern", f"{key}.pattern is empty")
        if group.lr_scale <= 0:
            message = f"{key}.lr_scale is {group.lr_scale:g}, must be more than 0"
            yield Broken(f"{key}.lr_scale", message, "model.freeze leaves parameters as they are")
        if group.weight_decay is not None and group.weight_decay < 0:
            message = f"{key}.weight_decay is {group.weight_decay:g}, must be 0 or more"
            yield Broken(f"{key}.weight_decay", message)
    scaling = config.optim.lr_scaling
    if scaling != "none" and config.optim.base_batch_size is None:
        message = f"optim.lr_scaling is {scaling}, but optim.base_batch_size is null"
        yield Broken("optim.lr_scaling", message, "set it to the rows per step that optim.learning_rate was tuned for")


def lora_rules(config: Config) -> Iterator[Broken]:
    """What LoRA excludes."""
    if config.model.freeze and has_lora(config):
        message = f"model.freeze is {show(config.model.freeze)}, but lora freezes the whole model"
        yield Broken("model.freeze", message, "lora.targets says which modules get an adapter", ("lora.rank",))


def optim_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that do nothing here, and why."""
    if not has_lora(config):
        yield [f"lora.{name}" for name in field_kinds(LoraConfig)], ", neither lora.rank nor lora.adapter is set"
    elif not config.run.export:
        yield ["lora.merge_export"], ", run.export is false"
    if config.optim.lr_scaling == "none":
        yield ["optim.base_batch_size"], ", optim.lr_scaling is none"
    if config.optim.schedule == "constant":
        yield ["optim.min_learning_rate"], " with the constant schedule"
