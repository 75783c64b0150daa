"""A launch's options on the command line, and the config that they and the config file, or a program, come to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deployer.errors import UsageError
from deployer.plan.launch_plan import Command
from trainer.schema import AUTO_GPUS, Config, RunConfig, TargetConfig, with_changes
from trainer.schema.key import Limit, facts_of


@dataclass(frozen=True)
class Options:
    """The command line's options of a launch."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    fsdp_config: str | None = None
    command: tuple[str, ...] = ()
    torchrun: bool = False
    include: tuple[str, ...] = ()
    wheels: str | None = None
    allow_busy: bool = False
    yes: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    """What the options that mirror keys of the config say, by dotted key, as the schema holds it: target.env.NAME for
    each --env, the names to add for target.secrets; nothing of what the command line does not say."""


def key_changes(options: Options) -> dict[str, Any]:
    """What the command line's options change of a config, by dotted key; see `Options.keys`."""
    return dict(options.keys)


def read_config(options: Options, *, tell: Callable[[str], None] = lambda note: None) -> tuple[Config, Command | None]:
    """The config with the options applied, and the program when it is not the trainer. UsageError for a mistake.

    `tell` hears what the config has without effect.
    """
    config = None if options.config else with_options(_config_of_command(options), options)
    if config is None or not is_plain(config.run.name, config.target):
        config = _checked(config, options, tell=tell)
    command = Command(options.command, options.torchrun) if options.command else None
    if command is None and config.script:
        command = Command(("python", config.script, *config.args), config.torchrun)
    return config, command


def _checked(config: Config | None, options: Options, *, tell: Callable[[str], None]) -> Config:
    """A config that keeps the trainer's rules: this one, or None: that of the file with the options applied."""
    from trainer.config.load import ConfigError, check_config, load_config  # a plain program does not wait for them

    try:
        if config is None:
            assert options.config is not None
            ways: dict[str, Any] = {"fsdp_config": options.fsdp_config, "changes": key_changes(options), "tell": tell}
            return load_config(options.config, options.overrides, **ways)
        check_config(config)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None
    return config


def _config_of_command(options: Options) -> Config:
    if not options.command:
        raise UsageError("nothing to run", hint="deploy.py CONFIG, or deploy.py run -- python my_train.py ARGS")
    if options.torchrun and "target.gpu_ranks" not in options.keys:
        raise UsageError("--torchrun needs --gpus: one process starts for each", hint="--gpus 0,1")
    program = next((a for a in options.command if a.endswith((".py", ".sh"))), options.command[0])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(program).stem).strip("-.") or "job"
    return Config(run=RunConfig(name=name), target=TargetConfig())


def with_options(config: Config, options: Options) -> Config:
    """The config as the command line's options change it; not checked yet."""
    return with_changes(config, key_changes(options))


# --- what is right at a glance ----------------------------------------------------------------------------------------

# A launch waits for what it loads, and the rules of a training config are many: whether a program's few settings break
# none of them is seen here. What is not plain may still be right: then the rules decide, and say what is wrong.

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"(?!TORCHFERRY_|CUDA_|MASTER_|RANK\Z|LOCAL_|WORLD_)[A-Za-z_][A-Za-z0-9_]*")
"""Names of variables but for those that begin like one of a launcher's own."""


def is_plain(name: str, target: TargetConfig) -> bool:
    """Whether a run of this name at this place breaks no rule, whatever program it runs."""
    variables = [*target.env, *target.secrets]
    return (
        _NAME.fullmatch(name) is not None
        and _are_plain_gpus(target.gpu_ranks)
        and len(set(variables)) == len(variables)
        and all(_VARIABLE.fullmatch(variable) for variable in variables)
        and all(_is_plain_value(getattr(target, f.name), facts_of(f).limit) for f in fields(target))
    )


def _are_plain_gpus(gpus: list[int | str]) -> bool:
    if len(gpus) == 1 and isinstance(gpus[0], str):
        return AUTO_GPUS.fullmatch(gpus[0]) is not None
    return len(set(gpus)) == len(gpus) > 0 and all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus)


def _is_plain_value(value: Any, limit: Limit | None) -> bool:
    if isinstance(value, str):
        return bool(value.strip()) and not value.startswith("-")
    return limit is None or not limit.broken_by(value)
