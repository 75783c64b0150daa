"""Another account that works against a login, at every moment of it: nothing of theirs is run or used."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from deployer.agent.guard import OURS
from deployer.agent.loader import is_intact
from deployer.connection.command import agent_hash, agent_sources, build_command, build_word
from deployer.connection.link import _agent_frames
from tests.support.accounts import MALLORY, ROOT_ONLY, VICTIM, public_folder, staying
from tests.support.limits import HANG_S

PYTHON = Path("/usr/bin/python3")
pytestmark = [ROOT_ONLY, pytest.mark.skipif(not PYTHON.exists(), reason="no Python that other users can run")]
NONCE = "0123456789abcdef" * 2


def log_in(root: Path) -> dict[str, object]:
    """What the agent answers to a login of the victim's."""
    word = build_word({"nonce": NONCE, "agent": agent_hash(), "root": str(root)})
    done = subprocess.run(
        build_command(word),
        shell=True,
        input=_agent_frames(),
        capture_output=True,
        user=VICTIM,
        group=VICTIM,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        timeout=HANG_S,
    )
    assert NONCE.encode() in done.stdout, done.stderr
    answer: dict[str, object] = {}
    rest = done.stdout.split(NONCE.encode(), 1)[1]
    while rest:
        head_size, body_size = (int.from_bytes(rest[i : i + 4], "big") for i in (0, 4))
        answer.update(json.loads(rest[8 : 8 + head_size]))
        rest = rest[8 + head_size + body_size :]
    return answer


def evil(home: Path, pwned: Path) -> None:
    """An agent with all modules, each of which leaves a sign when it is run by somebody else than its author."""
    line = f"import os\nif os.getuid() == {VICTIM}: open({str(pwned)!r}, 'a').write(__name__)\n"
    for path in agent_sources():
        module = home / "agent" / path
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(line)


def arm(ready: Path, pwned: Path) -> None:
    """What another account has at hand: a folder for each of a root's."""
    os.umask(0)
    evil(ready / "agent" / agent_hash(), pwned)
    for name in OURS:
        (ready / name).mkdir(exist_ok=True)


def attack(root: Path, ready: Path, moves: random.Random) -> None:
    """Until it is killed: what another account can do to a root whose path and agent it knows."""
    public = root.parent
    others = [name for name in OURS if name != "agent"]
    time.sleep(moves.random() * 0.4)  # before, in the middle of or after what the login does
    while True:
        name, other = moves.choice(OURS), moves.choice(others)
        tries = [
            lambda: root.mkdir(0o777),
            lambda: root.symlink_to(ready),
            lambda: root.rename(public / f"aside-{moves.random()}"),
            lambda n=name: (root / n).symlink_to(ready / n),
            lambda: shutil.copytree(ready / "agent", root / "agent"),
            lambda n=other: (root / n).mkdir(0o777),
            lambda n=name: (root / n).rename(public / f"aside-{moves.random()}"),
            lambda: shutil.copytree(ready / "agent" / agent_hash(), root / "agent" / agent_hash()),
        ]
        for act in moves.sample(tries, 3):
            with suppress(OSError, shutil.Error):
                act()


def race(kind: str, seed: int) -> str:
    """One login beside an attack; how it came out. Nothing foreign may be used, whoever is first."""
    moves = random.Random(seed)
    with public_folder(0o777 if kind == "open parent" else 0o1777) as public:
        root = public / "root"
        if kind == "shared root":
            root.mkdir()
            root.chmod(0o1777)
            os.chown(root, VICTIM, VICTIM)
        (public / "pwned").touch()
        (public / "pwned").chmod(0o666)
        if moves.random() < 0.3:
            log_in(root)  # an agent of ours is there already
        ready, pwned = public / "ready", public / "pwned"
        with staying(MALLORY, lambda: arm(ready, pwned), lambda: attack(root, ready, moves)):
            answer = log_in(root)
        assert pwned.read_text() == ""
        if "hello" not in answer:
            refusal = answer["refused"]
            assert isinstance(refusal, dict)
            assert "user" in refusal["message"] or "Not a directory" in refusal["message"], refusal
            return "refused"
        assert kind != "open parent"
        assert not root.is_symlink() and root.stat().st_uid == VICTIM
        there = {path.name: path.lstat().st_uid for path in root.iterdir() if path.name in OURS}
        assert set(there.values()) == {VICTIM}
        assert is_intact(str(root / "agent" / agent_hash()))
        return "used"


KINDS = ("missing root", "shared root", "open parent")


def test_no_race_runs_what_another_account_planted() -> None:
    outcomes = Counter((kind, race(kind, seed)) for seed in range(6) for kind in KINDS)
    assert outcomes["open parent", "refused"] == 6


@pytest.mark.soak
def test_no_race_of_two_hundred_runs_what_another_account_planted() -> None:
    outcomes = Counter((KINDS[seed % 3], race(KINDS[seed % 3], seed)) for seed in range(200))
    print(outcomes)
    assert {outcome for _, outcome in outcomes} == {"used", "refused"}
