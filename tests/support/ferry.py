"""Running the real command line in tests: a project folder, a state folder and a remote root of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.limits import HANG_S

REPO = Path(__file__).resolve().parents[2]


@dataclass
class Ferry:
    """One user's client: `run` waits for a command, `start` leaves it running."""

    project: Path
    state: Path
    root: Path
    ssh: str | None = None
    transport: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    source: Path = REPO
    """The tree whose `deploy.py` it runs."""

    def write(self, name: str, text: str) -> None:
        """A file of the project."""
        (self.project / name).write_text(text)

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, str(self.source / "deploy.py"), *words]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TORCHFERRY_STATE_DIR": str(self.state), "PYTHONPATH": str(self.source), **self.env}

    def where(self) -> list[str]:
        way = ["--transport", self.transport] if self.transport else []
        return ["--remote-root", str(self.root), *(["--ssh", self.ssh] if self.ssh else []), *way]

    def run(
        self, *words: str, timeout_s: float = HANG_S, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(*words),
            cwd=self.project,
            env=self.environment(),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=timeout_s,
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*words),
            bufsize=0,  # `communicate` after a `readline` would miss what a buffer holds
            cwd=self.project,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def job_ids(self) -> list[str]:
        return sorted(p.name for p in (self.root / "jobs").iterdir()) if (self.root / "jobs").exists() else []

    def job(self, job_id: str | None = None) -> Path:
        """The folder of a job; of the only one when no id is given."""
        if job_id is None:
            (job_id,) = self.job_ids()
        return self.root / "jobs" / job_id
