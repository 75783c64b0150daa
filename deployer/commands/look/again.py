"""The commands, to be typed, that start a run again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deployer import terminal
from deployer.agent.host.typed import InvalidData, load_json
from deployer.agent.job.plan import Plan, is_trainer
from deployer.commands.key_options import DEFAULT_ROOT, JOB, LIMITS
from deployer.commands.look.run_files import Run
from deployer.connection.host import Host
from deployer.report.facts import Facts

TOLD_APART = ("target.env", "target.secrets", "target.ssh", "target.root")
"""Keys that `_options` leaves out: `_words` writes the host and the names of variables, and values are not shown."""

_COMMIT = re.compile(r"[0-9a-f]{7,64}", re.ASCII)


def lines_again(facts: Facts, run: Run) -> str:
    """The lines to type; empty if it is not known what was run."""
    if facts.plan is not None:
        home = run.record.results if run.record is not None else f"results/{run.name}"
        words = _words(facts.plan, Path(home), run.host)
        return "\n".join([*_checkout(facts, Path(home)), f"{terminal.invoked_as()} {shlex.join(words)}"])
    if facts.config is None:
        return ""
    me = terminal.invoked_as()
    train = "python train.py" if "deploy.py" in me else f"{me} train"
    return f"{train} {shlex.quote(str(run.folder / 'config.yaml'))} --run-dir NEW_FOLDER"


def _checkout(facts: Facts, home: Path) -> list[str]:
    if facts.git is None or not _COMMIT.fullmatch(facts.git.commit):  # a text from a host, in lines that people paste
        return []
    changes = [shlex.join(["git", "apply", str(home / "git.patch")])] if facts.git.dirty else []
    return [shlex.join(["git", "checkout", facts.git.commit]), *changes]


def _words(plan: Plan, home: Path, host: Host | None) -> list[str]:
    where = ["--ssh", host.ssh] if host is not None and host.ssh else []
    where += ["--remote-root", host.root] if host is not None and host.root != DEFAULT_ROOT else []
    if is_trainer(plan):
        return [str(home / "config.yaml"), *where]
    environment = [word for name in plan.env_names for word in ("--env", f"{name}=VALUE")]
    environment += [word for name in plan.secret_names for word in ("--secret", name)]
    torchrun = ["--torchrun"] if plan.request.torchrun else []
    settings = _options(plan.request.overrides)
    return ["run", *where, *torchrun, *settings, *environment, "--", *plan.request.command]


def _options(overrides: Sequence[str]) -> list[str]:
    """The options for a plan's settings (`KEY=JSON`); settings without an option are left out."""
    rows = {row.key: row for row in (*JOB, *LIMITS)}
    words: list[str] = []
    for override in overrides:
        key, _, text = override.partition("=")
        value: object = None
        with suppress(InvalidData):
            value = load_json(text.encode("utf-8", "replace"))
        if key not in rows or key in TOLD_APART or value is None or value is False:
            continue
        row = rows[key]
        if value is True:
            words.append(row.flag)
        elif isinstance(value, list) and row.how.get("multiple"):
            words += [word for one in value for word in (row.flag, str(one))]
        else:
            words += [row.flag, _word(key, value)]
    return words


def _word(key: str, value: object) -> str:
    """A value in the form that its option takes."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    unit = "s" if key.endswith("_s") else "GB" if key.endswith("_gb") else ""
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"
