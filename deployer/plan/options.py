"""A launch's options on the command line, and the config that they and the config file, or a program, come to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployer.errors import UsageError
from deployer.plan.launch_plan import Command
from trainer.schema import AUTO_GPUS, Config, RunConfig, TargetConfig


@dataclass(frozen=True)
class Options:
    """The command line's options of a launch."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    fsdp_config: str | None = None
    command: tuple[str, ...] = ()
    torchrun: bool = False
    ssh: str | None = None
    gpus: str | None = None
    device: str | None = None
    name: str | None = None
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    root: str | None = None
    python: str | None = None
    include: tuple[str, ...] = ()
    wheels: str | None = None
    allow_busy: bool = False
    queue: bool = False
    max_restarts: int | None = None
    max_runtime_s: float | None = None
    stall_timeout_s: float | None = None
    log_max_bytes: int | None = None
    yes: bool = False


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
    from trainer.config.load import ConfigError, check_config  # a plain program does not wait for them

    try:
        config = config or with_options(_config_of_file(options, tell=tell), options)
        check_config(config)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None
    return config


def _config_of_file(options: Options, *, tell: Callable[[str], None]) -> Config:
    from trainer.config.load import load_config

    assert options.config is not None
    overrides = options.overrides
    if options.fsdp_config is not None and options.gpus is not None:  # its num_processes is judged by these
        overrides = (*overrides, f"target.gpu_ranks={options.gpus}")
    return load_config(options.config, overrides, fsdp_config=options.fsdp_config, tell=tell)


def _config_of_command(options: Options) -> Config:
    if not options.command:
        raise UsageError("nothing to run", hint="deploy.py CONFIG, or deploy.py run -- python my_train.py ARGS")
    if options.torchrun and options.gpus is None:
        raise UsageError("--torchrun needs --gpus: one process starts for each", hint="--gpus 0,1")
    program = next((a for a in options.command if a.endswith((".py", ".sh"))), options.command[0])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(program).stem).strip("-.") or "job"
    return Config(run=RunConfig(name=name), target=TargetConfig())


def with_options(config: Config, options: Options) -> Config:
    """The config as the command line's options change it; not checked yet."""
    target, run = config.target, config.run
    if options.ssh is not None:
        target = replace(target, ssh=options.ssh)
    if options.gpus is not None:
        target = replace(target, gpu_ranks=[_gpu(text.strip()) for text in options.gpus.split(",")])
    if options.device is not None:
        target = replace(target, device=options.device)  # type: ignore[arg-type]  # click checks the choice
    if options.root is not None:
        target = replace(target, root=options.root)
    if options.python is not None:
        target = replace(target, python=options.python)
    target = _with_policy(target, options)
    env = {**target.env, **dict(_assignment(text) for text in options.env)}
    secrets = [*target.secrets, *(name for name in options.secrets if name not in target.secrets)]
    if options.name is not None:
        run = replace(run, name=options.name)
    return replace(config, target=replace(target, env=env, secrets=secrets), run=run)


def _with_policy(target: TargetConfig, options: Options) -> TargetConfig:
    given = {name: getattr(options, name) for name in ("max_restarts", "max_runtime_s", "stall_timeout_s")}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.log_max_bytes is not None:
        changes["log_max_gb"] = options.log_max_bytes / 1e9
    return replace(target, queue=target.queue or options.queue, **changes)


def _gpu(text: str) -> int | str:
    if span := re.fullmatch(r"(\d{1,2})-(\d{1,2})", text):
        each = ",".join(map(str, range(int(span[1]), int(span[2]) + 1)))
        raise UsageError(f"--gpus takes no range, as {text} is", hint=f"--gpus {each}")
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return text


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"--env {name!r} is not of the form NAME=VALUE")
    return name, value


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
        and all(text is None or _is_plain_text(text) for text in (target.ssh, target.python, target.root))
        and target.max_restarts >= 0
        and target.log_max_gb >= 0
        and all(seconds is None or seconds > 0 for seconds in (target.max_runtime_s, target.stall_timeout_s))
    )


def _are_plain_gpus(gpus: list[int | str]) -> bool:
    if len(gpus) == 1 and isinstance(gpus[0], str):
        return AUTO_GPUS.fullmatch(gpus[0]) is not None
    return len(set(gpus)) == len(gpus) > 0 and all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus)


def _is_plain_text(text: str) -> bool:
    return bool(text.strip()) and not text.startswith("-")
