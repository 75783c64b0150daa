"""The finished jobs in jobs/, one of each kind, as a client of 836d9e4 left them on a host."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"


def this_machine() -> str:
    """As a status names the machine of its supervisor: only jobs of this one can be judged here."""
    found = (Path(path) for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"))
    ids = [path.read_text().strip() for path in found if path.exists()]
    return f"{next(filter(None, ids), '')}/{os.uname().nodename}"


def lay_out(root: Path, code: Path, *names: str) -> dict[str, Path]:
    """Puts these finished jobs, all without a name, below a remote root: their folders by name."""
    words = {"@ROOT@": str(root), "@PYTHON@": sys.executable, "@MACHINE@": this_machine()}
    words |= {"@HOST@": os.uname().nodename}
    jobs = {}
    for source in sorted(JOBS.iterdir()):
        if names and source.name not in names:
            continue
        job_id = json.loads((source / "job.json").read_text())["plan"]["job_id"]
        job = jobs[source.name] = root / "jobs" / job_id
        shutil.copytree(source, job)
        for path in sorted(p for p in job.rglob("*") if p.is_file()):
            data = path.read_bytes()
            for word, value in words.items():
                data = data.replace(word.encode(), value.encode())
            path.write_bytes(data)
        if source.name == "sft":
            (job / "lib").mkdir()
            shutil.copy(code / "train.py", job / "lib")
            shutil.copytree(code / "trainer", job / "lib" / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    return jobs
