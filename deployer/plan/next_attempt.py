"""The plan of a job's next attempt: the one that it had, with what the command line changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployer.agent.host.typed import Damage, from_json
from deployer.agent.job.plan import Plan, is_trainer, main_role, parse_plan
from deployer.connection.host import Host
from deployer.errors import HostError, UsageError
from deployer.plan.launch_plan import Command, build_plan
from deployer.plan.options import Options, with_options
from deployer.plan.prepare import payload_of, without_client_keys
from trainer.config.load import ConfigError, check_config, config_from_yaml, config_to_yaml, local_data_paths
from trainer.schema import Config

RESUME = "train.resume"


@dataclass(frozen=True)
class Resumable:
    """A job as its host knows it."""

    job_id: str
    plan: Plan
    attempt: int
    from_step: int | None
    """The newest complete checkpoint; None without one."""


class _Found(NamedTuple):
    job_id: str
    plan: dict[str, Any]
    attempt: int
    from_step: int | None = None


def read_resumable(host: Host, job_id: str) -> Resumable:
    with host.connect(request={"op": "plan", "job": job_id}) as link:
        answer = link.first.result("plan")
    try:
        found = from_json(answer, _Found)
        return Resumable(found.job_id, parse_plan(found.plan), found.attempt, found.from_step)
    except Damage as damage:
        raise HostError(f"cannot read what {host.name} says of {job_id}: {damage}") from None


def plan_next(
    job: Resumable, options: Options, *, known: Collection[str], tell: Callable[[str], None] = lambda note: None
) -> tuple[Plan, dict[str, Any]]:
    """The plan of the job's next attempt, and the values that travel beside it. UsageError for a mistake, and for a
    secret that the host asks for though it is not among `known`: those that this client has given the job before.
    `tell` hears what the config has without effect."""
    try:
        return _plan_next(job, options, known, tell)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None


def _plan_next(
    job: Resumable, options: Options, known: Collection[str], tell: Callable[[str], None]
) -> tuple[Plan, dict[str, Any]]:
    old, job_id = job.plan, job.job_id
    role, request = main_role(old), old.request
    if is_trainer(old):
        config = _config_of(old, job_id, options, has_saved=job.from_step is not None, tell=tell)
    else:
        config = _config_of_program(old, options)
    config = with_options(config, options)
    check_config(config)
    if is_trainer(old):
        _check_length(job, config)
    if not any(text.partition("=")[0].strip() == "target.secrets" for text in options.overrides):
        _check_secrets(job_id, config.target.secrets, known={*known, *options.keys.get("target.secrets", ())})
    plan = build_plan(
        config,
        job_id=job_id,
        created=old.created,
        tree=old.tree,
        own_trainer=request.own_trainer,
        command=None if is_trainer(old) else Command(request.command, request.torchrun),
        python=old.python._replace(explicit=config.target.python),
        includes=old.includes,
        allow_busy=old.allow_busy or options.allow_busy,
        restrict_gpus=is_trainer(old) or "target.gpu_ranks" in options.keys or role.nodes[0].kind != "any",
        config_yaml=config_to_yaml(without_client_keys(config)) if is_trainer(old) else None,
    )
    names = {*old.env_names, *plan.env_names}
    return plan._replace(env_names=tuple(sorted(names))), payload_of(config)


def beginning(job: Resumable, plan: Plan) -> str:
    """Where the next attempt goes on, in words."""
    if plan.config_yaml is None:
        return "the same program with the same files"
    resume = config_from_yaml(plan.config_yaml, "config.yaml").train.resume
    if resume != "auto":
        return "from the beginning" if resume == "never" else f"from {resume}"
    return "from the beginning: no complete checkpoint" if job.from_step is None else f"from step {job.from_step}"


def _check_length(job: Resumable, config: Config) -> None:
    """UsageError for a run that would end before the checkpoint it goes on from; the trainer refuses that too, but an
    attempt later. How many steps `train.epochs` makes, only the trainer knows."""
    saved, steps = job.from_step, config.train.steps
    if config.train.resume == "auto" and saved is not None and steps is not None and saved > steps:
        raise UsageError(
            f"{job.job_id} has saved step {saved}, and train.steps is {steps}",
            hint=f"train.steps above {saved} goes on from there; {RESUME}=… names an earlier checkpoint on the host",
        )


def _check_secrets(job_id: str, names: Sequence[str], *, known: Collection[str]) -> None:
    asked = [name for name in names if name not in known]
    if asked:
        raise UsageError(
            f"the host says that {job_id} needs the secret {asked[0]}, which this client has never given it",
            hint=" ".join(f"--secret {name}" for name in asked) + " passes it on, if that is right",
        )


def _config_of(old: Plan, job_id: str, options: Options, *, has_saved: bool, tell: Callable[[str], None]) -> Config:
    file = f"config.yaml of {job_id}"
    overrides, text = options.overrides, old.config_yaml or ""
    if has_saved and not any(text.partition("=")[0].strip() == RESUME for text in overrides):
        overrides = (*overrides, f"{RESUME}=auto")  # where it began the first time is behind it
    config = config_from_yaml(text, file, overrides, tell=tell)
    before = local_data_paths(config_from_yaml(text, file))
    new = [path for path in local_data_paths(config) if path not in before and not path.startswith(("/", "~"))]
    if new:
        raise UsageError(
            f"{new[0]} is not among what {job_id} was sent with, and a resume sends nothing",
            hint="launch a new job, with train.resume=… naming the checkpoint to begin with",
        )
    return config


def _config_of_program(old: Plan, options: Options) -> Config:
    """What a program's job was asked for with, as a config."""
    if options.overrides:
        raise UsageError(
            f"{options.overrides[0]} changes a config, and this job is a program of your own",
            hint="what it is given on its command line stays; --env K=V changes its environment",
        )
    return config_from_yaml("{}", f"the request of {old.job_id}", old.request.overrides)
