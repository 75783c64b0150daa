"""Every file and message that somebody could have damaged, through every command: nothing is believed, nothing breaks.

The commands run in this process, by click's runner; the hosts' agents are the real ones (see warm.py). What is asked of
each command: no trace, a documented exit code, printable lines, the rows of all other jobs as they were, and about the
damaged job no word that its processes prove wrong.

A program of its own, so that it can have few other processes beside it (each look at a job reads all of /proc):
`python -m tests.edges.fuzz {files,messages,processes} FIRST COUNT SECONDS` in an empty folder. A seed is one command.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.testing import CliRunner

from deployer import cli
from deployer.agent.job.status import FINAL
from deployer.connection.command import agent_hash
from tests.edges.scene import DAMAGES, ENDED, FAR, GPUS, RUNS, Damage, Scene, absent, deep, end_scene, huge, make_scene
from tests.edges.warm import ANSWER, FIRST, LATER, Warm
from tests.support.ferry import Ferry
from tests.support.limits import patient
from tests.support.smi import fake_smi
from tests.support.terminals import assert_tame

CODES = {0, 1, 2, 3, 74, 75, 124, 125, 130, 143}
"""The documented ones, and that of the job that failed."""
HANGS_S = patient(90)
TIMES = {"seen_at", "age_s", "ran_s", "queue"}
"""What may change by itself: a claim whose file was damaged is made again, and is younger then."""
WORDS = ("Traceback", "Torchferry failed", "the agent failed", "failed itself", "Error 0")


class Said(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Said]


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


# --- one command ------------------------------------------------------------------------------------------------------


def command(chance: random.Random, scene: Scene) -> tuple[str, ...]:
    live, ended = chance.choice((RUNS, *scene.live)), chance.choice(ENDED)
    job = chance.choice((live, *ENDED))
    as_json = chance.choice(((), ("--json",)))
    root = ("--remote-root", str(scene.root))
    home = ("--to", str(scene.state.parent / "home" / "pulled"))
    place = chance.choice(((), root))
    which = chance.choice(((), ("--tail", "2"), ("--since", "1h"), ("--grep", "s")))
    kinds: list[tuple[int, tuple[str, ...]]] = [
        (28, ("ps", *as_json)),
        (12, ("ps", *root, *as_json)),
        (24, ("status", job, *place, *as_json)),
        (8, ("status", FAR, *as_json)),
        (16, ("logs", job, *place, "--no-follow", *which)),
        (12, ("pull", job, *place, *home, *as_json)),
        (10, ("stop", ended, *place, *as_json)),
        (8, ("resume", live, *place, "--detach")),
        (8, ("resume", ended, *place, "--detach", "no.such=1")),
        (8, ("gc", *root, "--dry-run", *chance.choice(((), ("--older-than", "0s"))), *as_json)),
        (3, ("gc", *root, "--yes", *as_json)),
        (8, ("gpus", *root, *as_json)),
        (8, ("exec", job, *place, "--", "true")),
        (2, ("run", *root, "--gpus", "0", "--detach", "--", "true")),  # which is held
        # these start interpreters, which takes longer than a hundred others
        (1, ("run", *root, "--no-pull", "--python", sys.executable, "--", "true")),
        (1, ("doctor", *root, *as_json)),
        (1, ("run", *root, "--dry-run=remote", *as_json, "--", "true")),
    ]
    return chance.choices([words for _, words in kinds], [weight for weight, _ in kinds])[0]


def check(said: Said, words: tuple[str, ...]) -> None:
    assert said.code in CODES or words[0] == "exec", said  # whose code the host says
    assert not [word for word in WORDS if word in said.out + said.err], said
    assert_tame((said.out + said.err).encode("utf-8", "surrogateescape"))


def check_rows(said: Said, before: dict[str, Any], harmed: set[str], scene: Scene, *, is_gone: bool) -> None:
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
            other = {name: (now[name], was) for name, was in row.items() if now[name] != was}
            assert not other.keys() - TIMES, (job_id, other)
        elif job_id in scene.live:
            assert now["state"] not in FINAL, (now, said.err)
        elif job_id in ENDED:
            assert now["state"] in FINAL, (now, said.err)


def told(said: Said, words: tuple[str, ...], scene: Scene) -> None:
    """What `status` and `stop` say agrees with the processes, whatever the files say."""
    if words[0] == "status" and said.code == 0:
        state = json.loads(said.out)["state"] if "--json" in words else said.out.split("state", 1)[1].split()[0]
        assert (state.split("(")[0] in FINAL) == (words[1] in ENDED), said
    if words[0] == "resume":
        assert said.code in (2, 125), said
        found = "was launched from this machine" not in said.err
        is_here = words[1] in ENDED or not found or "is still " in said.err or "job.json" in said.err
        assert is_here, said
    if words[0] == "stop" and said.code == 0:
        assert "had ended already" in said.err or "gone" in said.err or "[" in said.out, said
    if words[0] == "gpus" and "--json" in words and said.code == 0:
        assert len(json.loads(said.out)["gpus"]) == 2, said


def harmed_by(paths: list[Path], scene: Scene) -> set[str]:
    """The jobs whose own files these are; the client's notes change nothing of what a host says that can be asked. A
    claim is the queue's."""
    named = {part for path in paths for part in (*path.parts, path.stem) if part in (*scene.jobs, FAR)}
    queue = (
        set(scene.live) if any(path.parent == scene.leases or path.parts[-2] in scene.live for path in paths) else ()
    )
    return named.union(queue, (FAR for path in paths if path.parent.name == "hosts"))


def targets(scene: Scene) -> list[Path]:
    """Files to damage, those that say the most as often as all others together."""
    all_of_them = sorted(scene.kept)
    notes = [path for path in all_of_them if path.suffix in (".json", ".jsonl", ".yaml") or path.parent.name in FOLDERS]
    return [*all_of_them, *notes * (len(scene.kept) // len(notes) + 1)]


FOLDERS = ("trees", "packs", "spare")


# --- many -------------------------------------------------------------------------------------------------------------


LEAST = 50


class Fuzz:
    """Commands by their seeds, over one scene."""

    def __init__(self, scene: Scene, warm: Warm, run: Run) -> None:
        self.scene, self.warm, self.run = scene, warm, run
        self.before = self._rows()
        self.paths = targets(scene)
        self.failed: list[int] = []

    def _rows(self) -> dict[str, Any]:
        return {row["id"]: row for row in json.loads(self.run("ps", "--json").out)}

    def files(self, seed: int, what: list[Any]) -> None:
        """A command over damaged files, one to three at a time."""
        scene, chance = self.scene, random.Random(seed)
        chosen = list(dict.fromkeys(chance.sample(self.paths, chance.choice((1, 1, 2, 3)))))
        claims = scene.claims()
        if claims and chance.random() < 0.06:
            chosen.append(chance.choice(claims))
        how = [_fitting(path, chance) for path in chosen]
        words = command(chance, scene)
        what += [[(str(path), damage.__name__) for path, damage in zip(chosen, how, strict=True)], words]
        for path, damage in zip(chosen, how, strict=True):
            scene.damage(path, damage, chance)
        said = self.run(*words)
        what.append(said)
        self.warm.settle()
        check(said, words)
        if words[:1] == ("ps",) and "--json" in words:
            rows = {k: v for k, v in self.before.items() if words[1] != "--remote-root" or k != FAR}
            check_rows(said, rows, harmed_by(chosen, scene), scene, is_gone=absent in how)
        told(said, words, scene)

    def messages(self, seed: int, what: list[Any]) -> None:
        """A command of which one message comes damaged, from the host or to it."""
        chance = random.Random(seed)
        words, which = command(chance, self.scene), chance.choice((ANSWER, ANSWER, FIRST, LATER))
        if words[0] == "run":  # a launch that says it sends more than it does is awaited by both ends
            which = ANSWER
        what += [words, which]
        self.warm.lie(seed, which)
        said = self.run(*words)
        what.append(said)
        self.warm.lie(None)
        self.warm.settle(timeout_s=2.0, ends=True)
        check(said, words)

    def many(self, one: Callable[[int, list[Any]], None], seeds: range, seconds: float) -> int:
        """How many there were in this time, at least LEAST; what fails is told and goes on."""
        until, number = time.monotonic() + seconds, 0
        for number, seed in enumerate(seeds, 1):
            if time.monotonic() > until and number > LEAST:
                number -= 1
                break
            what: list[Any] = [seed]
            try:
                one(seed, what)
                self.scene.restore()
                if number % 500 == 0:
                    self._check_scene()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                self.failed.append(seed)
                print(what, "".join(traceback.format_exception(error, limit=-3)), sep="\n", flush=True)
                self.scene.restore()
        self._check_scene()
        return number

    def _check_scene(self) -> None:
        """No command has changed what runs and what has ended."""
        now = {job_id: row["state"] for job_id, row in self._rows().items()}
        assert now == {job_id: row["state"] for job_id, row in self.before.items()}, now


def _fitting(path: Path, chance: random.Random) -> Damage:
    """A damage that makes sense: what a log holds is nobody's to judge."""
    found = chance.choice(DAMAGES)
    while path.suffix == ".log" and found in (huge, deep):
        found = chance.choice(DAMAGES)
    return found


def settle_in(place: Path) -> None:
    """This process is a client in this empty folder, with a host whose python3 is warm and which has two GPUs."""
    for name in ("project", "smi"):
        (place / name).mkdir()
    (place / "project" / "a.py").write_text("print('a')\n")
    fake_smi(place / "smi", gpus=GPUS)
    sys.prefix = sys.base_prefix  # the host's python3 is what PATH says
    os.chdir(place / "project")
    os.environ.update(
        PATH=f"{place}/warm/bin:{place}/smi:/usr/bin:/bin",
        HOME=str(place / "home"),
        TORCHFERRY_STATE_DIR=str(place / "state"),
        TORCHFERRY_LEASE_DIR=str(place / "leases"),
    )


def main(kind: str, first: int, count: int, seconds: float) -> int:
    place = Path.cwd()
    settle_in(place)
    warm = Warm(place / "warm")
    scene = make_scene(place, run_here)
    warm.settle()
    warm.load(scene.root / "agent" / agent_hash())
    try:
        used = os.times()
        run = run_here if kind != "processes" else _in_processes(place, scene)
        fuzz = Fuzz(scene, warm, run)
        served = warm.served
        done = fuzz.many(fuzz.messages if kind == "messages" else fuzz.files, range(first, first + count), seconds)
        assert kind == "processes" or warm.served - served > done / 4, "the agents were others"
        now = os.times()
        took = {"seconds": now.elapsed - used.elapsed, "of which here": sum(now[:2]) - sum(used[:2])}
        print(json.dumps({"kind": kind, "first": first, "commands": done, "failed": fuzz.failed, **took}))
        return 1 if fuzz.failed else 0
    finally:
        end_scene(scene)
        warm.close()


def _in_processes(place: Path, scene: Scene) -> Run:
    """With the host's own python3 behind each."""
    env = {"PATH": f"{place}/smi:/usr/bin:/bin", "HOME": os.environ["HOME"]}
    user = Ferry(place / "project", scene.state, scene.root, env=env)

    def run(*words: str) -> Said:
        done = user.run(*words, timeout_s=HANGS_S)
        return Said(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
