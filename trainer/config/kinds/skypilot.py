"""A SkyPilot task as a task file."""

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

_BUCKETS = re.compile(r"[a-z0-9+.-]+://|\Ahttps?:")
_RESTARTS = "max_restarts: N starts a failed job again, from its newest checkpoint"
_RESOURCES = {
    **dict.fromkeys(
        ("cloud", "region", "zone", "infra", "instance_type", "cpus", "memory", "disk_size", "disk_tier", "local_disk"),
        THE_HOST,
    ),
    **dict.fromkeys(("network_tier", "max_hourly_cost", "labels", "priority", "any_of", "ordered"), THE_HOST),
    "accelerator_args": THE_HOST,
    "use_spot": f"no machine is rented, so none is taken away; {_RESTARTS}",
    "job_recovery": _RESTARTS,
    "spot_recovery": _RESTARTS,
    "image_id": NO_CONTAINER,
    "ports": "no port is opened: deploy.py tunnel ID PORT reaches one",
    "autostop": "the host is yours and stays as it is",
}
_OTHERS = {
    "service": "nothing is served: a job is a program that ends",
    "pool": THE_HOST,
    "volumes": "what is mounted on the host is there for the job as well",
    "volume_mounts": "what is mounted on the host is there for the job as well",
    "storage_mounts": "a bucket: setup can download it, or the host has it mounted",
    "config": "options of SkyPilot itself",
    "experimental": "options of SkyPilot itself",
    "event_callback": "--notify URL or CMD at the launch tells how a job goes",
    "inputs": "a hint for SkyPilot's choice of a cloud",
    "outputs": "a hint for SkyPilot's choice of a cloud",
}
_HINTS = {
    "SKYPILOT_TASK_ID": "nobody sets it here; TORCHFERRY_JOB_ID is the job's id",
    "SKYPILOT_INTERNAL_JOB_ID": "nobody sets it here; TORCHFERRY_JOB_ID is the job's id",
    "SKYPILOT_CLUSTER_INFO": "nobody sets it here: there is no cluster",
}


def from_skypilot(tree: Mapping[str, object], exists: Callable[[str], bool]) -> Written:
    """The task file. `exists`: whether a path exists here. Raises ConfigError for a file that cannot be read."""
    task, given = Written(), plain(tree)
    if (name := given.pop("name", None)) is not None:
        task.name(text_at("name", name))
    count = _resources(task, mapping_at("resources", given.pop("resources", None)))
    nodes = text_at("num_nodes", given.pop("num_nodes", None) or 1)
    if nodes != "1":
        task.note("num_nodes", f"{nodes}: {ONE_HOST}, so it begins once")
    _workdir(task, given.pop("workdir", None))
    for name, value in mapping_at("envs", given.pop("envs", None)).items():
        task.variable("envs", name, None if value in (None, "") else text_at(f"envs.{name}", value))
    _secrets(task, given.pop("secrets", None))
    _mounts(task, given.pop("file_mounts", None), exists)
    if (setup := given.pop("setup", None)) is not None:
        task.values["setup"] = text_at("setup", setup).strip("\n")
    run = text_at("run", given.pop("run", None) or "")
    if not run.strip():
        raise ConfigError("it has no run, so there is nothing to start", hint="a job is a program: give it a run")
    task.program(run)
    task.notes_of(given, _OTHERS)
    known = {"NUM_GPUS_PER_NODE": str(count), "NUM_NODES": "1", "NODE_RANK": "0", "NODE_IPS": "127.0.0.1"}
    task.set_variables({f"SKYPILOT_{name}": value for name, value in known.items()}, "SKYPILOT", _HINTS)
    if "sky_workdir" in f"{task.values.get('setup', '')}{run}":
        task.note("sky_workdir", f"{FOLDER}: write . in its place")
    return task


def _resources(task: Written, given: dict[str, Any]) -> int:
    """The number of requested GPUs."""
    found = given.pop("accelerators", None)
    for several in ("any_of", "ordered"):
        choices = [choice for choice in list_at(several, given.get(several)) if isinstance(choice, dict)]
        found = found or next((choice["accelerators"] for choice in choices if choice.get("accelerators")), None)
    recovery = given.get("job_recovery")
    if isinstance(recovery, dict) and str(recovery.get("max_restarts_on_errors") or "").isdigit():
        task.values["max_restarts"] = int(recovery["max_restarts_on_errors"])
        del given["job_recovery"]
    task.notes_of(given, _RESOURCES, "resources.")
    return _accelerators(task, found) if found else 0


def _accelerators(task: Written, found: object) -> int:
    key = "resources.accelerators"
    names = (
        [f"{name}:{count or 1}" for name, count in found.items()] if isinstance(found, dict) else list_at(key, found)
    )
    name, _, number = text_at(key, names[0]).partition(":")
    if name.lower().startswith("tpu"):
        raise ConfigError(f"{key} is {names[0]}: there is no TPU backend")
    if not re.fullmatch(r"(\d{1,6}(\.\d{1,6})?)?", number.strip()):
        raise ConfigError(f"{key} is {names[0]!r}, expected NAME:COUNT")
    wanted = float(number or 1)
    count = max(1, int(wanted))
    which = f"the first of {', '.join(map(str, names[:8]))}" if len(names) > 1 else f"{names[0]}"
    whole = "" if wanted == count else "; a GPU is one job's alone"
    task.note(key, f"{which} is gpus: auto:{count}, of the kind that the host has{whole}")
    task.gpus(key, count)
    return count


def _workdir(task: Written, workdir: object) -> None:
    if isinstance(workdir, dict):
        task.note("workdir", f"{workdir.get('url', 'a repository')}: clone it, and cd into it; {FOLDER}")
    elif workdir is not None and os.path.normpath(text_at("workdir", workdir)) != ".":
        task.note("workdir", f"{workdir}: {FOLDER}, so cd there first")


def _secrets(task: Written, given: object) -> None:
    if isinstance(given, list):
        given = dict.fromkeys(map(str, given))
    for name, value in mapping_at("secrets", given).items():
        task.variable("secrets", name, None)
        if value not in (None, ""):
            task.note(f"secrets.{name}", f"its value stays out of the file: export {name}=… before the launch")


def _mounts(task: Written, given: object, exists: Callable[[str], bool]) -> None:
    for there, source in mapping_at("file_mounts", given).items():
        key = f"file_mounts.{there}"
        if isinstance(source, str) and not _BUCKETS.match(source):
            task.local_file(key, source, there, exists)
        else:
            task.note(key, "a bucket: setup can download it, or the host has it mounted")
