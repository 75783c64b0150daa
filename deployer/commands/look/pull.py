"""`pull`, and the pull at the end of a followed run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.agent.job.status import FINAL
from deployer.agent.requests.files.view import UnpulledFiles
from deployer.commands.screen import ending_in_order
from deployer.connection.host import Host, ReconnectBackoff
from deployer.errors import ConnectError, FerryError, LostConnection, NotHome
from deployer.exit_codes import NOT_HOME
from deployer.jobs.requests import read_status
from deployer.printable import shown
from deployer.pull.choice import ABSENT, BEYOND_LIMIT, DAMAGED, GONE, LINK, LeftOut, PullRequest
from deployer.pull.rounds import Pulled, pull
from deployer.pull.target import CannotWrite

MOST_LINES = 8
"""Lines about single files that are left out; the others are only counted."""


def pull_job(
    host: Host,
    job_id: str,
    *,
    target: Path | None,
    request: PullRequest,
    every_s: float | None,
    as_json: bool,
    words: str = "",
) -> int:
    """Pulls results, to results/ID unless a target is given; with `every_s` repeatedly until the job has ended. Returns
    the exit code. `words`: options that a later pull needs besides the ID."""
    if target is None:  # the ID may be shortened
        job_id = read_status(host, job_id).job_id
        target = Path("results") / job_id
    again = _again(job_id, request, words)
    try:
        with ending_in_order():
            if every_s is not None:
                pulled = _watch(host, job_id, target, request, every_s=every_s)
            else:
                pulled = _pull(host, job_id, target, replace(request, list_unpulled=not request.paths))
    except KeyboardInterrupt:
        terminal.notice(shown(""), shown(f"what has come is kept; go on with: {again}"))
        raise
    except CannotWrite as error:
        raise NotHome(error.message, hint=error.hint) from None
    except LostConnection as error:
        # with another hint: the job may not run any more
        raise NotHome(error.message, where=error.where, hint=f"what has come is kept; go on with: {again}") from None
    lacks = _tell(pulled, job_id, target, again) if not as_json else _lacks(pulled, again)
    if as_json:
        terminal.say_json({"id": job_id, "target": str(target), **_as_json(pulled)})
    if lacks:
        terminal.notice(shown(lacks))
    return NOT_HOME if lacks else 0


def bring_home(host: Host, job_id: str, *, target: Path, request: PullRequest) -> tuple[Pulled, str]:
    """Pulls once and shows what was pulled and what was not. Also returns a last line about requested results that are
    missing; empty if none are."""
    pulled = _pull(host, job_id, target, request)
    return pulled, _tell(pulled, job_id, target, _again(job_id, PullRequest()))


def not_home_line(job_id: str, what: str, why: FerryError | str) -> str:
    """The last line of a command whose pull failed."""
    elsewhere = " --to DIR" if isinstance(why, CannotWrite) else ""
    said = why if isinstance(why, str) else why.message
    return f"not pulled: {what} ({said}); pull them with: {terminal.invoked_as()} pull {job_id}{elsewhere}"


def _again(job_id: str, request: PullRequest, words: str = "") -> str:
    """The command that repeats this pull."""
    checkpoint = {None: "", "all": "--checkpoints"}.get(request.checkpoints, f"--checkpoint {request.checkpoints}")
    paths = " ".join(map(terminal.typed, request.paths))
    return " ".join(filter(None, [terminal.invoked_as(), "pull", job_id, paths, checkpoint, words]))


def _pull(host: Host, job_id: str, target: Path, request: PullRequest) -> Pulled:
    with terminal.progress(shown("pulled")) as update:
        return pull(host, job_id, target=target, request=request, progress=update, tell=terminal.notice)


def _watch(host: Host, job_id: str, target: Path, request: PullRequest, *, every_s: float) -> Pulled:
    """Pulls until the job has ended, and once more after that."""
    backoff = ReconnectBackoff(terminal.notice)
    pulled: Pulled | None = None
    while True:
        try:
            ended = read_status(host, job_id).status.state in FINAL  # before the pull, which must get the last output
            pulled = _pull(host, job_id, target, replace(request, list_unpulled=ended and not request.paths))
            if ended:
                return pulled
        except (LostConnection, ConnectError) as error:
            if pulled is None:
                raise
            backoff.wait(error)
        else:
            backoff.progressed()
            time.sleep(every_s)


# --- in words ---------------------------------------------------------------------------------------------------------


def _tell(pulled: Pulled, job_id: str, target: Path, again: str) -> str:
    """Shows what was pulled, what was left out and what stays on the host; returns the last line on missing results."""
    terminal.notice(
        shown(f"results: {target} ({terminal.counted(pulled.files, 'file')}, {terminal.size(pulled.size_bytes)})")
    )
    beyond = [left for left in pulled.left_out if left.reason == BEYOND_LIMIT]
    others = [left for left in pulled.left_out if left.reason != BEYOND_LIMIT]
    for left in others[:MOST_LINES]:
        terminal.notice(shown(f"left out: {left.name}: {left.reason}"))
    if others[MOST_LINES:]:
        terminal.notice(shown(f"left out: {len(others) - MOST_LINES} more"))
    if beyond:
        terminal.notice(shown(f"left on the host: {_sum_of(beyond)}; pull them with: {_all_of(pulled, again)}"))
    if pulled.unpulled is not None and pulled.unpulled.files:
        terminal.notice(shown(_unpulled_line(pulled.unpulled, job_id)))
    return _lacks(pulled, again)


def _lacks(pulled: Pulled, again: str) -> str:
    """A line about requested results that are missing, with the command that pulls them; empty if none are missing."""
    lacking = pulled.not_home
    if not lacking:
        return ""
    reasons = list(dict.fromkeys(left.reason for left in lacking))
    why = reasons[0] if len(reasons) == 1 else f"{reasons[0]}; other reasons: {len(reasons) - 1}"
    line = f"not pulled: {_sum_of(lacking)} ({why})"
    if all(reason in (GONE, ABSENT, LINK) or reason.startswith(DAMAGED) for reason in reasons):
        return line
    return f"{line}; pull them with: {_all_of(pulled, again) if BEYOND_LIMIT in reasons else again}"


def _all_of(pulled: Pulled, again: str) -> str:
    """The command that also pulls what was beyond the limit."""
    total = sum(left.size_bytes for left in pulled.left_out if left.reason == BEYOND_LIMIT)
    return f"{again} --pull-max {(pulled.size_bytes + total) / 1e9 + 1:.0f}GB"


def _sum_of(left: Sequence[LeftOut]) -> str:
    """`export, a.log …, 12 files, 3.4 GB`."""
    names = ", ".join(one.name for one in left[:4]) + (" …" if len(left) > 4 else "")
    files, size = sum(one.files for one in left), sum(one.size_bytes for one in left)
    return f"{names}, {terminal.counted(files, 'file')}, {terminal.size(size)}" if files else names


def _unpulled_line(unpulled: UnpulledFiles, job_id: str) -> str:
    least = "at least " if unpulled.at_least else ""
    named = ", ".join(name.removeprefix("code/") for name in unpulled.largest)
    more = " …" if unpulled.files > len(unpulled.largest) else ""
    paths = " ".join(map(terminal.typed, unpulled.names))
    return (
        f"stays on the host: {least}{terminal.counted(unpulled.files, 'file')} that the job wrote, "
        f"{terminal.size(unpulled.size_bytes)}: {named}{more}; "
        f"{terminal.invoked_as()} pull {job_id} {paths} pulls them"
    )


def _as_json(pulled: Pulled) -> dict[str, object]:
    return {
        **asdict(pulled),
        "stays": to_json(pulled.unpulled),
        "not_home": left_as_json(pulled.not_home),
    }


def left_as_json(left: Sequence[LeftOut]) -> list[dict[str, object]]:
    return [asdict(one) for one in left]
