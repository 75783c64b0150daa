"""What a launch that was followed came to, for a script: one JSON at its end."""

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
"""Why Ctrl-C leaves a job: its line stands below the ^C."""


@dataclass
class Report:
    """Filled while the launch goes on; `say` is its end."""

    host: Host
    record: JobRecord
    screen: Screen
    as_json: bool = False
    """A script reads it; otherwise it is said nowhere."""
    final: Status | None = None
    """How the job ended; None where this client stayed not so long."""
    results: str | None = None
    """The folder with the results, as far as they came."""
    not_home: list[dict[str, Any]] = field(default_factory=list)
    left: str = ""
    """Why this client left the job."""

    def say(self, exit_code: int) -> int:
        """The end of the command; returns its exit code."""
        if self.as_json:
            terminal.say_json(self.told(exit_code))
        return exit_code

    def leave(self, why: str, exit_code: int = RUNS_ON) -> int:
        """The end of a command that does not see the job's; returns its exit code."""
        if exit_code == RUNS_ON and self.screen.acknowledged:
            self.screen.left_behind(*(("", why) if why == DETACHED else (why,)))
        self.left = why
        with suppress(OSError):  # an output that takes no more may be why it is left
            self.say(exit_code)
        return exit_code

    def told(self, exit_code: int) -> dict[str, Any]:
        """Every key is always there."""
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
