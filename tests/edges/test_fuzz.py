"""Every file and message that somebody could have damaged, through every command: nothing is believed, nothing breaks.

The commands run in this process, by click's runner; the hosts' agents are the real ones (see warm.py). What is asked of
each command: no trace, a documented exit code, printable lines, the rows of all other jobs as they were, and about the
damaged job no word that its processes prove wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from deployer import cli
from deployer.agent.job.status import FINAL
from deployer.connection.command import agent_hash
from tests.edges.scene import DAMAGES, ENDED, FAR, RUNS, Damage, Scene, absent, deep, end_scene, huge, make_scene
from tests.edges.warm import Warm
from tests.support.ferry import Ferry
from tests.support.limits import patient
from tests.support.terminals import assert_tame

CODES = {0, 1, 2, 3, 75, 124, 125, 130, 143}
"""The documented ones, and that of the job that failed."""
HANGS_S = patient(90)
WORDS = ("Traceback", "Torchferry failed", "the agent failed", "failed itself", "Error 0")


LEAST = 50
"""So many commands are tried however busy the machine is."""


class Said(NamedTuple):
    code: int
    out: str
    err: str


@click.command()
def entry() -> None:
    cli.main()


class Hang(BaseException):
    """A command does not end."""


def run_here(*words: str) -> Said:
    """A command line in this process."""
    before, sys.argv = sys.argv, ["torchferry", *words]
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_S)
    try:
        done = CliRunner().invoke(entry, [])
    finally:
        signal.alarm(0)
        sys.argv = before
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.exit_code, done.stdout, done.stderr)


def _hangs(number: int, frame: Any) -> None:
    raise Hang


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    found = Warm(tmp_path / "warm")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.py").write_text("print('a')\n")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)  # the host's python3 is what PATH says
    monkeypatch.setenv("PATH", f"{tmp_path}/warm/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield found
    found.close()


@pytest.fixture
def scene(tmp_path: Path, warm: Warm) -> Iterator[Scene]:
    found = make_scene(tmp_path, run_here)
    warm.settle()
    warm.load(found.root / "agent" / agent_hash())
    yield found
    end_scene(found)


# --- one command ------------------------------------------------------------------------------------------------------


def command(chance: random.Random, scene: Scene) -> tuple[str, ...]:
    job, ended = chance.choice((RUNS, *ENDED)), chance.choice(ENDED)
    as_json = chance.choice(((), ("--json",)))
    root = ("--remote-root", str(scene.root))
    home = ("--to", str(scene.state.parent / "home" / "pulled"))
    place = chance.choice(((), root))
    kinds: list[tuple[int, tuple[str, ...]]] = [
        (14, ("ps", *as_json)),
        (6, ("ps", *root, *as_json)),
        (12, ("status", job, *place, *as_json)),
        (4, ("status", FAR, *as_json)),
        (
            8,
            (
                "logs",
                job,
                *place,
                "--no-follow",
                *chance.choice(((), ("--tail", "2"), ("--since", "1h"), ("--grep", "s"))),
            ),
        ),
        (6, ("pull", job, *place, *home, *as_json)),
        (5, ("stop", ended, *place, *as_json)),
        (4, ("resume", RUNS, *place, "--detach")),
        (4, ("resume", ended, *place, "--detach", "no.such=1")),
        (6, ("gc", *root, "--dry-run", *chance.choice(((), ("--older-than", "0s"))), *as_json)),
        (2, ("gc", *root, "--yes", *as_json)),
        (2, ("gpus", *root, *as_json)),
        (1, ("doctor", *root, *as_json)),
        (4, ("exec", job, *place, "--", "true")),
        (4, ("run", *root, "--dry-run=remote", *as_json, "--", "true")),
    ]
    return chance.choices([words for _, words in kinds], [weight for weight, _ in kinds])[0]


def check(said: Said, words: tuple[str, ...]) -> None:
    assert said.code in CODES, said
    assert not [word for word in WORDS if word in said.out + said.err], said
    assert_tame((said.out + said.err).encode("utf-8", "surrogateescape"))


def check_rows(said: Said, before: dict[str, Any], harmed: set[str], *, is_gone: bool) -> None:
    """All rows of others are what they were; what runs is never said to have ended, and the other way round."""
    rows = {row["id"]: row for row in json.loads(said.out)}
    lost = set(before) - set(rows)
    if lost == {FAR} <= harmed:  # of a host that does not tell only a damaged note is left, or none
        assert "is damaged" in said.err or is_gone, said.err
    else:
        assert not lost, (lost, said.err)
    for job_id, row in before.items():
        if job_id in lost:
            continue
        now = rows[job_id]
        if job_id not in harmed:
            assert {**now, "seen_at": "", "age_s": 0} == {**row, "seen_at": "", "age_s": 0}
        elif job_id == RUNS:
            assert now["state"] == "running", (now, said.err)
        elif job_id in ENDED:
            assert now["state"] in FINAL, (now, said.err)


def told(said: Said, words: tuple[str, ...], harmed: set[str]) -> None:
    """What `status` and `stop` say agrees with the processes, whatever the files say."""
    if words[0] == "status" and said.code == 0:
        state = json.loads(said.out)["state"] if "--json" in words else said.out.split("state", 1)[1].split()[0]
        assert (state.split("(")[0] in FINAL) == (words[1] != RUNS), said
    if words[0] == "resume":
        assert said.code in (2, 125), said
        found = "was launched from here" not in said.err
        assert words[1] != RUNS or not found or "is still running" in said.err, said
    if words[0] == "stop" and said.code == 0:
        assert "had ended already" in said.err or "gone" in said.err or "[" in said.out, said


def harmed_by(paths: list[Path]) -> set[str]:
    """The jobs whose own files these are; the client's notes change nothing of what a host says that can be asked."""
    named = {part for path in paths for part in (*path.parts, path.stem) if part in (RUNS, *ENDED, FAR)}
    return named | {FAR for path in paths if path.parent.name == "hosts"}


def targets(scene: Scene) -> list[Path]:
    """Files to damage, those that say the most as often as all others together."""
    notes = [path for path in scene.kept if path.suffix in (".json", ".jsonl", ".yaml") or path.parent.name in FOLDERS]
    return [*scene.kept, *notes * (len(scene.kept) // len(notes) + 1)]


FOLDERS = ("trees", "packs", "spare", "leases")


def fuzz_files(scene: Scene, warm: Warm, run: Callable[..., Said], numbers: range, until: float) -> int:
    """Commands over damaged files, one or two at a time; how many there were."""
    before = {row["id"]: row for row in json.loads(run("ps", "--json").out)}
    paths = targets(scene)
    for number in numbers:
        if time.monotonic() > until and number - numbers.start >= LEAST:
            return number - numbers.start
        chance = random.Random(number)
        chosen = chance.sample(paths, chance.choice((1, 1, 1, 2)))
        chosen = list(dict.fromkeys(chosen))
        how = [_fitting(path, chance) for path in chosen]
        words = command(chance, scene)
        for path, damage in zip(chosen, how, strict=True):
            scene.damage(path, damage, chance)
        what = [number, [(str(p), d.__name__) for p, d in zip(chosen, how, strict=True)], words]
        try:
            said = run(*words)
            warm.settle()
            check(said, words)
            if words[:1] == ("ps",) and "--json" in words:
                rows = {k: v for k, v in before.items() if words[1] != "--remote-root" or k != FAR}
                check_rows(said, rows, harmed_by(chosen), is_gone=absent in how)
            told(said, words, harmed_by(chosen))
        except BaseException as error:
            raise AssertionError(what) from error
        scene.restore()
    return len(numbers)


def _fitting(path: Path, chance: random.Random) -> Damage:
    """A damage that makes sense: what a log holds is nobody's to judge."""
    found = chance.choice(DAMAGES)
    while path.suffix == ".log" and found in (huge, deep):
        found = chance.choice(DAMAGES)
    return found


def fuzz_messages(scene: Scene, warm: Warm, run: Callable[..., Said], numbers: range, until: float) -> int:
    """Commands of which one message comes damaged, from the host or to it."""
    for number in numbers:
        if time.monotonic() > until and number - numbers.start >= LEAST:
            return number - numbers.start
        chance = random.Random(number)
        words = command(chance, scene)
        warm.lie(number, "" if chance.random() < 0.67 else "request")
        try:
            said = run(*words)
            warm.lie(None)
            warm.settle(timeout_s=2.0, ends=True)
            check(said, words)
        except BaseException as error:
            raise AssertionError([number, words]) from error
        scene.restore()
    return len(numbers)


# --- how much of it ---------------------------------------------------------------------------------------------------

SECONDS = patient(25)


def test_damaged_files_break_nothing_but_their_own_row(scene: Scene, warm: Warm) -> None:
    assert fuzz_files(scene, warm, run_here, range(20_000), time.monotonic() + SECONDS) >= LEAST


def test_damaged_messages_are_one_error(scene: Scene, warm: Warm) -> None:
    assert fuzz_messages(scene, warm, run_here, range(20_000), time.monotonic() + SECONDS) >= LEAST


@pytest.mark.soak
def test_twenty_thousand_commands(scene: Scene, warm: Warm) -> None:
    endless = float("inf")
    assert fuzz_files(scene, warm, run_here, range(100_000, 114_000), endless) == 14_000
    assert fuzz_messages(scene, warm, run_here, range(200_000, 206_000), endless) == 6_000


@pytest.mark.soak
def test_five_hundred_commands_as_processes(scene: Scene, warm: Warm, tmp_path: Path) -> None:
    """With the host's own python3 behind each."""
    user = Ferry(
        tmp_path / "project", scene.state, scene.root, env={"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"]}
    )

    def run(*words: str) -> Said:
        done = user.run(*words, timeout_s=HANGS_S)
        return Said(done.returncode, done.stdout.decode(), done.stderr.decode())

    assert fuzz_files(scene, warm, run, range(300_000, 300_500), float("inf")) == 500
