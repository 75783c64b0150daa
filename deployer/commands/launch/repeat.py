"""`repeat`: the same launch as a new job, with the files on its host or with this folder in its current state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployer import terminal
from deployer.agent.job.plan import Plan, is_alone
from deployer.agent.job.status import Status
from deployer.commands.launch.resume import named_env_file, told_no_more, with_whole_ids
from deployer.commands.launch.run import check_followed, follow_through, with_secrets
from deployer.commands.launch.spec import tell_note
from deployer.connection.host import HERE, Host
from deployer.errors import UnknownJob, UsageError
from deployer.jobs.registry import JobRecord
from deployer.jobs.words import Anew, hidden_names, kept_words, split_program, without_env, without_option
from deployer.launch.start import launch_and_follow
from deployer.plan.env_file import env_file_of
from deployer.plan.notify import read_notify, with_urls
from deployer.plan.options import Options
from deployer.plan.prepare import Prepared
from deployer.plan.repeat import Original, plan_again, read_original
from deployer.printable import shown
from deployer.project.manifest import Scan, Shipment
from deployer.project.walk import Ignored
from trainer.config.load import key_of

NOT_AFTER = "it waits for no other job: --after is not repeated; --after ID names one"
NOTHING = Scan((), {}, 0, Ignored(0, 0, False, (), {}), (), ())


def repeat(
    host: Host,
    job_id: str,
    record: JobRecord | None,
    *,
    overrides: tuple[str, ...],
    changes: dict[str, Any],
    words: Sequence[str],
    dry_run: str | None,
    notify: tuple[str, ...],
    give_up_s: float,
    **ways: Any,
) -> int:
    """Launches a job again with the files that it had. `record`: this client's record of it, if there is one; `words`:
    the words beside the ID on the command line; `ways`: arguments of `follow_through` for the new job."""
    whom = read_notify(notify)
    check_followed(whom, detach=ways["detach"])
    original = _original(host, job_id)
    known = record.secrets if record else ()
    options = with_whole_ids(Options(overrides=overrides, **changes), host)
    env_file = env_file_of(named_env_file(options) or (record.env_file if record else None) or None)
    plan, payload = plan_again(original.job, options, known=known, env_file=env_file, tell=tell_note)
    before, given = original.job.plan, {*options.keys, *map(key_of, overrides)}
    if before.policy.after and "target.after" not in given:
        tell_note(NOT_AFTER)
    if note := told_no_more(before, whom.urls):
        tell_note(note)
    plan, payload = with_urls(plan, payload, whom.urls)
    files = f"those of {original.job.job_id}, which are there"
    if dry_run is not None:
        from deployer.commands.launch.dry_run import show_plan

        prepared = Prepared(plan, Shipment({}, {}), NOTHING, payload, env_file)
        ways_shown = {"remote": dry_run == "remote", "as_json": ways["as_json"], "files": files, "defaults": {}}
        show_plan(prepared, host, whom, config=None, **ways_shown)
        return 0
    terminal.notice(shown(f"{plan.job_id} → {host.full_name}: {files}"))

    def start(screen: Any, view: Any) -> Status | None:
        return launch_and_follow(
            host.connect,
            plan,
            shipment=Shipment({}, {}),
            payload=payload,
            git=None,
            view=view,
            watcher=screen,
            give_up_s=give_up_s,
            like=original.job.job_id,
        )

    own = with_secrets(_record(plan, host, record, words), plan, env_file)
    return follow_through(start, host, own, bare=is_alone(plan), commands=whom.commands, **ways)


def _original(host: Host, job_id: str) -> Original:
    hint = "--with-changes launches it from the project as it is now"
    try:
        original = read_original(host, job_id)
    except UnknownJob as error:
        raise UnknownJob(error.message, where=error.where, hint=f"{error.hint}; {hint}") from None
    if not original.whole:
        raise UsageError(f"the files of {original.job.job_id} are not on {host.name} any more", hint=hint)
    return original


def _record(plan: Plan, host: Host, former: JobRecord | None, words: Sequence[str]) -> JobRecord:
    folder = former.folder if former else ""
    results = Path(former.results).parent if former and former.results else Path.cwd() / "results"
    return JobRecord(
        plan.job_id,
        plan.name,
        host.ssh,
        host.root,
        str(results / plan.job_id),
        plan.created,
        host.ssh_key,
        host.transport,
        words=kept_words(joined(former.words, words)) if former and former.words else (),
        folder=folder,
        verb=former.verb if former else "run",
    )


def joined(former: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The words of a launch with further words after its options. Of an option that takes one value the last counts."""
    own, program = split_program(former)
    return (*own, *words, *program)


# --- from the folder as it is now -------------------------------------------------------------------------------------


def words_anew(record: JobRecord, words: Sequence[str], *, elsewhere: bool) -> Anew:
    """The words for `run` that launch the job again from the current folder. Raises UsageError if that cannot be
    right."""
    if not record.words:
        raise UsageError(
            f"the words by which {record.job_id} was launched are not known here",
            hint="launch it anew: deploy.py run …; without --with-changes repeat needs none",
        )
    if record.folder and Path(record.folder).is_dir() and not Path(record.folder).samefile(Path.cwd()):
        raise UsageError(
            f"{record.job_id} was launched from {record.folder}, and this is another folder",
            hint=f"cd {terminal.typed(record.folder)}",
        )
    given = set(hidden_names(words))
    names = tuple(name for name in dict.fromkeys(hidden_names(record.words)) if name not in given)
    if names and (elsewhere or "" in names):
        where = record.ssh or HERE
        raise UsageError(
            f"the value of {names[0] or 'target.env'} is not kept here, and only {where} has it",
            hint=" ".join(f"--env {name}=…" if name else "target.env={NAME: …}" for name in names) + " gives it again",
        )
    former = _without_once(record.words, words)
    kept = joined(former, kept_words(words))
    return Anew(joined(without_env(former), words), record.job_id if names else "", names, kept)


def _without_once(former: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The former words without the options of that one launch only; shows a note, unless the new words set them."""
    kept = tuple(former)
    for (option, key), note in _ONCE.items():
        left = without_option(kept, option, key)
        if left != kept and without_option(words, option, key) == tuple(words):
            tell_note(note)
        kept = left
    return kept


_ONCE = {
    ("--after", "target.after"): NOT_AFTER,
    ("--notify", ""): "whom --notify named is told no more: it is kept nowhere; --notify names it anew",
}
