"""The keys of a task file, which runs any program: one row each. A new key needs a row here, and an option of `run`.

A key's value has the same meaning as its option's: the deployer reads it with the type of that option.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from trainer.config.fields import NULL_WORDS, Word
from trainer.config.keys import Places, known_keys
from trainer.errors import ConfigError


class TaskKey(NamedTuple):
    """One key. `kind`: the type of its value in the file; `option`: the option of `run` that parses the value."""

    name: str
    kind: Any
    option: str
    about: str
    aliases: tuple[str, ...] = ()
    """Names of this key in other tools; the error for one of them names the key."""
    joined: bool = False
    """Its option takes a list as one word, with commas."""


RUN = "run"
TASK_KEYS = (
    TaskKey(
        RUN,
        str,
        "--",
        "The program: a list of words, or a text for a shell.",
        ("cmd", "command", "commands", "script", "entrypoint"),
    ),
    TaskKey("name", str, "--name", "The first part of the job's ID.", ("job_name",)),
    TaskKey("host", str, "--ssh", "Where the job runs: an address, or an alias of ~/.ssh/config.", ("ssh", "cluster")),
    TaskKey(
        "gpus",
        list[str],
        "--gpus",
        "`0,1` or `[0, 1]`: these GPUs, numbered as in nvidia-smi; `auto:2`: the two freest.",
        ("gpu", "accelerators", "num_gpus", "gpu_ids", "devices"),
        joined=True,
    ),
    TaskKey("device", str, "--device", "`cpu`: the job sees no GPU."),
    TaskKey("torchrun", bool, "--torchrun", "Start the program under torchrun, one process for each of `gpus`."),
    TaskKey("env", dict[str, str], "--env", "Environment variables.", ("envs", "environment", "env_vars")),
    TaskKey(
        "secrets",
        list[str],
        "--secret",
        "Names of variables of your shell; their values are kept nowhere.",
        ("secret",),
    ),
    TaskKey("env_file", str, "--env-file", "A file of NAME=VALUE lines on this machine, such as .env.", ("dotenv",)),
    TaskKey(
        "setup", str, "--setup", "A shell command that prepares the host before the job; later jobs reuse the result."
    ),
    TaskKey("setup_timeout", str, "--setup-timeout", "End the setup after this long: `1h`."),
    TaskKey(
        "python", str, "--python", "The interpreter on the host; without it, one is found or built.", ("interpreter",)
    ),
    TaskKey(
        "requirements",
        str,
        "--requirements",
        "A file with the packages that the job's Python needs; `none`: no packages.",
    ),
    TaskKey("wheels", str, "--wheels", "A folder of wheels for a host without internet."),
    TaskKey(
        "include",
        list[str],
        "--include",
        "Also send these paths, such as data sets, even if git ignores them.",
        ("file_mounts",),
    ),
    TaskKey(
        "outputs",
        list[str],
        "--out",
        "What else to pull: paths in the job's copy of the project.",
        ("out", "artifacts"),
    ),
    TaskKey("queue", bool, "--queue", "Wait for the GPUs: first in, first out."),
    TaskKey("after", list[str], "--after", "Jobs on the host that must succeed first.", ("depends_on",)),
    TaskKey("allow_busy", bool, "--allow-busy", "Use GPUs that other processes are using."),
    TaskKey(
        "max_restarts",
        int,
        "--max-restarts",
        "Start again after a failure, at most this many times.",
        ("retries", "max_retries"),
    ),
    TaskKey(
        "max_runtime",
        str,
        "--max-runtime",
        "Save and stop after this long: `12h`.",
        ("timeout", "time", "max_duration"),
    ),
    TaskKey("stall_timeout", str, "--stall-timeout", "Fail after this long without output: `10m`."),
    TaskKey("idle_timeout", str, "--idle-timeout", "Fail if none of its GPUs is used for this long: `30m`."),
    TaskKey("log_max", str, "--log-max", "Keep this much of each rank's log: `1GB`."),
)
BY_NAME = {row.name: row for row in TASK_KEYS}


def render_table() -> list[str]:
    """The rows of the table in docs/tasks.md."""
    words = {str: "text", int: "a whole number", bool: "true or false", list[str]: "a list"}
    words[dict[str, str]] = "a mapping"
    rows = [(row, "a list or text" if row.joined or row.name == RUN else words[row.kind]) for row in TASK_KEYS]
    return [f"| `{row.name}` | {kind} | `{row.option}` | {row.about} |" for row, kind in rows]


def is_given(value: object) -> bool:
    """Whether a key has a value: false if its value is commented out."""
    return value is not None and not (isinstance(value, Word) and value.text in NULL_WORDS)


def unknown_task_key(name: str, places: Places) -> ConfigError:
    """The error for an unknown key of a task, with the nearest name."""
    where = places.of(name)
    if named := next((row.name for row in TASK_KEYS if name in row.aliases), ""):
        return ConfigError(f"{name} is not a key of a task", where=where, hint=f"did you mean {named}?")
    if any(key.partition(".")[0] == name for key in known_keys()):
        message = f"{name} is for the trainer's config, and run makes this a task, which runs a program"
        return ConfigError(message, where=where, hint=f"drop {name}, or drop run to train")
    near = get_close_matches(name, BY_NAME, n=1)
    hint = f"did you mean {near[0]}?" if near else f"keys of a task: {', '.join(BY_NAME)}"
    return ConfigError(f"{name} is not a key of a task", where=where, hint=hint)


def is_program(tree: Mapping[str, object]) -> bool:
    """Whether `run` is a task's, not the section of a config."""
    return RUN in tree and not isinstance(tree[RUN], Mapping) and is_given(tree[RUN])
