"""A dstack task as a task file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.kinds.convert import (
    FOLDER,
    NO_CONTAINER,
    ONE_HOST,
    THE_HOST,
    Written,
    list_at,
    mapping_at,
    plain,
    text_at,
)
from trainer.errors import ConfigError

_RESTARTS = "max_restarts: N starts a failed job again, from its newest checkpoint"
_MOUNTED = "what is mounted on the host is there for the job as well"
_OTHERS = {
    **dict.fromkeys(
        ("backends", "regions", "availability_zones", "instance_types", "fleets", "reservation", "max_price", "tags"),
        THE_HOST,
    ),
    **dict.fromkeys(("creation_policy", "idle_duration", "utilization_policy", "profile", "priority"), THE_HOST),
    "spot_policy": f"no machine is rented, so none is taken away; {_RESTARTS}",
    "retry": _RESTARTS,
    **dict.fromkeys(("image", "registry_auth", "docker", "privileged", "entrypoint", "nvcc", "user"), NO_CONTAINER),
    "ports": "no port is opened: deploy.py tunnel ID PORT reaches one",
    "volumes": _MOUNTED,
    "repos": f"{FOLDER}: clone what it names, and cd into it",
    "stop_duration": "deploy.py stop ID --grace S gives it time to save",
    "stop_criteria": ONE_HOST,
    "startup_order": ONE_HOST,
    "schedule": "nothing is started by the clock: cron on this machine can run it",
    "home_dir": NO_CONTAINER,
    "single_branch": FOLDER,
}
_RESOURCES = dict.fromkeys(("cpu", "memory", "disk", "shm_size"), THE_HOST)
_HINTS = {"DSTACK_RUN_NAME": "nobody sets it here; TORCHFERRY_JOB_ID is the job's id"}


def from_dstack(tree: Mapping[str, object], exists: Callable[[str], bool]) -> Written:
    """The task file. `exists`: whether a path exists here. Raises ConfigError for a file that is not a task or cannot
    be read."""
    task, given = Written(), plain(tree)
    kind = given.pop("type", None)
    if kind != "task":
        raise ConfigError(f"type is {kind}: only a task is a job", hint="deploy.py shell --ssh HOST is a shell there")
    if (name := given.pop("name", None)) is not None:
        task.name(text_at("name", name))
    count = _resources(task, mapping_at("resources", given.pop("resources", None)))
    nodes = text_at("nodes", given.pop("nodes", None) or 1)
    if nodes != "1":
        task.note("nodes", f"{nodes}: {ONE_HOST}, so it begins once")
    _env(task, given.pop("env", None))
    if (python := given.pop("python", None)) is not None:
        task.note(
            "python", f"{python}: python names an interpreter of the host by its path; else one is found or built"
        )
    for item in list_at("files", given.pop("files", None)):
        here, there = _file(item)
        task.local_file(f"files {here}", here, there or here, exists)
    _working_dir(task, given.pop("working_dir", None))
    if (longest := given.pop("max_duration", None)) not in (None, "off", "false"):
        task.values["max_runtime"] = f"{longest}s" if str(longest).isdigit() else str(longest)
    setup = list_at("setup", given.pop("setup", None)) + list_at("init", given.pop("init", None))
    if setup:
        task.values["setup"] = "\n".join(text_at("setup", line).strip("\n") for line in setup)
    _commands(task, list_at("commands", given.pop("commands", None)), given.pop("shell", None), given.get("image"))
    task.notes_of(given, _OTHERS)
    known = {"GPUS_NUM": str(count), "GPUS_PER_NODE": str(count), "NODES_NUM": "1", "NODE_RANK": "0"}
    known |= {"MASTER_NODE_IP": "127.0.0.1", "NODES_IPS": "127.0.0.1"}
    task.set_variables({f"DSTACK_{name}": value for name, value in known.items()}, "DSTACK", _HINTS)
    return task


def _commands(task: Written, commands: list[Any], shell: object, image: object) -> None:
    lines = [text_at("commands", line or "").strip("\n") for line in commands]
    if not "".join(lines).strip():
        raise ConfigError(
            "it has no commands, so there is nothing to start", hint="an image's own program runs nowhere"
        )
    named = os.path.basename(str(shell)) if shell else "sh" if image else "bash"  # noqa: PTH119
    if named not in ("sh", "bash"):
        task.note("shell", f"{shell}: bash runs it")
        named = "bash"
    task.program("\n".join(lines), stops_at_failures=len(lines) > 1, shell=named)


def _resources(task: Written, given: dict[str, Any]) -> int:
    """The number of requested GPUs."""
    gpu = given.pop("gpu", None)
    task.notes_of(given, _RESOURCES, "resources.")
    if gpu is None:
        return 0
    text = str(gpu.get("count") or 1) if isinstance(gpu, dict) else text_at("resources.gpu", gpu)
    if isinstance(gpu, dict) and isinstance(gpu.get("count"), dict):
        text = str(gpu["count"].get("min") or 1)
    last = text.split(":")[-1].strip()
    number = re.fullmatch(r"(\d{1,6})?(\.\.)?(\d{1,6})?", last)
    count = int(number[1] or 1) if number and last else 1
    if text != str(count):
        task.note("resources.gpu", f"{text} is gpus: auto:{count}, of the kind that the host has")
    task.gpus("resources.gpu", count)
    return count


def _env(task: Written, given: object) -> None:
    if isinstance(given, dict):
        pairs = [(name, None if value is None else text_at(f"env.{name}", value)) for name, value in given.items()]
    else:
        split = [text_at("env", line or "").partition("=") for line in list_at("env", given)]
        pairs = [(name, value if equals else None) for name, equals, value in split]
    for name, value in pairs:
        task.variable("env", name, value)


def _file(item: object) -> tuple[str, str]:
    if isinstance(item, dict):
        return str(item.get("local_path") or "."), str(item.get("path") or "")
    here, _, there = text_at("files", item or ".").partition(":")
    return here, there


def _working_dir(task: Written, folder: object) -> None:
    if folder is not None and os.path.normpath(text_at("working_dir", folder)) not in (".", "/workflow"):
        task.note("working_dir", f"{folder}: {FOLDER}")
