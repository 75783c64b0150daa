"""`stop` of jobs whose files are gone, damaged or another job's: nothing of the job is left, nothing else is touched,
and what is said is true. Processes are counted by a word in their command lines, never by the code under test.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.host.machine import own_identity
from deployer.agent.host.processes import is_running, process_of
from deployer.agent.job.stop import request_stop
from tests.support.ferry import Ferry
from tests.support.jobs import end_of, run_up, wait_for
from tests.support.stubborn import canary, program, running

# --- what can become of the files ------------------------------------------------------------------------------------


@dataclass
class Scene:
    """A job to be stopped, and what runs beside it: a program of the same user, jobs of other ids and other roots."""

    ferry: Ferry
    other: Job
    twin_root: Path
    bystander: int
    words: dict[str, str]  # canaries of what must stay

    def stays(self) -> bool:
        return all(running(word) for word in self.words.values()) and Path(f"/proc/{self.bystander}").exists()


def absent(path: Path, scene: Scene, chance: random.Random) -> None:
    path.unlink(missing_ok=True)


def empty(path: Path, scene: Scene, chance: random.Random) -> None:
    path.write_bytes(b"")


def noise(path: Path, scene: Scene, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randint(1, 3000)))


def a_list(path: Path, scene: Scene, chance: random.Random) -> None:
    path.write_text("[1, 2]")


def cut(path: Path, scene: Scene, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randint(1, len(data) - 1)])


def a_folder(path: Path, scene: Scene, chance: random.Random) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def foreign(path: Path, scene: Scene, chance: random.Random) -> None:
    """Another job's, which runs."""
    name = path.name if path.name in ("status.json", "job.json") else f"ranks/attempt_1/{path.name}"
    shutil.copy(Path(scene.other.path) / name, path)


def mistyped(path: Path, scene: Scene, chance: random.Random) -> None:
    """Valid JSON, some values of which are of other types."""
    values = json.loads(path.read_bytes())
    for key in chance.sample(sorted(values), min(4, len(values))):
        values[key] = chance.choice(["x", 5, [1], {"a": {}}, -1, 1e99, True, None])
    path.write_text(json.dumps(values))


def given_away(path: Path, scene: Scene, chance: random.Random) -> None:
    """Every pid in it is by now another program's."""
    path.write_text(json.dumps(_with_pids(json.loads(path.read_bytes()), process_of(scene.bystander)._asdict())))


def _with_pids(value: Any, process: dict[str, int]) -> Any:
    if not isinstance(value, dict):
        return value
    changed = {key: _with_pids(inner, process) for key, inner in value.items()}
    return {**changed, **process} if "pid" in value else changed


def of_another_machine(path: Path, scene: Scene, chance: random.Random) -> None:
    values = json.loads(path.read_bytes())
    identity = own_identity()._replace(machine_id="another", hostname="gpu7")._asdict()
    path.write_text(json.dumps({**values, "supervisor": {**values.get("supervisor", {}), **identity}}))


def ended(path: Path, scene: Scene, chance: random.Random) -> None:
    """The status of another job, which has ended."""
    copy = json.loads((Path(scene.other.path) / "status.json").read_bytes())
    path.write_text(json.dumps({**copy, "state": "succeeded", "code": 0}))


Damage = Callable[[Path, Scene, random.Random], None]
FILES = (absent, empty, noise, a_list, cut, a_folder, foreign, mistyped)
STATUS: tuple[Damage, ...] = (*FILES, given_away, of_another_machine, ended)
RECORD: tuple[Damage, ...] = FILES
RANKS: tuple[Damage, ...] = (*FILES, given_away)


def nothing(path: Path, scene: Scene, chance: random.Random) -> None:
    pass


def keep(job: Job) -> None:
    pass


def kill_supervisor(job: Job) -> None:
    os.kill(_supervisor(job), signal.SIGKILL)
    wait_for(lambda: not is_running(process_of(_supervisor(job))))


def halt_supervisor(job: Job) -> None:
    os.kill(_supervisor(job), signal.SIGSTOP)


def _supervisor(job: Job) -> int:
    return int(json.loads(Path(job.status).read_bytes())["supervisor"]["pid"])


# --- one stop --------------------------------------------------------------------------------------------------------


@pytest.fixture
def scene(ferry: Ferry, tmp_path: Path) -> Iterator[Scene]:
    words = {"other": canary(), "twin": canary()}
    other = run_up(ferry.root, "other", program(), words["other"])
    twin = run_up(tmp_path / "elsewhere", "j", program(), words["twin"])  # of the same id, below another root
    with subprocess.Popen(["sleep", "3600"]) as bystander:
        yield Scene(ferry, other, tmp_path / "elsewhere", bystander.pid, words)
        bystander.kill()
    for job in (other, twin):
        request_stop(job, force=True)
        assert end_of(job).state == "stopped"
    assert not [word for word in words.values() if running(word)]


def damage(job: Job, scene: Scene, how: tuple[Damage, Damage, Damage], chance: random.Random) -> None:
    status, record, ranks = how
    record(Path(job.record), scene, chance)
    for path in Path(job.ranks(1)).iterdir():
        ranks(path, scene, chance)
    if ranks is absent:
        shutil.rmtree(Path(job.ranks(1)).parent)
    status(Path(job.status), scene, chance)


def check_stop(
    scene: Scene,
    before: Callable[[Job], None],
    how: tuple[Damage, Damage, Damage],
    words: tuple[str, ...],
    chance: random.Random,
    *,
    looks: bool = False,
) -> None:
    """A job `j` is started, its supervisor is treated by `before`, its files are damaged, and it is stopped."""
    word = canary()
    job = run_up(scene.ferry.root, "j", program("worker", "daemon", "daemon without its environment"), word)
    wait_for(lambda: len(running(word)) == 5)  # a wrapper, the program and three more
    before(job)
    damage(job, scene, how, chance)
    if looks:
        rows = {row["id"]: row for row in json.loads(_run(scene, "ps", "--json").stdout)}
        assert rows["j"]["state"] == rows["other"]["state"] == "running"
        assert b"running" in _run(scene, "status", "j").stdout
        resumed = _run(scene, "resume", "j", "--detach")
        assert resumed.returncode == 2 and b" is still running (attempt 1)" in resumed.stderr, resumed.stderr.decode()
    done = _run(scene, "stop", "j", *words)
    said = done.stderr.decode()
    assert (running(word), done.returncode) == ([], 0), said
    assert "j stopped; " in said and " processes ended" in said and "had ended" not in said, said
    assert scene.stays()
    again = _run(scene, "stop", "j").stderr.decode()
    assert "j had ended already: " in again and "process" not in again.replace("nothing of it runs", ""), again
    shutil.rmtree(job.path)


def _run(scene: Scene, *words: str) -> subprocess.CompletedProcess[bytes]:
    return scene.ferry.run(*words, *scene.ferry.where())


AT_ONCE, FORCED, GIVEN_TIME = ("--grace", "0"), ("--force",), ("--grace", "3600")


@pytest.mark.parametrize(
    ("before", "how", "words"),
    [
        (keep, (absent, absent, absent), GIVEN_TIME),
        (keep, (foreign, foreign, foreign), GIVEN_TIME),
        (halt_supervisor, (absent, absent, absent), GIVEN_TIME),
        (halt_supervisor, (empty, empty, empty), AT_ONCE),
        (halt_supervisor, (noise, noise, noise), FORCED),
        (halt_supervisor, (foreign, foreign, foreign), GIVEN_TIME),
        (halt_supervisor, (ended, nothing, nothing), GIVEN_TIME),
        (halt_supervisor, (of_another_machine, mistyped, given_away), GIVEN_TIME),
        (halt_supervisor, (given_away, a_list, given_away), AT_ONCE),
        (kill_supervisor, (nothing, nothing, nothing), GIVEN_TIME),
        (kill_supervisor, (absent, nothing, nothing), GIVEN_TIME),
        (kill_supervisor, (absent, absent, absent), GIVEN_TIME),
        (kill_supervisor, (absent, absent, absent), FORCED),
        (kill_supervisor, (empty, noise, a_list), AT_ONCE),
        (kill_supervisor, (foreign, foreign, foreign), GIVEN_TIME),
        (kill_supervisor, (ended, foreign, absent), GIVEN_TIME),
        (kill_supervisor, (of_another_machine, nothing, nothing), GIVEN_TIME),
        (kill_supervisor, (given_away, nothing, given_away), GIVEN_TIME),
        (kill_supervisor, (a_folder, a_folder, a_folder), GIVEN_TIME),
        (kill_supervisor, (mistyped, mistyped, mistyped), AT_ONCE),
    ],
    ids=lambda value: "-".join(
        getattr(v, "__name__", str(v)) for v in (value if isinstance(value, tuple) else (value,))
    ),
)
def test_stop_of_a_job_with_damaged_files(
    scene: Scene, before: Callable[[Job], None], how: tuple[Damage, Damage, Damage], words: tuple[str, ...]
) -> None:
    check_stop(scene, before, how, words, random.Random(3), looks=words == GIVEN_TIME)


@pytest.mark.soak
def test_a_hundred_stops_leave_no_process_and_say_nothing_false(scene: Scene) -> None:
    chance = random.Random(100)
    for number in range(100):
        before = chance.choice([keep, halt_supervisor, kill_supervisor])
        how = chance.choice(STATUS), chance.choice(RECORD), chance.choice(RANKS)
        words = chance.choice([AT_ONCE, FORCED, GIVEN_TIME])
        print(number, before.__name__, [part.__name__ for part in how], words, flush=True)
        check_stop(scene, before, how, words, chance, looks=chance.random() < 0.2)
