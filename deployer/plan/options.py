"""A launch's command-line options, and the config that results from them and from the config file or program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from deployer.errors import UsageError
from deployer.plan.launch_plan import Command
from trainer.schema import AUTO_GPUS, Config, RunConfig, TargetConfig, with_changes
from trainer.schema.key import Limit, facts_of


@dataclass(frozen=True)
class Options:
    """The command line's options of a launch."""

    config: str | None = None
    text: str | None = None
    """Text of a YAML config without a file; errors then call it `config`."""
    overrides: tuple[str, ...] = ()
    fsdp_config: str | None = None
    command: tuple[str, ...] = ()
    torchrun: bool = False
    include: tuple[str, ...] = ()
    requirements: str | None = None
    wheels: str | None = None
    allow_busy: bool = False
    yes: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The options that mirror keys of the config: dotted key -> value as in the schema. target.env.NAME for each --env,
    and for target.secrets the names to add. Only options that were given."""


class LaunchSpec(NamedTuple):
    config: Config
    """The config with the command line's options."""
    command: Command | None
    """The program, if it is not the trainer."""
    given: frozenset[str] = frozenset()
    """The config's keys that were given; not used for a program."""


def read_config(options: Options, *, tell: Callable[[str], None] = lambda note: None) -> LaunchSpec:
    """The config and program of a launch. Raises UsageError for a mistake.

    `tell`: called with each setting of the config that has no effect.
    """
    if options.config is None:
        config, given = with_changes(_config_of_command(options), options.keys), frozenset[str]()
        if not is_plain(config.run.name, config.target):
            _check(config)
    else:
        config, given = _read_file(options.config, options, tell=tell)
        if "run.name" not in given:  # ids that all begin with `run` would tell nobody what runs
            config = replace(config, run=replace(config.run, name=run_name(Path(options.config).stem, config.run.name)))
            given |= {"run.name"}
    command = Command(options.command, options.torchrun) if options.command else None
    if command is None and config.script:
        command = Command(("python", config.script, *config.args), config.torchrun)
    elif command is not None:
        for note in without_effect(command, config.target, options.keys):
            tell(note)
    return LaunchSpec(config, command, given)


def with_defaults(spec: LaunchSpec, defaults: Mapping[str, Any]) -> tuple[LaunchSpec, set[str]]:
    """The launch with these values for the keys that it does not give; also returns these keys. Raises UsageError if
    the values do not fit together."""
    own = {*spec.given, *(f"target.env.{name}" for name in spec.config.target.env)}
    used = {key: value for key, value in defaults.items() if key not in own}
    if not used:
        return spec, set()
    config = with_changes(spec.config, used)
    _check(config)
    given = spec.given | {".".join(key.split(".")[:2]) for key in used}
    return spec._replace(config=config, given=given), set(used)


def without_effect(command: Command, target: TargetConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """What on the command line has no effect for the user's own program, as text."""
    if target.device == "cpu" and not command.torchrun and "target.gpu_ranks" in given:
        yield "naming GPUs changes nothing: on the CPU a program without --torchrun is one process"
    if ours := next((word for word in command.argv[1:] if word.partition("=")[0] in _OURS), None):
        yield f"{ours} stands after --, so the program gets it, and it is no option of this command"


_OURS = frozenset(
    (
        *("--ssh", "--ssh-key", "--remote-root", "--gpus", "--allow-busy", "--torchrun", "--secret", "--detach"),
        *("--dry-run", "--no-pull", "--pull-max", "--queue", "--max-restarts", "--max-runtime", "--stall-timeout"),
        *("--give-up", "--after", "--idle-timeout", "--notify"),
    )
)
"""Launch options that few programs have too."""


def _read_file(path: str, options: Options, *, tell: Callable[[str], None]) -> tuple[Config, frozenset[str]]:
    from trainer.config.load import ConfigError, load_given

    ways: dict[str, Any] = {
        "fsdp_config": options.fsdp_config,
        "changes": options.keys,
        "tell": tell,
        "text": options.text,
    }
    try:
        return load_given(path, options.overrides, **ways)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None


def _check(config: Config) -> None:
    from trainer.config.load import ConfigError, check_config  # a plain program does not wait for them

    try:
        check_config(config)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None


def _config_of_command(options: Options) -> Config:
    if not options.command:
        hint = "write deploy.py CONFIG, or deploy.py run -- PROGRAM; deploy.py init task makes a torchferry.yaml"
        raise UsageError("nothing to run: no config, no program after -- and no torchferry.yaml here", hint=hint)
    if options.torchrun and "target.gpu_ranks" not in options.keys:
        hint = "add --gpus 0,1 for GPUs 0 and 1, or --gpus auto:2 for the two freest"
        raise UsageError("--torchrun needs --gpus: torchrun starts one process for each GPU", hint=hint)
    words = itertools.pairwise(("", *options.command))
    found = ((before, word) for before, word in words if before == "-m" or word.endswith((".py", ".sh")))
    before, program = next(found, ("", options.command[0]))
    stem = program.rpartition(".")[2] if before == "-m" else Path(program).stem
    return Config(run=RunConfig(name=run_name(stem)), target=TargetConfig())


def run_name(stem: str, other: str = "job") -> str:
    """A run's name from a file's name; `other` if that has no allowed letter."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:100] or other


# --- a quick check of simple settings ---------------------------------------------------------------------------------

# A launch waits for the modules that it loads, and the rules of a training config are many. So a program's few settings
# are checked here first. If they are not plainly right, the rules decide and report what is wrong.

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"(?!TORCHFERRY_|CUDA_|MASTER_|RANK\Z|LOCAL_|WORLD_)[A-Za-z_][A-Za-z0-9_]*")
"""Names of variables, except those that begin like a launcher's own."""


def is_plain(name: str, target: TargetConfig) -> bool:
    """Whether this name and target surely break no rule, for any program."""
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
