"""Rules of the keys for the trained parameters, the learning rate, the length, the monitoring and the saving. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.batch import BatchRules
from trainer.config.fields import show
from trainer.config.keys import Broken, field_kinds
from trainer.config.parallel import is_compiled
from trainer.schema import Config, LoraConfig, OptimConfig, kind_of_training, learning_rate_of

WARMUP_STEPS, LEAST_PARTS = 10, 5
BEST = "train.keep_best"
MOST_PROMPTS, MOST_PROMPT_CHARS = 16, 4000
MULTIPLE = 16
"""All three dimensions of a float8 product must be multiples of this (torch._scaled_mm)."""


def has_lora(config: Config) -> bool:
    """Whether adapters are trained instead of the model."""
    return config.lora.rank is not None or config.lora.adapter is not None


def base_dtype(config: Config) -> str:
    """The dtype in which the model's parameters are stored: fp32 if they are trained, `lora.base_dtype` if LoRA freezes
    them."""
    if not has_lora(config):
        return "fp32"
    return config.train.precision if config.lora.base_dtype == "auto" else config.lora.base_dtype


def groups_rules(config: Config) -> Iterator[Broken]:
    """Rules for a group of parameters, and for the scaling of the learning rate."""
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
    """Rules for keys that LoRA excludes."""
    if config.model.freeze and has_lora(config):
        message = f"model.freeze is {show(config.model.freeze)}, but lora freezes the whole model"
        yield Broken("model.freeze", message, "lora.targets says which modules get an adapter", ("lora.rank",))


def optim_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that have no effect here, and why."""
    if not has_lora(config):
        yield [f"lora.{name}" for name in field_kinds(LoraConfig)], ", neither lora.rank nor lora.adapter is set"
    elif not config.run.export:
        yield ["lora.merge_export"], ", run.export is false"
    if config.optim.optimizer != "adamw8bit":
        yield ["optim.embeddings_8bit"], f", optim.optimizer is {config.optim.optimizer}"
    if config.optim.lr_scaling == "none":
        yield ["optim.base_batch_size"], ", optim.lr_scaling is none"
    if config.optim.schedule == "constant":
        yield ["optim.min_learning_rate"], " with the constant schedule"


def length_rules(config: Config) -> Iterator[Broken]:
    t = config.train
    if t.steps is not None and t.epochs is not None:
        message = f"train.steps is {t.steps} and train.epochs is {t.epochs:g}: only one may say how long to train"
        hint = "set the other to null; in a .py config steps=None, since it has a default"
        yield Broken("train.epochs", message, hint, ("train.steps",))
    if t.steps is None and t.epochs is None:
        yield Broken("train.steps", "neither train.steps nor train.epochs is given", "set one of them")


def schedule_rules(config: Config) -> Iterator[Broken]:
    o, steps = config.optim, config.train.steps
    rate = learning_rate_of(config)
    if o.min_learning_rate > rate:
        what = "learning_rate" if o.learning_rate is not None else f"the default for {kind_of_training(config)}"
        message = f"optim.min_learning_rate is {o.min_learning_rate:g}, more than {what}, {rate:g}"
        yield Broken("optim.min_learning_rate", message, "", ("optim.learning_rate",))
    if o.decay_steps is not None and o.schedule != "wsd":
        message = (
            f"optim.decay_steps is {o.decay_steps}, but optim.schedule is {o.schedule}; only wsd has a separate decay"
        )
        yield Broken("optim.decay_steps", message, "drop decay_steps or set optim.schedule=wsd", ("optim.schedule",))
    warmup = 0 if steps is None else warmup_steps(o, steps)
    if steps is not None and warmup > steps:
        message = f"optim.warmup_steps is {warmup}, more than train.steps, {steps}"
        yield Broken("optim.warmup_steps", message, f"set optim.warmup_steps={steps // 10}", ("train.steps",))
    if steps is not None and o.decay_steps is not None and warmup + o.decay_steps > steps:
        total = f"optim.warmup_steps {warmup} + decay_steps {o.decay_steps} = {warmup + o.decay_steps}"
        yield Broken(
            "optim.decay_steps", f"{total}, more than train.steps, {steps}", "", ("train.steps", "optim.warmup_steps")
        )


def watching_rules(config: Config) -> Iterator[Broken]:
    train, data = config.train, config.data
    if train.early_stop_patience is not None and not data.eval and data.eval_fraction == 0:
        message = f"train.early_stop_patience is {train.early_stop_patience}, but there is no held-out data to judge by"
        hint = "set data.eval or data.eval_fraction, or drop train.early_stop_patience"
        yield Broken("train.early_stop_patience", message, hint, ("data.eval_fraction",))
    if train.early_stop_patience is not None and train.eval_every == 0:
        message = (
            f"train.early_stop_patience is {train.early_stop_patience}, but train.eval_every is 0: nothing is evaluated"
        )
        yield Broken("train.early_stop_patience", message, "set train.eval_every", ("train.eval_every",))
    for key, steps in (("profile_steps", train.profile_steps), ("memory_snapshot_steps", train.memory_snapshot_steps)):
        late = [step for step in steps if train.steps is not None and step > train.steps]
        if late:
            message = f"train.{key} holds {late[0]}, more than train.steps, {train.steps}"
            yield Broken(f"train.{key}", message, "", ("train.steps",))
    yield from _sample_rules(config)


def _sample_rules(config: Config) -> Iterator[Broken]:
    key, prompts = "run.sample_prompts", config.run.sample_prompts
    if len(prompts) > MOST_PROMPTS:
        yield Broken(key, f"{key} has {len(prompts)} texts, must be at most {MOST_PROMPTS}")
    long = [len(text) for text in prompts if len(text) > MOST_PROMPT_CHARS]
    if long:
        yield Broken(key, f"{key} holds a text of {long[0]:,} characters, must be at most {MOST_PROMPT_CHARS:,}")


def watching_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    train = config.train
    if train.early_stop_patience is None:
        yield ["train.early_stop_min_delta"], " without train.early_stop_patience"
    if "wandb" not in config.run.trackers:
        yield ["run.tracker_project"], ", wandb is none of run.trackers"
    if not config.run.sample_prompts:
        yield ["run.sample_tokens"], ", run.sample_prompts is empty"
    if config.target.device == "cpu":
        yield ["train.memory_snapshot_steps"], " on the CPU: it shows a GPU's allocations"


def best_rules(config: Config) -> Iterator[Broken]:
    """The best checkpoints can only be chosen if each has a held-out loss."""
    train = config.train
    if train.keep_best == 0 or train.save_every == 0:
        return
    best = f"{BEST} is {train.keep_best}"
    if train.eval_every == 0 or train.save_every % train.eval_every:
        message = f"{best}, but not every save, each {train.save_every} steps, has an evaluation (train.eval_every)"
        hint = f"set train.eval_every={train.save_every}, or a number that divides it"
        yield Broken(BEST, message, hint, ("train.eval_every", "train.save_every"))
    if not config.data.eval and config.data.eval_fraction == 0:
        message = f"{best}, but there is no held-out data"
        yield Broken(BEST, message, "set data.eval or data.eval_fraction", ("data.eval_fraction",))


def saves_the_best(config: Config) -> bool:
    """Whether a checkpoint is saved and kept at each evaluation that is the best so far, because the export may use
    it."""
    source = config.run.export_from
    may_stop_early = config.train.early_stop_patience is not None
    return config.run.export and (source == "best" or (source == "auto" and may_stop_early))


def export_rules(config: Config) -> Iterator[Broken]:
    """The best step can only be exported if some step before the last is evaluated."""
    key = "run.export_from"
    if config.run.export_from != "best" or not config.run.export:
        return
    if not config.data.eval and config.data.eval_fraction == 0:
        message = f"{key} is best, but there is no held-out data to judge by"
        yield Broken(key, message, "set data.eval or data.eval_fraction", ("data.eval_fraction",))
    elif config.train.eval_every == 0:
        message = f"{key} is best, but train.eval_every is 0: no step before the last is judged"
        yield Broken(key, message, "set train.eval_every", ("train.eval_every",))


def saving_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that have no effect beside the others with any value, and why."""
    if not config.run.export:
        yield ["run.export_from"], ", run.export is false"
    kept = ["train.keep_best", "train.keep_every"]
    if config.train.keep_last == 0:
        yield kept, ", train.keep_last=0 keeps every checkpoint"
    if config.train.save_every == 0:
        yield [*kept, "train.async_save"], ", train.save_every=0 saves only at the end"


# --- once the length of a run is known ------------------------------------------------------------------------------


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """The steps of warm-up: as given, else 10, and never more than a fifth of the run."""
    return min(WARMUP_STEPS, total_steps // LEAST_PARTS) if optim.warmup_steps is None else optim.warmup_steps


def length_notes(config: Config, total_steps: int) -> list[str]:
    """A line for each key that exceeds the length of the run; if train.steps gives the length, most are errors
    already."""
    return [
        f"{key} is {value}, more than the run's {total_steps}: {what}"
        for key, value, what in _beyond(config, total_steps)
    ]


def _beyond(config: Config, total_steps: int) -> Iterator[tuple[str, int, str]]:
    optim, train = config.optim, config.train
    warmup = warmup_steps(optim, total_steps)
    if warmup > total_steps:
        yield "optim.warmup_steps", warmup, "the learning rate never peaks"
    elif optim.decay_steps is not None and warmup + optim.decay_steps > total_steps:
        both = warmup + optim.decay_steps
        yield "optim.warmup_steps + decay_steps", both, "the decay does not reach its end"
    for key in ("profile_steps", "memory_snapshot_steps"):
        late = [step for step in getattr(train, key) if step > total_steps]
        if late:
            yield f"a step of train.{key}", late[0], "nothing is written of it"
    if train.stop_after_steps is not None and train.stop_after_steps > total_steps:
        yield "train.stop_after_steps", train.stop_after_steps, "it ends before"


# --- float8 ----------------------------------------------------------------------------------------------------------


def why_no_float8(config: Config) -> str | None:
    """The setting that rules out float8 products; None if there is none."""
    if config.train.precision == "fp32":
        return "products are in fp32 (train.precision)"
    if config.target.device == "cpu":
        return "target.device is cpu"
    if not is_compiled(config):
        return "parallel.compile is false, and casts to float8 that are not compiled take longer than they save"
    if not config.data.packing:
        return f"data.packing is false: rows are of any length, and float8 needs multiples of {MULTIPLE} tokens"
    tokens = BatchRules.of(config).tokens
    if tokens % MULTIPLE:
        return f"train.micro_batch_size x data.seq_len is {tokens}, not a multiple of {MULTIPLE}, which float8 needs"
    return None


def float8_rules(config: Config) -> Iterator[Broken]:
    """Rules for `train.float8=on` beside other keys; with `auto`, products stay in bf16 instead."""
    key = "train.float8"
    if config.train.float8 != "on":
        return
    if config.train.precision == "fp32":
        message = f"{key} is on, but train.precision is fp32: float8 is less than bf16"
        yield Broken(key, message, f"drop {key}, or train.precision", ("train.precision",))
    elif why := why_no_float8(config):
        yield Broken(key, f"{key} is on, but {why}", f"set {key}=auto, which then stays with bf16, or change that")


def float8_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """`auto`, if the config itself rules float8 out; the run reports it if the device does."""
    if config.train.float8 == "auto" and (why := why_no_float8(config)):
        yield ["train.float8"], f", {why}"
