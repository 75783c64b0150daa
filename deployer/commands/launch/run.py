"""`deploy.py CONFIG` and `deploy.py run -- PROGRAM`: prepare, show or launch, follow, bring the results home."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployer import terminal
from deployer.agent.host.layout import PREPARE_LOG, LogName
from deployer.agent.job.plan import is_alone
from deployer.agent.job.status import FAILED, LOST, STOPPED, Status
from deployer.commands.in_words import exit_code_of, group_of, stall_lines
from deployer.commands.launch.dry_run import files_line, show_plan
from deployer.commands.screen import (
    Screen,
    ending_in_order,
    is_unread,
    leave_terminal,
    log_view,
    missed_lines,
    next_commands,
)
from deployer.connection.host import Host
from deployer.errors import FerryError, LostConnection, UsageError
from deployer.exit_codes import NOT_HOME, RUNS_ON
from deployer.jobs.registry import JobRecord
from deployer.jobs.requests import last_lines
from deployer.launch.delta import LastTree
from deployer.launch.logview import LogView
from deployer.launch.start import launch_and_follow
from deployer.plan.notify import Notify, read_notify, with_urls
from deployer.plan.options import Asked, Options, read_config
from deployer.plan.prepare import Prepared, Question, large_files, prepare, unusual_project
from deployer.printable import shown, shown_lines
from deployer.project.git import git_state

if TYPE_CHECKING:
    from deployer.launch.notify import Notices


def run(
    config: str | None,
    overrides: tuple[str, ...],
    program: tuple[str, ...],
    *,
    detach: bool,
    dry_run: str | None,
    notify: tuple[str, ...],
    no_pull: bool,
    pull_limit: int | None,
    as_json: bool,
    give_up_s: float,
    enter: Callable[[str | None, str], Host],
    **options: Any,
) -> int:
    """Carries out one launch and returns the exit code of the command. `enter`: see `entrance`."""
    if as_json and dry_run is None and not detach:
        raise UsageError("--json goes with --dry-run or --detach")
    whom = read_notify(notify)
    check_followed(whom, detach=detach)
    chosen = Options(config=config, overrides=overrides, command=program, **options)
    asked = read_config(chosen, tell=tell_note)
    host = enter(asked.config.target.ssh, asked.config.target.root)
    asked = _with_after(asked, host)
    if dry_run is None:
        _check_platform(host)
        host.prefetch()
        _ask(unusual_project(Path.cwd()), yes=chosen.yes)
        host.load()
    prepared = prepare(asked, options=chosen, project=Path.cwd())
    plan, payload = with_urls(prepared.plan, prepared.payload, whom.urls)
    prepared = replace(prepared, plan=plan, payload=payload)
    if dry_run is not None:
        _warn(prepared)
        show_plan(prepared, host, whom, config=config, remote=dry_run == "remote", as_json=as_json)
        return 0
    _ask(large_files(prepared.code), yes=chosen.yes)
    _describe(prepared, host)
    record = _record(prepared, host)
    return _launch(
        prepared,
        host,
        record,
        detach=detach,
        as_json=as_json,
        give_up_s=give_up_s,
        pull_limit=pull_limit,
        pulls=not no_pull,
        commands=whom.commands,
    )


def _with_after(asked: Asked, host: Host) -> Asked:
    """With whole ids of the jobs that it is to start after, as far as this client knows them."""
    target = asked.config.target
    if not target.after:
        return asked
    from deployer.jobs.after import whole_ids

    known = replace(target, after=whole_ids(target.after, host))
    return asked._replace(config=replace(asked.config, target=known))


def tell_note(note: str) -> None:
    """Says what a config has without effect."""
    terminal.notice(shown(f"note: {note}"))


def _check_platform(host: Host) -> None:
    if host.ssh is None and platform.system() != "Linux":
        raise UsageError(
            f"jobs on this machine need Linux, this is {platform.system()}",
            hint="python train.py CONFIG trains here in the foreground; --ssh HOST runs the job elsewhere",
        )


def _ask(question: Question | None, *, yes: bool) -> None:
    """Has a person confirm what is surprising. UsageError without a terminal; a no ends the program."""
    if question is None or yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(question.text, hint=question.hint)
    terminal.notice(shown(question.text), shown(f"({question.hint})"))
    terminal.confirm(shown("Ship it?"), declined=shown("nothing was shipped"))


def _describe(prepared: Prepared, host: Host) -> None:
    terminal.notice(shown(f"{prepared.plan.job_id} → {host.name}: {files_line(prepared)}"))
    _warn(prepared)


def _warn(prepared: Prepared) -> None:
    for warning in prepared.code.warnings:
        terminal.notice(shown(f"warning: {warning}"))


def _record(prepared: Prepared, host: Host) -> JobRecord:
    plan = prepared.plan
    results = Path.cwd() / "results" / plan.job_id
    place = (host.ssh, host.root, str(results))
    return JobRecord(plan.job_id, plan.name, *place, plan.created, host.ssh_key, host.transport, plan.secret_names)


# --- the launch -------------------------------------------------------------------------------------------------------


def _launch(
    prepared: Prepared,
    host: Host,
    record: JobRecord,
    *,
    detach: bool,
    as_json: bool,
    give_up_s: float,
    pull_limit: int | None,
    pulls: bool,
    commands: tuple[str, ...],
) -> int:
    plan = prepared.plan

    def start(screen: Screen, view: LogView | None) -> Status | None:
        screen.keeps = lambda: _keep_left_out(prepared)
        return launch_and_follow(
            host.connect,
            plan,
            shipment=prepared.shipment,
            payload=prepared.payload,
            git=git_state(Path.cwd()),
            view=view,
            watcher=screen,
            last=LastTree.of(host.ssh, host.root, Path.cwd()),
            give_up_s=give_up_s,
        )

    bare = is_alone(plan)
    ways: dict[str, Any] = {"detach": detach, "as_json": as_json, "pull_limit": pull_limit, "pulls": pulls}
    return follow_through(start, host, record, bare=bare, commands=commands, **ways)


def _keep_left_out(prepared: Prepared) -> None:
    """For the end of the job, which may miss it."""
    from deployer.jobs.left_out import left_out, note_left_out

    note_left_out(prepared.plan.job_id, left_out(Path.cwd(), prepared.code.ignored.paths))


def follow_through(
    start: Callable[[Screen, LogView | None], Status | None],
    host: Host,
    record: JobRecord,
    *,
    bare: bool,
    detach: bool,
    as_json: bool,
    pull_limit: int | None,
    pulls: bool,
    commands: tuple[str, ...] = (),
) -> int:
    """Starts a job or its next attempt, follows it, brings the results home; the exit code of the command.

    `start` returns the final status, None once the host has acknowledged the job when it gets no view. `commands` are
    told how it goes.
    """
    screen, job_id = Screen(record), record.job_id
    screen.notices = _notices(commands, record, host)
    view = None if detach else log_view(bare=bare)
    with ending_in_order():
        try:
            final = start(screen, view)
            if final is None:
                screen.close()
                if as_json:
                    terminal.say_json({"id": job_id, "where": host.name, "folder": screen.folder})
                else:
                    next_commands(job_id)
                return 0
        except KeyboardInterrupt:
            if not screen.acknowledged or screen.stopping:
                return screen.called_off()
            screen.left_behind("", "detached")
            return RUNS_ON
        except LostConnection as error:
            if not screen.acknowledged:
                screen.remember()  # it may have been started: `ps` must know which host to ask
                raise
            screen.left_behind(f"gave up following: {error.message}")
            return RUNS_ON
        except OSError as error:
            if not is_unread(error):
                if not screen.acknowledged or screen.stopping:
                    raise
                terminal.drop_unwritten()  # such as the log, where the disk is full
                screen.left_behind(f"gave up following: {error.strerror or error}")
                return RUNS_ON
            leave_terminal()
            if screen.acknowledged and not screen.stopping:
                screen.left_behind("nobody reads the output any more")
            else:
                screen.called_off()
            raise BrokenPipeError from error
        finally:
            screen.close()
        if screen.notices is not None:
            screen.notices.end(final)
        return _end(host, record, final, pulls=pulls, limit=pull_limit, was_shown=bare)


def check_followed(whom: Notify, *, detach: bool) -> None:
    """UsageError for a command that nobody would run."""
    if whom.commands and detach:
        raise UsageError(
            "--notify with a command goes without --detach: it runs on the client that follows",
            hint="a URL is told by the host, whoever follows",
        )


def _notices(commands: tuple[str, ...], record: JobRecord, host: Host) -> Notices | None:
    if not commands:
        return None
    from deployer.launch.notify import Notices

    return Notices(commands, record.job_id, record.name, host.name, lambda line: terminal.notice(shown(line)))


def _end(host: Host, record: JobRecord, final: Status, *, pulls: bool, limit: int | None, was_shown: bool) -> int:
    """Brings the results of a job that has ended home and says how it ended; the exit code."""
    lacks = ""
    if pulls:
        try:
            lacks = _bring_home(host, record, limit)
        except KeyboardInterrupt:
            terminal.notice(shown(""))
            lacks = _not_home(record, "the results, or a part of them", "interrupted")
    with suppress(KeyboardInterrupt):  # what is told is told; the code stays
        tell_end(host, record.job_id, final, pulled=pulls and not lacks, was_shown=was_shown)
    if lacks:
        terminal.notice(shown(lacks))
    return exit_code_of(final) or (NOT_HOME if lacks else 0)


def _bring_home(host: Host, record: JobRecord, limit: int | None) -> str:
    """A line on what is not here afterwards; empty when all is."""
    from deployer.commands.look.pull import bring_home  # a launch does not wait for what is needed after its job
    from deployer.pull.choice import Wish

    try:
        wish = Wish(max_bytes=limit, stays=True)
        return bring_home(host, record.job_id, target=Path(record.results), wish=wish)
    except FerryError as error:
        # the job has ended all the same: its own exit code is what the command returns
        terminal.show_error(error)
        return _not_home(record, "the results", error)


def _not_home(record: JobRecord, what: str, why: FerryError | str) -> str:
    from deployer.commands.look.pull import not_home_line

    return not_home_line(record.job_id, what, why)


def tell_end(host: Host, job_id: str, final: Status, *, pulled: bool, was_shown: bool) -> None:
    """Says how the job ended; of a failed one also the last words and where to look. `was_shown`: the log of its only
    rank was on this screen."""
    state, reason = final.state, final.reason
    if state != FAILED:
        stopped = "was stopped" if reason in ("", "stopped on request") else f"was {reason}"
        ends = {STOPPED: stopped, LOST: f"is lost: {reason}"}
        terminal.notice(shown(f"{job_id} {ends.get(state, state)}"))
        return
    stalled = stall_lines(final)
    for line in stalled:
        terminal.notice(shown(f"  {line}"))
    if not stalled and not final.after:
        _show_last_lines(host, job_id, final, was_shown=was_shown)
    code = f"code {final.code}"
    terminal.notice(shown(f"{job_id} failed: {reason}" + ("" if code in reason else f" (exit {code})")))
    for cause in (*final.causes, *missed_lines(job_id, final, host)):
        terminal.notice(shown(f"  {cause}"))
    if final.hint:
        terminal.notice(shown(f"hint: {final.hint}"))
    next_commands(job_id, final, without="pull" if pulled else "")


def _show_last_lines(host: Host, job_id: str, final: Status, *, was_shown: bool) -> None:
    """Of the log that tells of the failure, unless all of it was just shown."""
    if final.log == "":
        terminal.notice(shown("what has failed has written nothing"))
        return
    name = LogName.parse(final.log or "")
    group, rank = group_of(final.first_failing_group), final.first_failing_rank
    if name is not None:
        group, rank = name.group, name.rank
    if was_shown and rank is not None:
        return
    if final.first_failing_rank is not None and rank != final.first_failing_rank:
        first = group_of(final.first_failing_group).rank(final.first_failing_rank)
        terminal.notice(shown(f"{first} has written nothing"))
    try:
        text = last_lines(host, job_id, group, rank=rank, lines=15)
    except FerryError:
        return  # its log was on the screen; this is only a summary
    if text:
        kind = "preparation" if name is not None and name.file == PREPARE_LOG else "launcher"
        who = " ".join(["the", *group.words, kind]) if rank is None else group.rank(rank)
        terminal.notice(shown(f"--- last lines of {who}"))
        terminal.notice(*(shown(f"  {line}") for line in shown_lines(text.decode("utf-8", "replace"))))
