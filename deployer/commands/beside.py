"""`exec` and `shell`: commands beside a job."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from deployer import jobs
from deployer.errors import UsageError
from deployer.host import Host


def execute(host: Host, job_id: str | None, argv: Sequence[str]) -> int:
    """Runs a command with this process's own input and output; its exit code is ours."""
    stdin = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer
    return jobs.execute(host, argv, job_id=job_id, stdin=stdin, out=sys.stdout.buffer, err=sys.stderr.buffer)


def shell(host: Host, job_id: str | None) -> int:
    """A login shell on the host, in the job's code folder when one is given."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("a shell needs a terminal", hint="deploy.py exec ID -- cmd… runs one command without one")
    folder = jobs.read_status(host, job_id)["path"] + "/code" if job_id else None
    if host.ssh is None:
        return subprocess.call([os.environ.get("SHELL", "/bin/sh")], cwd=folder)
    # the login shell may be fish or tcsh: it only hands on one constant text and one quoted word
    enter = 'exec /bin/sh -c \'cd "$0" && exec "${SHELL:-/bin/sh}" -l\''
    command = f"{enter} {shlex.quote(folder)}" if folder else None
    return host.run_shell(command)
