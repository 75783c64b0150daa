"""`deploy.py CONFIG` and `deploy.py run -- PROGRAM`: prepare, show or launch, follow, pull the results."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployer import terminal
from deployer.agent.host.layout import PREPARE_LOG, LogName
from deployer.agent.job.plan import Plan, is_alone
from deployer.agent.job.status import FAILED, LOST, STOPPED, Status
from deployer.commands.defaults import Defaults
from deployer.commands.in_words import exit_code_of, group_of, stall_lines
from deployer.commands.launch.dry_run import files_line, named_line, show_plan
from deployer.commands.launch.report import DETACHED, Report
from deployer.commands.launch.spec import ask_for, choose, places
from deployer.commands.screen import (
    LAST_LINES,
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
from deployer.exit_codes import NOT_HOME
from deployer.jobs.registry import JobRecord
from deployer.jobs.requests import last_lines
from deployer.jobs.words import Anew, kept_words
from deployer.launch.delta import KnownTree
from deployer.launch.logview import LogView
from deployer.launch.start import launch_and_follow
from deployer.plan.env_file import EnvFile
from deployer.plan.notify import Notify, read_notify, with_urls
from deployer.plan.options import LaunchSpec
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
    defaults: Defaults,
    kind: str | None = None,
    verb: str = "run",
    words: Sequence[str] = (),
    like: Anew | None = None,
    **options: Any,
) -> int:
    """Performs one launch and returns the exit code of the command. `enter`: see `entrance`; `kind`: the kind of file
    from --as; `verb` and `words`: the command and its words as typed; `like`: the launch that it repeats."""
    whom = read_notify(notify)
    check_followed(whom, detach=detach)
    chosen = choose(config, overrides, program, kind, options)
    spec, chosen, taken = ask_for(chosen, defaults)
    host = enter(spec.config.target.ssh, spec.config.target.root)
    spec = with_after(spec, host)
    if dry_run is None:
        check_platform(host)
        host.prefetch()
        _ask(unusual_project(Path.cwd()), yes=chosen.yes, as_json=as_json)
        host.load()
    prepared = prepare(spec, options=chosen, project=Path.cwd())
    plan, payload = with_urls(prepared.plan, prepared.payload, whom.urls)
    if like is not None:
        plan = plan._replace(env_names=tuple(sorted({*plan.env_names, *filter(None, like.names)})))
    prepared = replace(prepared, plan=plan, payload=payload)
    if dry_run is not None:
        _warn(prepared)
        how: dict[str, Any] = {"config": chosen.config, "remote": dry_run == "remote", "as_json": as_json}
        show_plan(prepared, host, whom, defaults=places(taken, host), **how)
        return 0
    _ask(large_files(prepared.code), yes=chosen.yes, as_json=as_json)
    _describe(prepared, host)
    record = record_of(prepared, host, Path.cwd())._replace(
        words=like.kept if like is not None else kept_words(words), folder=str(Path.cwd()), verb=verb
    )
    return _launch(
        prepared,
        host,
        record,
        detach=detach,
        as_json=as_json,
        give_up_s=give_up_s,
        pull_limit=pull_limit,
        pulls=not no_pull,
        like=like.values_of if like is not None else "",
        commands=whom.commands,
    )


def with_after(spec: LaunchSpec, host: Host) -> LaunchSpec:
    """The launch with complete IDs in --after, as far as this client knows them."""
    target = spec.config.target
    if not target.after:
        return spec
    from deployer.jobs.after import whole_ids

    known = replace(target, after=whole_ids(target.after, host))
    return spec._replace(config=replace(spec.config, target=known))


def check_platform(host: Host) -> None:
    """Raises UsageError if the job is for this machine and it is not Linux."""
    if host.ssh is None and platform.system() != "Linux":
        raise UsageError(
            f"jobs on this machine need Linux, this is {platform.system()}",
            hint="python train.py CONFIG trains here in the foreground; --ssh HOST runs the job elsewhere",
        )


def _ask(question: Question | None, *, yes: bool, as_json: bool) -> None:
    """Asks a person to confirm. Raises UsageError if no person can answer; a no ends the program."""
    if question is None or yes:
        return
    if not terminal.has_person(as_json=as_json):
        raise UsageError(question.text, hint=question.hint)
    terminal.notice(shown(question.text), shown(f"({question.hint})"))
    terminal.confirm(shown("Send it?"), declined=shown("nothing was sent"))


def _describe(prepared: Prepared, host: Host) -> None:
    terminal.notice(shown(f"{prepared.plan.job_id} → {host.full_name}: {files_line(prepared)}"))
    if line := named_line(prepared):
        terminal.notice(shown(line))
    _warn(prepared)


def _warn(prepared: Prepared) -> None:
    for warning in prepared.code.warnings:
        terminal.notice(shown(f"warning: {warning}"))


def record_of(prepared: Prepared, host: Host, project: Path) -> JobRecord:
    """The record of the job that this client writes when the job has started."""
    plan = prepared.plan
    results = project / "results" / plan.job_id
    place = (host.ssh, host.root, str(results))
    record = JobRecord(plan.job_id, plan.name, *place, plan.created, host.ssh_key, host.transport)
    return with_secrets(record, plan, prepared.env_file)


def with_secrets(record: JobRecord, plan: Plan, env_file: EnvFile | None) -> JobRecord:
    """The record with the names of secrets that a resume passes on again, and with the env file that has the others."""
    of_file = env_file.variables if env_file is not None else {}
    names = tuple(name for name in plan.secret_names if name not in of_file)
    return record._replace(secrets=names, env_file=env_file.kept_path if env_file is not None else "")


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
    like: str,
    commands: tuple[str, ...],
) -> int:
    plan = prepared.plan

    def start(screen: Screen, view: LogView | None) -> Status | None:
        screen.keeps = lambda: keep_left_out(prepared, Path.cwd())
        return launch_and_follow(
            host.connect,
            plan,
            shipment=prepared.shipment,
            payload=prepared.payload,
            git=git_state(Path.cwd(), apart=hidden_paths(prepared, Path.cwd())),
            view=view,
            watcher=screen,
            last=KnownTree.of(host.ssh, host.root, Path.cwd()),
            give_up_s=give_up_s,
            like=like,
        )

    bare = is_alone(plan)
    ways: dict[str, Any] = {"detach": detach, "as_json": as_json, "pull_limit": pull_limit, "pulls": pulls}
    return follow_through(start, host, record, bare=bare, commands=commands, **ways)


def hidden_paths(prepared: Prepared, project: Path) -> list[str]:
    """Files of the project whose content is a secret."""
    return prepared.env_file.paths_below(project) if prepared.env_file is not None else []


def keep_left_out(prepared: Prepared, project: Path) -> None:
    """Notes the files that were not sent, because a job that fails may have needed one."""
    from deployer.jobs.left_out import left_out, note_left_out

    note_left_out(prepared.plan.job_id, left_out(project, prepared.code.ignored.paths))


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
    """Starts a job or its next attempt, follows it and pulls the results. Returns the exit code of the command.

    `start` returns the final status; without a view it returns None when the host has accepted the job. `commands`:
    the --notify commands to run at events.
    """
    report = Report(host, record, Screen(record), as_json=as_json)
    screen, job_id = report.screen, record.job_id
    screen.notices = _notices(commands, record, host)
    view = None if detach else log_view(bare=bare, as_json=as_json)

    with ending_in_order():
        try:
            report.final = start(screen, view)
            if report.final is None:
                screen.close()
                if not as_json:
                    next_commands(job_id)
                return report.say(0)
        except KeyboardInterrupt:
            if not screen.acknowledged or screen.stopping:
                return report.leave("cancelled", screen.called_off())
            return report.leave(DETACHED)
        except LostConnection as error:
            if not screen.acknowledged:
                screen.remember()  # it may have been started: `ps` needs to know its host
                error.of_job(job_id)
                raise
            return report.leave(f"gave up following: {error.message}")
        except OSError as error:
            if not is_unread(error):
                if not screen.acknowledged or screen.stopping:
                    raise
                terminal.drop_unwritten()  # such as the log if the disk is full
                return report.leave(f"gave up following: {error.strerror or error}")
            _leave_unread(screen)
            raise BrokenPipeError from error
        finally:
            screen.close()
        if screen.notices is not None:
            screen.notices.end(report.final)
        return report.say(_end(report, report.final, pulls=pulls, limit=pull_limit, was_shown=bare))


def _leave_unread(screen: Screen) -> None:
    leave_terminal()
    if screen.acknowledged and not screen.stopping:
        screen.left_behind("nobody reads the output any more")
    else:
        screen.called_off()


def check_followed(whom: Notify, *, detach: bool) -> None:
    """Raises UsageError for a --notify command together with --detach: no client would run it."""
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


def _end(report: Report, final: Status, *, pulls: bool, limit: int | None, was_shown: bool) -> int:
    """Pulls the results of a job that has ended and shows how it ended. Returns the exit code."""
    host, record, lacks = report.host, report.record, ""
    if pulls:
        try:
            lacks = _bring_home(report, limit)
        except KeyboardInterrupt:
            terminal.notice(shown(""))
            lacks = _not_home(report, "the results, or a part of them", "interrupted")
    with suppress(KeyboardInterrupt):  # Ctrl-C only shortens the messages; the exit code stays
        tell_end(host, record.job_id, final, pulled=pulls and not lacks, was_shown=was_shown)
    if lacks:
        terminal.notice(shown(lacks))
    return exit_code_of(final) or (NOT_HOME if lacks else 0)


def _bring_home(report: Report, limit: int | None) -> str:
    """Pulls the results. Returns a line about requested results that are missing; empty if none are."""
    from deployer.commands.look.pull import bring_home, left_as_json  # no launch waits for this import
    from deployer.pull.choice import PullRequest

    record = report.record
    try:
        request = PullRequest(max_bytes=limit, list_unpulled=True)
        pulled, lacks = bring_home(report.host, record.job_id, target=Path(record.results), request=request)
    except FerryError as error:
        # the job has ended anyway: the command returns the job's exit code
        terminal.show_error(error)
        return _not_home(report, "the results", error)
    report.results, report.not_home = record.results, left_as_json(pulled.not_home)
    return lacks


def _not_home(report: Report, what: str, why: FerryError | str) -> str:
    from deployer.commands.look.pull import not_home_line

    reason = why if isinstance(why, str) else why.message
    report.not_home = [{"name": what, "files": None, "size_bytes": None, "reason": reason, "wanted": True}]
    return not_home_line(report.record.job_id, what, why)


def tell_end(host: Host, job_id: str, final: Status, *, pulled: bool, was_shown: bool) -> None:
    """Shows how the job ended; for a failed job also its last log lines and the next commands. `was_shown`: the log of
    its only rank was on this screen."""
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
    """Shows the last lines of the log that explains the failure, unless the log was just shown."""
    if final.log == "":
        if final.started_at:
            terminal.notice(shown("the failed process wrote nothing"))
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
        text = last_lines(host, job_id, group, rank=rank, lines=LAST_LINES)
    except FerryError:
        return  # the log was on the screen anyway
    if text:
        kind = "preparation" if name is not None and name.file == PREPARE_LOG else "launcher"
        who = " ".join(["the", *group.words, kind]) if rank is None else group.rank(rank)
        terminal.notice(shown(f"--- last lines of {who}"))
        terminal.notice(*(shown(f"  {line}") for line in shown_lines(text.decode("utf-8", "replace"))))
