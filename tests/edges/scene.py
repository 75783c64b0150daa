"""A client and its hosts for the fuzz: jobs, records of them, and what can become of each file."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer.agent.host.layout import Job
from deployer.agent.job.judge import judge
from deployer.agent.job.status import FINAL
from deployer.agent.job.stop import request_stop
from deployer.agent.job.views import Row
from deployer.connection.host import HERE
from deployer.jobs.registry import JobRecord, SeenJob, remember_rows, stamp, write_record
from tests.edges.warm import mistyped, nested
from tests.support.jobs import end_of, make_plan, python, run_job, run_up, said, wait_for

RUNS, ENDED = "runs-1", ("good-1", "failed-2", "metrics-3", "stopped-4")
FAR, FAR_ROOT = "far-1", "/proc/none"
"""A job of a host that cannot be asked: its note and record are all that is known."""

METRICS = """import json, os
print('said')
with open(os.environ['TORCHFERRY_RUN_DIR'] + '/metrics.jsonl', 'w') as f:
    f.writelines(json.dumps({'step': n, 'loss': 1 / (n + 1)}) + chr(10) for n in range(9))
"""
GPUS = "0, GPU-0, Fake H100, 81559, 4\n1, GPU-1, Fake H100, 81559, 4\n"


@dataclass
class Scene:
    """What lies there undamaged; `damage` changes a file, `restore` brings back all that was changed."""

    state: Path
    root: Path
    leases: Path
    live: tuple[str, ...] = (RUNS,)
    """Jobs that have not ended: one runs, one has a GPU, one waits for it."""
    kept: dict[Path, bytes] = field(default_factory=dict)
    changed: list[Path] = field(default_factory=list)
    _seen: dict[Path, tuple[int, ...] | None] = field(default_factory=dict)
    _halted: list[int] = field(default_factory=list)

    def job(self, job_id: str) -> Path:
        return self.root / "jobs" / job_id

    @property
    def jobs(self) -> tuple[str, ...]:
        return (*self.live, *ENDED)

    def keep(self) -> None:
        """Takes all files of ours for what they are now."""
        self.kept = {path: path.read_bytes() for path in self._files()}
        self._seen = {path: _sight(path) for path in self.kept}

    def claims(self) -> list[Path]:
        """The files of leases and tickets; their holders make others where these are lost."""
        return sorted(self.leases.iterdir())

    def _files(self) -> Iterator[Path]:
        folders = [*map(self.job, self.jobs), self.state, self.root / "store", self.root / "envs"]
        for folder in folders:
            yield from (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20)

    def damage(self, path: Path, how: Damage, chance: random.Random) -> None:
        """A supervisor that would write its status again is halted until `restore`."""
        if path not in self.kept:  # a claim: who waits could take it for none before its holder has made it again
            self.kept[path] = path.read_bytes()
            self._halt(self.job(self.live[-1]) / "status.json")
        elif path.name == "status.json" and path.parent.name in self.live:
            self._halt(path)
        self.changed.append(path)
        with suppress(FileExistsError):  # a supervisor has written it again just now
            how(path, self.kept[path], chance)

    def _halt(self, status: Path) -> None:
        self._halted.append(json.loads(self.kept[status])["supervisor"]["pid"])
        os.kill(self._halted[-1], signal.SIGSTOP)

    def forget_new_jobs(self) -> None:
        """Of which the store and the client's notes stay. A launch that was cut off may still be writing."""
        names = {*self.jobs, FAR, *(name + ".json" for name in (*self.jobs, FAR))}
        for folder in (self.root / "jobs", self.state / "jobs"):
            for path in folder.iterdir():
                if path.name in names or path.name.startswith("."):
                    continue
                wait_for(lambda path=path: judge(Job(str(path))).state in FINAL if path.is_dir() else True)
                with suppress(OSError):
                    _clear(path)

    def restore(self) -> None:
        self.forget_new_jobs()
        for path in self.changed:
            for aside in path.parent.glob(path.name + ".*.aside"):
                _clear(aside)
            if path.parent == self.leases:
                self._restore_claim(path)
            else:
                self._put(path)
        self.changed.clear()
        for path, seen in self._seen.items():  # what a command has written over, or an agent has healed
            if _sight(path) != seen:
                self._put(path)
        if self._halted and len(self.live) > 1:
            has = self.live[1]
            os.kill(json.loads(self.kept[self.job(has) / "status.json"])["supervisor"]["pid"], signal.SIGCONT)
            wait_for(lambda: any(has in path.name for path in self.claims()))
        for pid in self._halted:
            os.kill(pid, signal.SIGCONT)
        self._halted.clear()

    def _put(self, path: Path) -> None:
        data = self.kept[path]
        if path.is_symlink() or not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
            _clear(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)
        self._seen[path] = _sight(path)

    def _restore_claim(self, path: Path) -> None:
        """In place: who holds it has locked this very file."""
        data = self.kept.pop(path)
        if path.is_file() and not path.is_symlink():
            path.write_bytes(data)
        else:
            _clear(path)


def _sight(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_scene(place: Path, ferry_run: Callable[..., Any]) -> Scene:
    """Three jobs live, four have ended; a first deployment has filled the store and the client's notes."""
    scene = Scene(place / "state", place / "root", place / "leases")
    there = ("--remote-root", str(scene.root), "--python", sys.executable)
    run_up(scene.root, RUNS)
    codes = ("print('said')", "import sys; print('said'); sys.exit(3)", METRICS)
    for job_id, code in zip(ENDED[:-1], codes, strict=True):
        run_job(scene.root, job_id, make_plan(python(code), job_id=job_id))
    stopped = run_up(scene.root, ENDED[-1])
    request_stop(stopped, force=True)
    end_of(stopped)
    for job_id in (RUNS, *ENDED):
        record = JobRecord(job_id, "test", None, str(scene.root), str(place / "results" / job_id), CREATED)
        write_record(record)
    write_record(JobRecord(FAR, "far", None, FAR_ROOT, str(place / "results" / FAR), CREATED))
    rows = [SeenJob(Row(FAR, "running", name="far", created=CREATED), HERE, stamp())]
    remember_rows(None, FAR_ROOT, rows, asked_at=1.0)
    ferry_run("ps")
    ferry_run("run", *there, "--no-pull", "--", "true")
    for name, state in (("has", "running"), ("waits", "queued")):
        words = ("--gpus", "0", "--queue", "--detach", "--name", name)
        ferry_run("run", *there, *words, "--", "python", "-uc", "import time; print('up'); time.sleep(9e5)")
        (job_id,) = [path.name for path in (scene.root / "jobs").iterdir() if path.name.startswith(name)]
        job = Job(str(scene.job(job_id)))
        wait_for(lambda job=job, state=state: judge(job).state == state)
        if state == "running":
            said(job, "up")
        scene.live += (job_id,)
    ferry_run("doctor", "--remote-root", str(scene.root))
    scene.forget_new_jobs()
    ferry_run("ps")
    scene.keep()
    return scene


CREATED = "2026-01-02T03:04:05Z"


def end_scene(scene: Scene) -> None:
    scene.restore()
    for job_id in reversed(scene.live):
        job = Job(str(scene.job(job_id)))
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


def false_word(path: Path, data: bytes, chance: random.Random) -> None:
    """A status as it could be, of another state; of any other file what `other_types` does."""
    if path.name != "status.json":
        other_types(path, data, chance)
        return
    state = chance.choice(("queued", "preparing", "running", "succeeded", "failed", "stopped", "lost"))
    said = {"state": state, "code": chance.choice((0, 1, None)), "reason": "so they say", "ended_at": CREATED}
    path.write_bytes(json.dumps({**json.loads(data), **said}).encode("ascii"))


DAMAGES: tuple[Damage, ...] = (
    *(absent, empty, cut, cut, noise, flipped, deep, huge, a_folder, a_pipe, a_link),
    *(other_types,) * 6,
    *(false_word,) * 2,
)
