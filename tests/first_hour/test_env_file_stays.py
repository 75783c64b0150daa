"""An env file's values are in the environment of the job's own processes and nowhere else."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

from tests.support.ferry import Ferry

SECRET = "canary-91c5e0d24b687f3a"
SHOWS = "import hashlib, os; print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), os.environ['PLAIN'])\n"
SHOWN = hashlib.sha256(SECRET.encode()).hexdigest().encode()


def files_with_secret(*folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_values_reach_the_job_and_its_setup_and_stay_nowhere(ferry: Ferry) -> None:
    ferry.write("shows.py", SHOWS)
    ferry.write("prod.vars", f"TOKEN={SECRET}\nPLAIN=of the file\n")
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        subprocess.run(["git", *words], cwd=ferry.project, check=True)
    ferry.write("prod.vars", f"TOKEN='{SECRET}'\nPLAIN=of the file\n")  # a change that git would tell of
    words = (
        "--debug",
        *ferry.where(),
        "--env-file",
        "prod.vars",
        "--env",
        "PLAIN=given",
        "--setup",
        "echo $TOKEN; env",
    )
    done = ferry.run("run", *words, "--", "python", "shows.py")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == SHOWN + b" given\n" and SECRET.encode() not in done.stderr
    assert sorted(path.name for path in (ferry.job() / "code").iterdir()) == ["shows.py"]
    assert files_with_secret(ferry.root, ferry.state) == []
    assert files_with_secret(ferry.project / "results") == []
    plan = json.loads((ferry.job() / "job.json").read_text())["plan"]
    assert plan["secret_names"] == ["TOKEN"] and "env_file" not in json.dumps(plan)
    (job_id,) = ferry.job_ids()
    again = ferry.run("resume", job_id)
    assert again.returncode == 0 and again.stdout == SHOWN + b" given\n", again.stderr.decode()
    assert files_with_secret(ferry.root, ferry.state) == []


def test_resume_from_elsewhere_asks_for_the_file(ferry: Ferry) -> None:
    ferry.write("shows.py", SHOWS)
    ferry.write(".env", f"TOKEN={SECRET}\nPLAIN=1\n")
    job = ("--no-pull", "--", "python", "shows.py")
    assert ferry.run("run", *ferry.where(), "--env-file", ".env", *job).returncode == 0
    (job_id,) = ferry.job_ids()
    elsewhere = Ferry(ferry.project, ferry.state.parent / "other", ferry.root)
    refused = elsewhere.run("resume", job_id, *ferry.where(), "--no-pull")
    assert refused.returncode == 2 and b"had PLAIN, TOKEN from an env file" in refused.stderr
    done = elsewhere.run("resume", job_id, *ferry.where(), "--env-file", ".env", "--no-pull")
    assert done.returncode == 0 and done.stdout == SHOWN + b" 1\n", done.stderr.decode()


def test_mistake_in_it_names_the_line_and_starts_nothing(ferry: Ferry) -> None:
    ferry.write("a.env", f"A=1\nB='{SECRET}\n")
    done = ferry.run("run", *ferry.where(), "--env-file", "a.env", "--", "true")
    assert done.returncode == 2 and b"in a.env:2" in done.stderr and SECRET.encode() not in done.stderr
    assert ferry.job_ids() == []
    (ferry.project / "keys").mkdir()
    ferry.write("keys/a.env", "A=1\n")
    done = ferry.run("run", *ferry.where(), "--include", "keys", "--env-file", "keys/a.env", "--", "true")
    assert done.returncode == 2 and b"--include keys would send the env file keys/a.env" in done.stderr
