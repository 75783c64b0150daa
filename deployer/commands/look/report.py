"""`report`: everything that is known about a run as one HTML file."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from deployer import terminal
from deployer.agent.host.files import open_regular
from deployer.agent.host.layout import LogName
from deployer.agent.host.typed import InvalidData, parse
from deployer.agent.job.status import FAILED, LOST, Status, slot_of
from deployer.commands.in_words import group_of, state_line
from deployer.commands.look.again import lines_again
from deployer.commands.look.run_files import (
    METRICS,
    NO_ANSWER,
    FindHost,
    Found,
    Run,
    home_status,
    locate,
    open_run,
    tell_source,
)
from deployer.errors import FerryError, UnknownJob, UsageError
from deployer.jobs.registry import recall_rows
from deployer.jobs.requests import last_lines, read_status
from deployer.paths import write_whole
from deployer.printable import LogText, shown
from deployer.pull.some import bring_some
from deployer.report.facts import profile_names, read_facts, take_profiles
from deployer.report.run_page import Told, run_page

PATHS = (METRICS, "config.yaml", "status.json", "job.json", "outcome.json", "git.patch", "samples.jsonl")
MOST = 64 << 20
LOG_LINES = 40
LOG_BYTES = 64 << 10
ASK_VERSIONS = """
import json, platform, subprocess
from importlib.metadata import version, PackageNotFoundError
found = {"Python": platform.python_version(), "System": platform.platform()}
for name in ("torch", "transformers", "triton", "datasets", "numpy"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
try:
    said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10).stdout.decode()
    cards = [line.split(", ") for line in said.splitlines() if line.count(", ") == 1]
    if cards:
        names = [card[0] for card in cards]
        found["GPUs of the host"] = ", ".join("%d x %s" % (names.count(n), n) for n in dict.fromkeys(names))
        found["NVIDIA driver"] = cards[0][1]
except (OSError, subprocess.TimeoutExpired):
    pass
print(json.dumps(found))
"""
"""A script for the job's interpreter: prints versions and facts about its host, without importing the packages."""


class Job(NamedTuple):
    """A run with its status, if that is known."""

    run: Run
    status: Status | None
    path: str = ""
    """The job's folder on its host."""


def report(word: str | None, find_host: FindHost, *, output: str | None, as_json: bool) -> None:
    found = locate(word, find_host)
    with tempfile.TemporaryDirectory(prefix="torchferry-report-") as folder:
        job = _open(word or "", found, Path(folder))
        page = _page(job, Path(folder)).encode("utf-8", "replace")
    file = output or f"{_file_name(job.run.name)}.html"
    try:
        write_whole(Path(file), page)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", hint="name another file with -o") from None
    if as_json:
        terminal.say_json({"id": job.run.name, "path": str(Path(file).absolute()), "bytes": len(page)})
    else:
        tell_source(job.run)
        terminal.say(shown(f"wrote {terminal.typed(file)}, {terminal.size(len(page))}: open it in a browser"))


def _file_name(name: str) -> str:
    return "report-" + (re.sub(r"[^\w.-]", "_", Path(name).resolve().name) or "run")


def _open(word: str, found: Found, folder: Path) -> Job:
    if isinstance(found, Path):
        top = found.parent if found.is_file() else found
        return Job(Run(word, found), home_status(top))
    host, record = found
    job_id = record.job_id if record is not None else word
    view = None
    with suppress(*NO_ANSWER, UnknownJob):  # open_run asks again and reports the error
        view = read_status(host, job_id)
    run = open_run(view.job_id if view is not None else job_id, (host, record), PATHS, folder, anew=view is not None)
    status = view.status if view is not None else _last_known(run)
    return Job(run, status, view.path if view is not None else "")


def _last_known(run: Run) -> Status | None:
    """The status that was pulled, or that the host reported last."""
    status = home_status(run.folder)
    if status is not None or run.host is None:
        return status
    rows = recall_rows(run.host.ssh, run.host.root)
    row = next((row.job for row in rows if row.job.id == run.name), None)
    if row is None:
        return None
    return Status(row.state, code=row.code, reason=row.reason, started_at=row.started_at, ended_at=row.ended_at)


def _page(job: Job, folder: Path) -> str:
    run, status = job.run, job.status
    facts = read_facts(run.name, run.read, run.metrics(), status, read_end=run.read_end)
    if run.from_host and run.host is not None and (names := profile_names(facts.config)):
        with suppress(*NO_ANSWER):
            bring_some(run.host, run.name, names, folder, most=MOST, tell=terminal.notice)
    take_profiles(facts, run.read)
    now = datetime.now(timezone.utc)
    told = Told(
        as_of=now.strftime("%Y-%m-%d %H:%M UTC"),
        state=state_line(status) if status is not None else "",
        host=run.host.name if run.host is not None else "",
        folder=job.path or str(run.folder if not run.from_host else ""),
        trouble=f"{run.host.name} does not tell of it ({run.trouble})" if run.trouble and run.host is not None else "",
        causes=status.causes if status is not None else (),
        hint=terminal.as_invoked(status.hint) if status is not None else "",
        log=_log(job) if status is not None and status.state in (FAILED, LOST) else "",
        again=lines_again(facts, run),
        environment=_versions(job),
        now=now,
        notes=tuple(f"{name} was not read: {reason}" for name, reason in run.lacks.items()),
    )
    return run_page(facts, told)


def _log(job: Job) -> str:
    """The end of the log that explains a failure best."""
    run, status = job.run, job.status
    assert status is not None
    name = LogName.parse(status.log or f"rank_{status.first_failing_rank or 0}.log")
    if name is None or status.log == "":
        return ""
    data = b""
    if run.from_host and run.host is not None:
        with suppress(FerryError):
            data = last_lines(run.host, run.name, name.group, rank=name.rank, lines=LOG_LINES)
    else:
        group = group_of(status.first_failing_group) if status.log is None else name.group
        path = Path(run.folder, "logs", f"attempt_{name.attempt}", *group.words, name.file)
        with suppress(OSError), open_regular(str(path)) as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            data = file.read(LOG_BYTES)
    text = LogText(colours=False).feed(data[-LOG_BYTES:], final=True).decode("utf-8", "replace")
    return "\n".join(text.replace("\r", "\n").rstrip("\n").split("\n")[-LOG_LINES:])


class _Exit(NamedTuple):
    exit: int


def _versions(job: Job) -> tuple[tuple[str, str], ...]:
    """The path of the job's interpreter, and the output of ASK_VERSIONS if the host can be asked."""
    run = job.run
    python = slot_of(job.status, "python") if job.status is not None else ""
    rows = [("Interpreter", python)] if python else []
    if not run.from_host or run.host is None or not python:
        return tuple(rows)
    data = b""
    with suppress(FerryError), run.host.connect() as link:
        call = link.call("exec", argv=[python, "-I", "-c", ASK_VERSIONS])  # -I: no module of the project is imported
        call.end_data()
        for name, value, part in call.events():
            if name == "data" and value.get("stream") == "stdout":
                data += part
            if len(data) > LOG_BYTES:
                break
    with suppress(InvalidData):
        rows += list(parse(data, dict[str, str], most=LOG_BYTES).items())[:30]
    return tuple(rows)
