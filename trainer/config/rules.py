"""Rules for a config whose values have the right types. Each error has all its numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from trainer.config import parallel as config_parallel
from trainer.config.batch import batch_rules, micro_batch_tokens_rules, micro_batch_without_effect
from trainer.config.data import (
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIX,
    corpus_rules,
    corpus_without_effect,
    data_rules,
    data_without_effect,
)
from trainer.config.fields import show
from trainer.config.keys import Broken, Places, field_kinds, get_key, known_facts, limits, scalar_texts
from trainer.config.target import World, environment_rules, gpu_rules
from trainer.config.train import (
    best_rules,
    export_rules,
    float8_rules,
    float8_without_effect,
    groups_rules,
    length_rules,
    lora_rules,
    optim_without_effect,
    saving_without_effect,
    schedule_rules,
    watching_rules,
    watching_without_effect,
)
from trainer.errors import ConfigError, raise_all
from trainer.schema import Config, ModelConfig, RunConfig, as_sources
from trainer.schema.key import EVEN

LOCAL_SUFFIXES = (*ROW_SUFFIXES, ".parquet", ".jinja", TOKEN_SUFFIX, *TEXT_SUFFIXES)
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


RUN_OF_ANY_PROGRAM = ("name", "dir")
"""The keys of `run` that do not concern the trainer's outputs."""


def check_config(
    config: Config,
    *,
    places: Places | None = None,
    standing: Collection[Broken] = (),
    world: World | None = None,
) -> None:
    """Raise a ConfigError for the rules that a config with the right types breaks. `places`: where its keys are set.
    Rules in `standing` are not reported. `world`: see `broken_rules`."""
    raise_all(rule_errors(config, places=places, standing=standing, world=world))


def rule_errors(
    config: Config,
    *,
    places: Places | None = None,
    standing: Collection[Broken] = (),
    wrong: Collection[str] = (),
    world: World | None = None,
) -> Iterator[ConfigError]:
    """An error for each broken rule, except rules with a key in `wrong` or in an earlier error: they may only follow
    from it."""
    told = set(wrong)
    for broken in broken_rules(config, world=world):
        keys = {broken.key, *broken.others}
        if broken not in standing and not keys & told:
            told |= keys
            yield ConfigError(broken.message, where=broken.place(places or Places()), hint=broken.hint)


def broken_rules(config: Config, *, world: World | None = None) -> Iterator[Broken]:
    """Each rule that a config with the right types breaks. `world`: the ranks of the run; None: those on one node."""
    here = world or World.of(config)
    rules: tuple[Callable[[Config], Iterator[Broken]], ...] = (
        _limits,
        _texts,
        gpu_rules,
        environment_rules,
        _script,
        _model,
        data_rules,
        length_rules,
        partial(batch_rules, world=here),
        micro_batch_tokens_rules,
        corpus_rules,
        schedule_rules,
        watching_rules,
        groups_rules,
        lora_rules,
        float8_rules,
        best_rules,
        export_rules,
        partial(config_parallel.broken_rules, world=here),
    )
    return (broken for rule in rules for broken in rule(config))


def _limits(config: Config) -> Iterator[Broken]:
    for key, limit in limits().items():
        value = get_key(config, key)
        verb = "holds" if isinstance(value, list) else "is"
        yield from (Broken(key, f"{key} {verb} {n}, must be {limit.words}") for n in limit.broken_by(value))


def _texts(config: Config) -> Iterator[Broken]:
    for key, text in scalar_texts(config):
        if not text.strip() and key != "data.system_prompt" and not key.startswith("args["):
            yield Broken(key, f"{key} is empty")
    if not RUN_NAME.fullmatch(config.run.name):
        allowed = "letters, digits, '.', '_' and '-', at most 100, not starting with '.' or '-'"
        yield Broken("run.name", f"run.name is {config.run.name!r}, it may hold only {allowed}")
    for key, value in (("target.ssh", config.target.ssh), ("target.python", config.target.python)):
        if value is not None and value.startswith("-"):
            yield Broken(key, f"{key} is {value!r}, it may not start with '-'")


def _script(config: Config) -> Iterator[Broken]:
    if config.script is None:
        if config.args:
            yield Broken("args", f"args is {show(config.args)}, but there is no script to take them", "set script")
        if not config.torchrun:
            yield Broken("torchrun", "torchrun is false, which needs a script: the trainer has its own launcher")
        return
    default = Config()
    sections = ("recipe", "model", "lora", "data", "optim", "train", "parallel")
    changed = [s for s in sections if getattr(config, s) != getattr(default, s)]
    outputs = [name for name in field_kinds(RunConfig) if name not in RUN_OF_ANY_PROGRAM]
    changed += [f"run.{name}" for name in outputs if getattr(config.run, name) != getattr(default.run, name)]
    if changed:
        message = (
            f"script is {config.script!r}, so the trainer does not run, but it is configured in: {', '.join(changed)}"
        )
        yield Broken(
            changed[0], message, f"pass a script's own settings in args and drop {', '.join(changed)}", ("script",)
        )
    if config.target.train_backend != "auto":
        message = f"target.train_backend is {config.target.train_backend}, but script {config.script!r} decides that"
        yield Broken(
            "target.train_backend", message, "drop it; gpu_ranks and torchrun still say how many processes start"
        )


def _model(config: Config) -> Iterator[Broken]:
    m = config.model
    if m.init == "pretrained" and m.name is None:
        yield Broken("model.init", "model.init is pretrained, but model.name is null", "set model.name")
    if m.name is not None:
        return  # the named model determines the shape
    if m.head_dim is None and m.hidden_size % m.num_heads:
        message = f"model.hidden_size is {m.hidden_size}, not a multiple of model.num_heads, {m.num_heads}"
        yield Broken("model.hidden_size", message, "change one of them or set model.head_dim", ("model.num_heads",))
    elif m.head_dim is None and not EVEN.holds(m.hidden_size // m.num_heads):
        heads = f"model.hidden_size {m.hidden_size} / model.num_heads {m.num_heads}"
        yield Broken(
            "model.hidden_size",
            f"{heads} = {m.hidden_size // m.num_heads} per head, must be {EVEN.words}",
            "",
            ("model.num_heads",),
        )
    if m.num_heads % m.num_kv_heads:
        message = f"model.num_heads is {m.num_heads}, not a multiple of model.num_kv_heads, {m.num_kv_heads}"
        yield Broken("model.num_kv_heads", message, "", ("model.num_heads",))
    if config.data.seq_len > m.max_position_embeddings:
        limit = f"model.max_position_embeddings, {m.max_position_embeddings}"
        yield Broken(
            "data.seq_len",
            f"data.seq_len is {config.data.seq_len}, more than {limit}",
            "",
            ("model.max_position_embeddings",),
        )


def config_notes(config: Config, *, backend: str, deployed: bool) -> list[str]:
    """One line for the keys that are set but have no effect beside the others; to be shown, they are not errors.

    `backend`: the one in use. `deployed`: false for a `train.py` started by hand, which runs on this machine.
    """
    return [
        f"{', '.join(changed)}: no effect{why}"
        for keys, why in _without_effect(config, backend, deployed=deployed)
        if (changed := [key for key in keys if get_key(config, key) != get_key(Config(), key)])
    ]


def _without_effect(config: Config, backend: str, *, deployed: bool) -> Iterator[tuple[list[str], str]]:
    """Keys that have no effect here with any value, and why."""
    data, model = config.data, config.model
    if model.name is not None:
        shape = [f"model.{name}" for name in field_kinds(ModelConfig) if name not in ("name", "init", "freeze")]
        yield shape, f", {model.name} brings its own shape"
    if backend == "pytorch":
        yield ["train.debug_distributed"], " with one process"
    for split, sources in (("data.train_split", data.train), ("data.eval_split", data.eval)):
        if all(
            path.startswith("builtin:") or (path.endswith(LOCAL_SUFFIXES) and ".json" not in Path(path).suffixes)
            for path in (s.path for s in as_sources(sources))
        ):
            yield [split], f", {split.removesuffix('_split')} names no Hugging Face data set"
    yield from micro_batch_without_effect(config)
    yield from corpus_without_effect(config)
    yield from float8_without_effect(config)
    yield from config_parallel.without_effect(config, backend)
    yield from watching_without_effect(config)
    yield from optim_without_effect(config)
    yield from saving_without_effect(config)
    yield from data_without_effect(config)
    if deployed:
        yield ["run.dir"], ", a deployed job has its own folder"
    else:
        yield ["target.ssh", "target.python", "target.root"], ", train.py runs here and under this Python"
        supervised = [key for key, facts in known_facts().items() if facts.supervised]
        yield supervised, ", train.py has no supervisor: deploy.py does that"
