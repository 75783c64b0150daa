"""The plan of a job's next attempt: its last plan with the changes of the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from deployer.agent.host.typed import InvalidData
from deployer.agent.job.plan import Plan, groups_of, is_trainer, parse_plan
from deployer.agent.job.record import RawPlan
from deployer.agent.job.views import PlanView
from deployer.connection.host import Host
from deployer.errors import HostError, UsageError
from deployer.plan.env_file import EnvFile
from deployer.plan.kept_config import read_kept
from deployer.plan.launch_plan import NOT_REQUESTED, Command, ConfigText, build_plan, read_settings, supervised_keys
from deployer.plan.options import Options, without_effect
from deployer.plan.prepare import payload_of
from trainer.config.files import edit_yaml
from trainer.config.load import ConfigError, config_from_dict, key_of, local_data_paths
from trainer.schema import Config

RESUME, STEPS = "train.resume", "train.steps"


@dataclass(frozen=True)
class Resumable:
    """A job in its host's answer."""

    job_id: str
    plan: Plan
    attempt: int
    from_step: int | None
    """Step of the newest complete checkpoint; None without one."""


def read_resumable(host: Host, job_id: str) -> Resumable:
    with host.connect(request={"op": "plan", "job": job_id}) as link:
        call = link.first
        found = call.result("plan", PlanView)
        call.check_job_id(found.job_id, "plan.job_id")
    return Resumable(found.job_id, plan_from(host, job_id, found.plan), found.attempt, found.from_step)


def plan_from(host: Host, job_id: str, raw: RawPlan) -> Plan:
    """Parses the plan that the host sent. Raises HostError if it is not one."""
    try:
        return parse_plan(raw)
    except InvalidData as damage:
        raise HostError(f"cannot read what {host.name} says of {job_id}: {damage}") from None


def plan_next(
    job: Resumable,
    options: Options,
    *,
    known: Collection[str],
    env_file: EnvFile | None = None,
    tell: Callable[[str], None] = lambda note: None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan of the job's next attempt, and the values that are sent beside it.

    Raises UsageError for a mistake, and for a secret that the host asks for but that is not in `known`: the ones that
    this client has given the job before. `env_file`: as this client knows it; the host's answer about one is ignored.
    `tell`: called with each setting of the config that has no effect.
    """
    try:
        return _plan_next(job, options, known, env_file, tell)
    except ConfigError as error:
        raise UsageError(error.message, where=error.where, hint=error.hint) from None


def _plan_next(
    job: Resumable,
    options: Options,
    known: Collection[str],
    env_file: EnvFile | None,
    tell: Callable[[str], None],
) -> tuple[Plan, dict[str, Any]]:
    old, job_id, request = job.plan, job.job_id, job.plan.request
    _check_stays(job_id, options)
    had_its_own = any(group.devices.kind != "any" for group in groups_of(old))
    if is_trainer(old):
        config, text = _config_of(job, options, tell=tell)
    else:
        config, text = _config_of_program(old, options, tell=tell), None
    if "target.secrets" not in map(key_of, options.overrides):
        _check_secrets(job_id, config.target.secrets, known={*known, *options.keys.get("target.secrets", ())})
    if env_file is not None:  # the host has the values of --env, which win
        env_file = env_file.without(old.env_names)
    payload = payload_of(config, env_file)
    if env_file is None and "target.secrets" not in map(key_of, options.overrides):
        _check_from_file(old, config)
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
        restrict_gpus=had_its_own or "target.gpu_ranks" in options.keys,
        text=text,
        setup=old.setup._replace(timeout_s=config.target.setup_timeout_s) if old.setup else None,
    )
    names = {*old.env_names, *plan.env_names}
    secrets = tuple(sorted(payload.get("secrets", ())))
    return plan._replace(env_names=tuple(sorted(names)), secret_names=secrets), payload


def beginning(job: Resumable, plan: Plan) -> str:
    """Where the next attempt begins, as text."""
    if plan.config_yaml is None:
        return "the same program with the same files"
    resume = read_kept(plan.config_yaml, "config.yaml").config.train.resume
    if resume != "auto":
        return "from the beginning" if resume == "never" else f"from {resume}"
    return "from the beginning: no complete checkpoint" if job.from_step is None else f"from step {job.from_step}"


def _check_stays(job_id: str, options: Options) -> None:
    """Raises UsageError for a setting that cannot change, neither in the next attempt nor in a new job with the same
    files."""
    asked = [key_of(text) for text in options.overrides]
    if stays := next((key for key in asked if key in ("target.ssh", "target.root")), None):
        raise UsageError(
            f"{stays} says where a job lies, and {job_id} stays where it is",
            hint="--ssh and --remote-root name the place at which to find it",
        )
    if "target.setup" in (*asked, *options.keys):
        raise UsageError(
            f"target.setup is what {job_id} was launched with, and stays",
            hint=f"a launch of the project takes another one: deploy.py repeat {job_id} --with-changes --setup CMD",
        )


def _check_length(job: Resumable, config: Config) -> None:
    """Raises UsageError if a run would end before the checkpoint from which it continues. The trainer refuses that too,
    but one attempt later. Only the trainer knows the number of steps for `train.epochs`."""
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


def _check_from_file(old: Plan, config: Config) -> None:
    """Raises UsageError if the job had variables from an env file and there is no env file now."""
    lost = [name for name in old.secret_names if name not in (*config.target.secrets, *config.target.env)]
    if lost:
        raise UsageError(
            f"{old.job_id} had {', '.join(lost[:3])}{' and others' if lost[3:] else ''} from an env file, and this "
            "client knows none of it",
            hint="--env-file FILE names it; its values are kept nowhere",
        )


# --- the earlier request and the new one ------------------------------------------------------------------------------


def _config_of(job: Resumable, options: Options, *, tell: Callable[[str], None]) -> tuple[Config, ConfigText]:
    """The next attempt's config and its text: the job's own with the keys that are given now.

    The text goes to the trainer that the job was launched with: older or newer than this client, or the user's own. So
    no other key is changed or added. Keys that this schema does not have stay, and may be set. A key that the trainer's
    schema does not have is refused, unless the host carries it out: then the request stores it. If a text never named
    all keys, its trainer's schema is unknown, and the trainer itself checks the key.
    """
    request, written = job.plan.request, job.plan.config_yaml
    if written is None:
        raise HostError(f"cannot resume {job.job_id}: the plan that its host sent has no config")
    kept = read_kept(written, f"config.yaml of {job.job_id}", _settings_of(job.plan))
    asked = [key_of(text) for text in options.overrides]
    overrides = options.overrides
    if job.from_step is not None and RESUME not in asked and kept.config.train.resume != "auto":
        overrides = (*overrides, f"{RESUME}=auto")  # where it began the first time is behind it
    changed = kept.changed(overrides, changes=options.keys, tell=tell)
    _check_data(job, kept.config, changed.config)
    if STEPS in kept.keys or STEPS in changed.values:  # else the trainer's default holds
        _check_length(job, changed.config)
    apart = {*NOT_REQUESTED, *(key for key in supervised_keys() if key not in kept.keys)}
    values = {key: value for key, value in changed.values.items() if key not in apart}
    unknown = next((key for key in values if key not in kept.keys), None)
    if unknown is not None and not request.given_alone:
        raise UsageError(
            f"the trainer of {job.job_id} does not know {unknown}, which is newer: the job keeps the code it came with",
            hint=f"launch a new job, with {RESUME}=… naming the checkpoint to begin with",
        )
    text = edit_yaml(written, values)
    return changed.config, ConfigText(text, kept.keys | values.keys(), request.given_alone)


def _settings_of(plan: Plan) -> dict[str, dict[str, Any]]:
    try:
        return read_settings(plan.request)
    except InvalidData as damage:
        raise HostError(f"cannot read what {plan.job_id} was asked for: {damage}") from None


def _check_data(job: Resumable, before: Config, config: Config) -> None:
    known = local_data_paths(before)
    new = [path for path in local_data_paths(config) if path not in known and not path.startswith(("/", "~"))]
    if new:
        raise UsageError(
            f"{new[0]} is not among what {job.job_id} was sent with, and a resume sends nothing",
            hint="launch a new job, with train.resume=… naming the checkpoint to begin with",
        )


def _config_of_program(old: Plan, options: Options, *, tell: Callable[[str], None]) -> Config:
    """The request of a program's job, as a config."""
    if not old.request.command:
        raise HostError(f"cannot resume {old.job_id}: the plan that its host sent has no command")
    strange = [text for text in options.overrides if not key_of(text).startswith(("target.", "run.name"))]
    if strange:
        raise UsageError(
            f"{strange[0]} changes a config, and this job is a program of your own",
            hint="what it is given on its command line stays; --env K=V changes its environment",
        )
    where, given = f"the request of {old.job_id}", options.overrides
    config = config_from_dict(_settings_of(old), where, overrides=given, changes=options.keys)
    for note in without_effect(Command(old.request.command[:1], old.request.torchrun), config.target, options.keys):
        tell(note)
    return config
