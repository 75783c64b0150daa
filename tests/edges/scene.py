"""A client and its hosts for the fuzz: jobs, records of them, and what can become of each file."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer.agent.host.layout import Job
from deployer.agent.job.stop import request_stop
from deployer.agent.job.views import Row
from deployer.connection.host import HERE
from deployer.jobs.registry import JobRecord, SeenJob, remember_rows, stamp, write_record
from tests.edges.warm import mistyped, nested
from tests.support.jobs import end_of, make_plan, python, run_job, run_up

RUNS, ENDED = "runs-1", ("good-1", "failed-2", "metrics-3", "stopped-4")
FAR, FAR_ROOT = "far-1", "/proc/none"
"""A job of a host that cannot be asked: its note and record are all that is known."""

METRICS = """import json, os
print('said')
with open(os.environ['TORCHFERRY_RUN_DIR'] + '/metrics.jsonl', 'w') as f:
    f.writelines(json.dumps({'step': n, 'loss': 1 / (n + 1)}) + chr(10) for n in range(9))
"""


@dataclass
class Scene:
    """What lies there undamaged; `damage` changes a file, `restore` brings back all that was changed."""

    state: Path
    root: Path
    leases: Path
    kept: dict[Path, bytes] = field(default_factory=dict)
    changed: list[Path] = field(default_factory=list)

    def job(self, job_id: str) -> Path:
        return self.root / "jobs" / job_id

    def keep(self) -> None:
        """Takes all files of ours for what they are now."""
        self.kept = {path: path.read_bytes() for path in self._files()}

    def _files(self) -> Iterator[Path]:
        for job_id in (RUNS, *ENDED):
            job = self.job(job_id)
            yield from (path for path in job.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20)
        for folder in (self.state, self.root / "store", self.root / "envs", self.leases):
            yield from (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20)

    def damage(self, path: Path, how: Damage, chance: random.Random) -> None:
        self.changed.append(path)
        with suppress(FileExistsError):  # the job's own supervisor has written it again just now
            how(path, self.kept[path], chance)

    def restore(self) -> None:
        for path in self.changed:
            _clear(path)
            for aside in path.parent.glob(path.name + ".*.aside"):
                _clear(aside)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.kept[path])
            path.chmod(0o600)
        self.changed.clear()
        for path, data in self.kept.items():  # what a command has written over, or an agent has healed
            if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
                _clear(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_scene(tmp_path: Path, ferry_run: Callable[..., Any]) -> Scene:
    """One job runs, three have ended; a first deployment has filled the store and the client's notes."""
    scene = Scene(tmp_path / "state", tmp_path / "root", tmp_path / "leases")
    run_up(scene.root, RUNS)
    for job_id, code in zip(
        ENDED[:-1], ("print('said')", "import sys; print('said'); sys.exit(3)", METRICS), strict=True
    ):
        run_job(scene.root, job_id, make_plan(python(code), job_id=job_id))
    stopped = run_up(scene.root, ENDED[-1])
    request_stop(stopped, force=True)
    end_of(stopped)
    for job_id in (RUNS, *ENDED):
        record = JobRecord(job_id, "test", None, str(scene.root), str(tmp_path / "results" / job_id), CREATED)
        write_record(record)
    write_record(JobRecord(FAR, "far", None, FAR_ROOT, str(tmp_path / "results" / FAR), CREATED))
    rows = [SeenJob(Row(FAR, "running", name="far", created=CREATED), HERE, stamp())]
    remember_rows(None, FAR_ROOT, rows, asked_at=1.0)
    ferry_run("ps")
    ferry_run("run", "--remote-root", str(scene.root), "--no-pull", "--python", sys.executable, "--", "true")
    ferry_run("doctor", "--remote-root", str(scene.root))
    for path in (*(scene.root / "jobs").iterdir(), *(scene.state / "jobs").iterdir()):
        if path.stem.startswith("true-"):  # of which the store and the client's notes stay
            _clear(path)
    ferry_run("ps")
    scene.keep()
    return scene


CREATED = "2026-01-02T03:04:05Z"


def end_scene(scene: Scene) -> None:
    job = Job(str(scene.job(RUNS)))
    request_stop(job, force=True)
    end_of(job)


# --- what can become of a file ----------------------------------------------------------------------------------------

Damage = Callable[[Path, bytes, random.Random], None]


def absent(path: Path, data: bytes, chance: random.Random) -> None:
    _clear(path)


def empty(path: Path, data: bytes, chance: random.Random) -> None:
    path.write_bytes(b"")


def cut(path: Path, data: bytes, chance: random.Random) -> None:
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def noise(path: Path, data: bytes, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.choice((1, 40, 3000))))


def flipped(path: Path, data: bytes, chance: random.Random) -> None:
    found = bytearray(data or b"x")
    for _ in range(chance.choice((1, 3, 30))):
        found[chance.randrange(len(found))] = chance.randrange(256)
    path.write_bytes(found)


def other_types(path: Path, data: bytes, chance: random.Random) -> None:
    """Valid JSON, with values of other types; of a file of lines the last line."""
    head, end, last = b"", b"", data
    if path.suffix == ".jsonl":
        head, _, last = data.rstrip(b"\n").rpartition(b"\n")
        head, end = head + b"\n", b"\n"
    try:
        value = json.loads(last)
    except ValueError:
        value = chance.choice(({}, [], 5, "x"))
    for _ in range(chance.choice((1, 1, 2, 5))):
        value = mistyped(value, chance)
    path.write_bytes(head + json.dumps(value).encode("ascii") + end)


def deep(path: Path, data: bytes, chance: random.Random) -> None:
    path.write_bytes(chance.choice((b"[" * 100_000, b'{"a":' * 50_000, json.dumps(nested(900)).encode(), b"- " * 9000)))


def huge(path: Path, data: bytes, chance: random.Random) -> None:
    path.write_bytes(data)
    of_job, is_log = "jobs" in path.parts, path.suffix != ".json"
    os.truncate(
        path, 5 << 20 if of_job and is_log else chance.choice((5 << 20, 70 << 20, 70 << 20 if of_job else 3 << 30))
    )


def a_folder(path: Path, data: bytes, chance: random.Random) -> None:
    _clear(path)
    path.mkdir()
    if chance.random() < 0.5:
        (path / "inside").write_text("x")


def a_pipe(path: Path, data: bytes, chance: random.Random) -> None:
    _clear(path)
    os.mkfifo(path)


def a_link(path: Path, data: bytes, chance: random.Random) -> None:
    _clear(path)
    path.symlink_to(
        chance.choice(("/dev/zero", "/dev/null", str(path), "/none", "/proc/self/mem", str(path.parent / "victim")))
    )


DAMAGES: tuple[Damage, ...] = (
    *(absent, empty, cut, cut, noise, flipped, deep, huge, a_folder, a_pipe, a_link),
    *(other_types,) * 6,
)
