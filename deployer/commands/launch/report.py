"""The result of a followed launch for a script: one JSON at the end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.agent.job.status import PREPARING, Status
from deployer.commands.screen import Screen, last_words, missed_lines, next_lines
from deployer.connection.host import Host
from deployer.exit_codes import RUNS_ON
from deployer.jobs.registry import JobRecord

DETACHED = "detached"
"""The reason after Ctrl-C; its message begins on a new line, below the ^C."""


@dataclass
class Report:
    """Filled during the launch; `say` prints it at the end."""

    host: Host
    record: JobRecord
    screen: Screen
    as_json: bool = False
    """Whether to print it; otherwise it is not shown."""
    final: Status | None = None
    """The job's final status; None if this client left before the end."""
    results: str | None = None
    """The folder with the results that were pulled."""
    not_home: list[dict[str, Any]] = field(default_factory=list)
    left: str = ""
    """Why this client left the job."""

    def say(self, exit_code: int) -> int:
        """Prints the report if a script reads it; returns the exit code unchanged."""
        if self.as_json:
            terminal.say_json(self.told(exit_code))
        return exit_code

    def leave(self, why: str, exit_code: int = RUNS_ON) -> int:
        """Ends a command that leaves the job before its end; returns the exit code unchanged."""
        if exit_code == RUNS_ON and self.screen.acknowledged:
            self.screen.left_behind(*(("", why) if why == DETACHED else (why,)))
        self.left = why
        with suppress(OSError):  # the reason to leave may be that stdout cannot be written
            self.say(exit_code)
        return exit_code

    def told(self, exit_code: int) -> dict[str, Any]:
        """The report as a mapping; every key is always present."""
        final, job_id = self.final, self.record.job_id
        begun = PREPARING if self.screen.acknowledged and not self.screen.stopping else None
        return {
            "id": job_id,
            "where": self.host.name,
            "folder": self.screen.folder,
            "state": final.state if final else self.screen.known_state or begun,
            "code": final.code if final else None,
            "exit_code": exit_code,
            "attempt": final.attempt if final else None,
            "reason": (final.reason if final else self.left) or None,
            "causes": list(final.causes) if final else [],
            "missed": missed_lines(job_id, final, self.host) if final else [],
            "missing": to_json(final.missing) if final else [],
            "last_lines": last_words(job_id, final, self.host) if final else [],
            "hint": (final.hint if final else "") or None,
            "results": self.results,
            "not_home": self.not_home,
            "next": [line.split() for line in next_lines(job_id, final)],
        }
