"""A job as an object of the Python interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from deployer.agent.job.status import FINAL, Status
from deployer.agent.job.stop import DEFAULT_GRACE_S
from deployer.agent.job.views import Ack, JobView
from deployer.api.keywords import NOT_OF_A_LAUNCH, as_overrides, notified, read_keywords
from deployer.api.values import JobFailed, JobStatus, Overrides, Result, told, warn
from deployer.commands.launch.cli import resume as resume_command
from deployer.commands.launch.resume import next_of
from deployer.commands.look.cli import logs as logs_command
from deployer.commands.look.status import status_as_json
from deployer.commands.options import ACCESS, PULL_MAX
from deployer.commands.screen import Screen, last_words, missed_lines
from deployer.commands.values import parse_path, parse_size
from deployer.connection.host import HERE, Host
from deployer.curves.metrics import MAX_BYTES, records_of
from deployer.errors import FerryError, LostConnection, NotHome
from deployer.jobs.registry import JobRecord, note_state, read_records, write_record
from deployer.jobs.requests import read_status, stop_jobs
from deployer.launch.follow import Watcher
from deployer.launch.lines import Lines
from deployer.launch.start import resume_and_follow
from deployer.plan.next_attempt import read_resumable
from deployer.plan.options import Options
from deployer.printable import shown
from deployer.pull.choice import BEYOND_LIMIT, PullRequest
from deployer.pull.rounds import Pulled, pull

METRICS = "metrics.jsonl"


class Noted(Watcher):
    """Keeps this client's record of a job, and prints nothing."""

    def __init__(self, record: JobRecord, keeps: Callable[[], None] = lambda: None) -> None:
        self._record = record
        self._keeps = keeps

    def note(self) -> None:
        """Writes the record, so that the ID finds the job. A disk error must not end the launch."""
        try:
            write_record(self._record)
        except OSError as error:
            warn(f"this client keeps no record of {self._record.job_id}: {error}")

    def started(self, ack: Ack) -> None:
        self.note()
        self._keeps()

    def state(self, status: Status) -> None:
        note_state(self._record, self._record.ssh or HERE, status.state)


class Telling(Screen):
    """Shows messages about a followed job on stderr, and no reconnects after the client has left the job."""

    left = False

    def reconnecting(self, error: FerryError, wait_s: float) -> None:
        if not self.left:
            super().reconnecting(error, wait_s)


class Job:
    """A job on its host. It does not depend on this object or this process: it keeps running when they end."""

    def __init__(self, id: str, place: Host) -> None:
        self.id = id
        """The complete ID."""
        self._place = place

    @property
    def host(self) -> str | None:
        """The value of --ssh; None: this machine."""
        return self._place.ssh

    @property
    def results(self) -> Path:
        """The local folder of the job's results."""
        return Path(self._record().results)

    def __repr__(self) -> str:
        return f"<torchferry job {self.id} on {self._place.name}>"

    def status(self) -> JobStatus:
        """The job's current status. Raises ConnectError if its host cannot be asked."""
        with self._at_host() as host:
            found = read_status(host, self.id)
            raw = status_as_json(found, host)
        job = found.status
        newest = next(records_of((found.latest or "").encode("utf-8", "replace")), None)
        return JobStatus(
            found.job_id,
            job.state,
            job.code,
            job.reason,
            (*job.causes, *raw["missed"]),
            tuple(raw["last_lines"]),
            job.hint,
            job.attempt,
            newest or {},
            raw,
        )

    def logs(self, follow: bool = False, *, tail: int | None = None, rank: int | None = None) -> Iterator[str]:
        """The log lines of the latest attempt; with `follow` until the job has ended. If the job has several ranks,
        `[RANK] ` stands before each line, unless `rank` names one. Raises LostConnection if the host cannot be reached
        for ten minutes."""
        with self._at_host() as host:
            found = read_status(host, self.id)
            request = {"tail": tail, "ranks": None if rank is None else [rank], "live": follow}
            bare = rank is not None or _has_one(found)
            lines = Lines(host, self.id, request=request, bare=bare, watcher=Noted(self._record()))
            try:
                yield from lines
            finally:
                lines.leave()

    @told()
    def wait(
        self,
        timeout: float | None = None,
        *,
        check: bool = True,
        quiet: bool = False,
        pull: bool = True,
        pull_max: str | int = PULL_MAX,
        give_up: str | float = "10m",
    ) -> Result:
        """Follows the job to its end, prints its log meanwhile (unless `quiet`), and pulls its results.

        Raises JobFailed if the job did not succeed, and NotHome if a requested result was not pulled; with check=False
        the Result contains this instead. TimeoutError after `timeout` seconds, LostConnection if the host was not
        reached for `give_up`, and KeyboardInterrupt leave the job running.
        """
        limit = parse_size(str(pull_max)) or None
        _, patience = read_keywords(logs_command, {"give_up": give_up}, function="wait", refused={})
        with self._at_host() as host:
            final = self._follow(host, timeout, quiet=quiet, give_up_s=patience["give_up_s"])
            result = self._result(host, final)
            if pull:
                result = self._with_results(host, result, PullRequest(max_bytes=limit))
        if not quiet:
            print(shown(f"{self.id} {result.state}" + (f"; results: {result.results}" if result.results else "")))
        if check and result.state != "succeeded":
            raise JobFailed(result)
        if check and result.not_home:
            raise NotHome(f"not pulled: {'; '.join(result.not_home)}", hint="Job.pull(max_size=0) pulls all")
        return result

    @told()
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of the job's metrics.jsonl so far; an empty list before the first. The file is pulled to the results
        folder. Raises NotHome if it has more than 64 MiB; use `pull` then."""
        request = PullRequest(max_bytes=MAX_BYTES, paths=(METRICS,), may_lack=True)
        with self._at_host() as host:
            beyond = [
                left for left in _pull(host, self.id, self.results, request).not_home if left.reason == BEYOND_LIMIT
            ]
        if beyond:
            raise NotHome(f"not pulled: {METRICS} ({beyond[0].size_bytes} bytes)", hint=f"Job.pull(paths={METRICS!r})")
        try:
            with (self.results / METRICS).open("rb") as file:
                data = file.read(MAX_BYTES)
        except FileNotFoundError:
            return []
        return [row for row in records_of(data) if row is not None]

    @told()
    def pull(
        self,
        to: str | PathLike[str] | None = None,
        paths: str | Sequence[str] = (),
        *,
        checkpoint: str | int | None = None,
        max_size: str | int | None = None,
    ) -> Path:
        """Pulls the job's results, or the files in `paths`, into `to` (else `results`); returns that folder.

        `checkpoint`: also pulls this step, or `latest`, or `all`. `max_size` limits the total (0: no limit): 2 GB
        unless `paths` is given. Raises NotHome if a requested file was not pulled.
        """
        named = tuple(parse_path(path) for path in ((paths,) if isinstance(paths, str) else paths))
        limit = parse_size(str(max_size if max_size is not None else 0 if named else PULL_MAX)) or None
        target = Path(to) if to is not None else self.results
        with self._at_host() as host:
            request = PullRequest(None if checkpoint is None else str(checkpoint), limit, paths=named)
            if lacking := _lacking(_pull(host, self.id, target, request)):
                raise NotHome(f"not pulled: {'; '.join(lacking)}")
        return target

    def stop(self, grace: float | None = None, *, force: bool = False) -> JobStatus:
        """Stops the job and returns its final status. The job gets `grace` seconds [120] to save; `force` kills it at
        once. A job that has ended does not change."""
        within_s = 0.0 if force else DEFAULT_GRACE_S if grace is None else grace
        with self._at_host() as host:
            (end,) = stop_jobs([(host, self.id)], grace_s=within_s, force=force, on_state=lambda job_id, status: None)
            if isinstance(end, FerryError):
                raise end
        return self.status()

    @told()
    def resume(self, overrides: Overrides | None = None, **options: Any) -> Job:
        """Starts an ended job again from its newest complete checkpoint, with the code of its launch, and returns the
        same object.

        `overrides` change its config, and so does an option with a dot: `resume(**{"train.steps": 400})`. Other options
        are those of the command `resume`: `gpus=[0, 1], env={"A": "b"}, max_restarts=2`. Raises UsageError for a change
        that is not possible for this job, TypeError for an unknown option.
        """
        dotted = {key: value for key, value in options.items() if "." in key}
        given = {key: value for key, value in options.items() if "." not in key}
        keys, others = read_keywords(resume_command, given, function="resume", refused=_NOT_OF_A_RESUME)
        changes = (*as_overrides(overrides), *as_overrides(dotted))
        busy, notify = others.pop("allow_busy", False), others.pop("notify", ())
        if others:
            raise TypeError(f"resume() has no option {min(others)!r}: {_ENTERED if {*others} & {*ACCESS} else _TYPED}")
        with notified(notify) as urls, self._at_host() as host:
            found = read_resumable(host, self.id)
            chosen = Options(overrides=changes, keys=keys, allow_busy=busy)
            plan, payload, record = next_of(found, chosen, host, urls=urls, tell=warn)
            watcher, attempt = Noted(record), found.attempt + 1
            resume_and_follow(host.connect, plan, attempt=attempt, payload=payload, view=None, watcher=watcher)
        return self

    # --- how -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _at_host(self) -> Iterator[Host]:
        """The host over a new connection, closed afterwards: a notebook may be idle for days."""
        host = self._place.another()
        with told():
            try:
                yield host
            finally:
                host.close()

    def _record(self) -> JobRecord:
        """This client's record of the job; a new one for a job that was launched from another machine."""
        place = self._place
        for kept in read_records():
            if (kept.job_id, kept.ssh, kept.root) == (self.id, place.ssh, place.root):
                return kept
        results = str(Path.cwd() / "results" / self.id)
        return JobRecord(self.id, "", place.ssh, place.root, results, "", place.ssh_key, place.transport)

    def _follow(self, host: Host, timeout: float | None, *, quiet: bool, give_up_s: float) -> Status:
        found = read_status(host, self.id)
        record = self._record()
        telling = Telling(record)
        watcher = Noted(record) if quiet else telling
        watcher.state(found.status)
        request = {"live": True}
        lines = Lines(host, self.id, request=request, bare=_has_one(found), watcher=watcher, give_up_s=give_up_s)
        left = f"{self.id} goes on; torchferry.job({self.id!r}) finds it again, and .stop() stops it"
        try:
            for line in lines.within(timeout):
                if not quiet:
                    print(line, flush=True)
        except KeyboardInterrupt:
            print(left)
            raise
        except TimeoutError:
            raise TimeoutError(f"no end within {timeout:g} s: {left}") from None
        except LostConnection as error:
            raise LostConnection(error.message, where=error.where, hint=left) from error
        finally:
            telling.left = True
            lines.leave()
        assert lines.final is not None
        return lines.final

    def _result(self, host: Host, final: Status) -> Result:
        assert final.state in FINAL, final.state
        causes = (*final.causes, *missed_lines(self.id, final, host))
        words = tuple(map(shown, last_words(self.id, final, host)))
        return Result(self.id, final.state, final.code, final.reason, causes, words, final.hint)

    def _with_results(self, host: Host, result: Result, request: PullRequest) -> Result:
        """Pulls the results. An error goes into the result, because the job has ended anyway."""
        target = self.results
        try:
            pulled = _pull(host, self.id, target, request)
        except FerryError as error:
            return replace(result, not_home=(f"the results ({error.message})",))
        return replace(result, results=target, not_home=_lacking(pulled))


_NOT_OF_A_RESUME = {
    **NOT_OF_A_LAUNCH,
    **dict.fromkeys(("ssh", "host", "remote_root"), "a job stays where it is"),
}

_TYPED = "it is for the command line"
_ENTERED = "its host is entered as torchferry.job(id, ssh_key=…) or the launch says"


def _has_one(found: JobView) -> bool:
    """Whether the job has exactly one rank, so that its lines need no rank number."""
    return len(found.processes) == 1 and len(found.processes[0].ranks) == 1


def _pull(host: Host, job_id: str, target: Path, request: PullRequest) -> Pulled:
    return pull(host, job_id, target=target, request=request, tell=lambda text: None)


def _lacking(pulled: Pulled) -> tuple[str, ...]:
    return tuple(f"{left.name} ({left.reason})" for left in pulled.not_home)
