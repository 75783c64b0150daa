"""Launches jobs from Python, and finds them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import click

from deployer.api.job import Job, Noted
from deployer.api.keywords import NOT_OF_A_LAUNCH, as_overrides, notified, read_keywords
from deployer.api.values import JobInfo, Overrides, told, warn
from deployer.commands.defaults import read_defaults
from deployer.commands.launch.cli import run as run_command
from deployer.commands.launch.run import check_platform, hidden_paths, keep_left_out, record_of, with_after
from deployer.commands.launch.spec import ask_for, choose
from deployer.commands.look.cli import status as status_command
from deployer.commands.options import ACCESS, find_host, host_of, hosts_of
from deployer.commands.rows import row_as_json
from deployer.connection.host import Host
from deployer.errors import LostConnection, UsageError
from deployer.jobs.registry import SeenJob, read_records
from deployer.jobs.requests import read_status
from deployer.jobs.roster import ask_all, rows_of
from deployer.launch.delta import KnownTree
from deployer.launch.start import launch_and_follow
from deployer.paths import expanded
from deployer.plan.notify import with_urls
from deployer.plan.options import Options
from deployer.plan.prepare import Prepared, Question, large_files, prepare, unusual_project
from deployer.project.git import git_state


@told()
def launch(
    what: str | PathLike[str] | Sequence[str],
    *,
    host: str | None = None,
    gpus: int | str | Sequence[int | str] | None = None,
    overrides: Overrides | None = None,
    env: Mapping[str, str] | None = None,
    outputs: str | Sequence[str] | None = None,
    name: str | None = None,
    cwd: str | PathLike[str] | None = None,
    detach: bool = True,
    **options: Any,
) -> Job:
    """Sends the project's folder and starts a job; returns once the host has accepted it.

    `what`: the path of a config or a task file, or a program as a list of words: `["python", "my_train.py"]`. Defaults
    of the project's pyproject.toml and of the user's config.toml apply as they do for `run`.
    `host`: the value of --ssh; None: the host in the config, else the default `host`, else this machine. `cwd`: the
    project's folder, else the current one. `detach=False` follows the job to its end first, as Job.wait() does.
    `options` are those of the command `run` by their names: `max_restarts=3, queue=True, torchrun=True,
    python="/opt/conda/bin/python"`.

    Raises TypeError for an unknown option, and UsageError for a mistake before anything is sent. Raises ConnectError if
    the host cannot be reached, HostError if it refuses, and LostConnection if the job may have been started: `jobs()`
    shows it. Settings of the config without effect are warnings.
    """
    project = Path(cwd or ".").resolve()
    known = {"host": host, "gpus": gpus, "env": env, "outputs": outputs, "name": name}
    keys, others = read_keywords(run_command, {**options, **known}, function="launch", refused=NOT_OF_A_LAUNCH)
    access = {option: others.pop(option) for option in ACCESS if option in others}
    notify = others.pop("notify", ())
    if foreign := sorted(others.keys() - _OPTIONS):
        raise TypeError(f"launch() has no option {foreign[0]!r}: it is for the command line")
    others |= {path: str(Path(project, others[path])) for path in ("fsdp_config", "wheels") if path in others}
    if "target.env_file" in keys:
        keys["target.env_file"] = str(Path(project, expanded(keys["target.env_file"])))
    config, program = None, tuple[str, ...]()
    if not isinstance(what, str | PathLike):
        program = tuple(map(str, what))
    elif Path(project, what).is_file():
        config = str(what if cwd is None else Path(project, what))
    else:
        hint = "a program is a list of words: launch(['python', 'my_train.py'])"
        raise UsageError(f"config {what} does not exist", hint=hint)
    with click.Context(run_command):  # the command's options parse the values of a task file
        chosen = choose(config, as_overrides(overrides), program, None, {**_NOTHING, **others, "keys": keys})
    with notified(notify) as urls:
        job = _start(chosen, access, project, urls)
    if not detach:
        job.wait()
    return job


def _start(given: Options, access: dict[str, Any], project: Path, urls: Sequence[str]) -> Job:
    asked, chosen, _ = ask_for(given, read_defaults(project), tell=warn)
    target = asked.config.target
    host = host_of(target.ssh, target.root, project=project, **_ENTERS | access)
    try:
        check_platform(host)
        host.prefetch()
        _refuse(unusual_project(project), yes=chosen.yes)
        host.load()
        prepared = prepare(with_after(asked, host), options=chosen, project=project)
        plan, payload = with_urls(prepared.plan, prepared.payload, urls)
        prepared = replace(prepared, plan=plan, payload=payload)
        _refuse(large_files(prepared.code), yes=chosen.yes)
        for warning in prepared.code.warnings:
            warn(warning)
        _launch(prepared, host, project)
    finally:
        host.close()
    return Job(prepared.plan.job_id, host)


def _refuse(question: Question | None, *, yes: bool) -> None:
    """Raises UsageError where the command line would ask a person first."""
    if question is not None and not yes:
        raise UsageError(question.text, hint=f"{question.hint}; from Python: yes=True")


def _launch(prepared: Prepared, host: Host, project: Path) -> None:
    watcher = Noted(record_of(prepared, host, project), lambda: keep_left_out(prepared, project))
    try:
        launch_and_follow(
            host.connect,
            prepared.plan,
            shipment=prepared.shipment,
            payload=prepared.payload,
            git=git_state(project, apart=hidden_paths(prepared, project)),
            view=None,
            watcher=watcher,
            last=KnownTree.of(host.ssh, host.root, project),
        )
    except LostConnection as error:
        watcher.note()  # it may have been started: `jobs` needs to know its host
        error.of_job(prepared.plan.job_id)
        raise


_OPTIONS = {field.name for field in fields(Options)}
_NOTHING: dict[str, Any] = {
    name: value for name, value in vars(Options()).items() if name not in ("config", "overrides", "command", "keys")
}
_ENTERS: dict[str, Any] = {**dict.fromkeys(ACCESS), "accept_new_host_key": False}


@told()
def job(id: str, host: str | None = None, **options: Any) -> Job:
    """A job that was launched before: from here, or with `host` from any machine. The beginning or the end of its ID is
    enough.

    `options`: how to connect, as for the command `status` (`ssh_key=…, transport="openssh"`), and `remote_root`. Raises
    UnknownJob if there is no such job.
    """
    given = {**options, "host": host}
    keys, others = read_keywords(status_command, given, function="job", refused={"json": "it is for the shell"})
    place, record = find_host(id, keys.get("target.ssh"), keys.get("target.root"), **_ENTERS | others)
    if record is not None:
        return Job(record.job_id, place)
    try:
        return Job(read_status(place, id).job_id, place)
    finally:
        place.close()


@told()
def jobs(host: str | None = None) -> list[JobInfo]:
    """The jobs of a host, or of every host used from here, oldest first. If a host does not answer, its jobs have the
    state `unreachable`."""
    places = hosts_of(host, None, **_ENTERS)
    rows = rows_of(places, ask_all(places), read_records())
    for place in places:
        place.close()
    return [_info(row) for row in rows]


def _info(row: SeenJob) -> JobInfo:
    job, raw = row.job, row_as_json(row)
    return JobInfo(job.id, raw["state"], row.where, job.name, job.gpus, job.step, job.created, raw)
