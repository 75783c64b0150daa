"""The programs that the simulated host can run, by the words of their command."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.world.linux import calls, process_calls
from tests.world.linux.calls import kernel, this
from tests.world.linux.imports import Package
from tests.world.linux.inodes import refuse
from tests.world.linux.modules import MODULES

DEPLOYER = Path(__file__).resolve().parents[2] / "deployer"
HASH = "0123456789abcdef0123"
HOME = f"/opt/{HASH}"
"""Where the agent lies, as a login has put it there."""


def _word(message: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(message).encode()).decode()


SHIPPED = Package(
    DEPLOYER,
    "deployer",
    place=f"{HOME}/deployer",
    instead={
        "deployer.agent.host.processes": {"start_copy": process_calls.fork_run},
        "deployer.agent.rank": {"_start_copy": process_calls.fork_run},
        "deployer.connection.command": {
            "agent_hash": lambda: HASH,
            "agent_sources": dict,
            "build_word": _word,
            "build_command": lambda word: word,
        },
    },
)
OS, TIME, SIGNAL = MODULES["os"], MODULES["time"], MODULES["signal"]

Body = Callable[[], None]
OTHERS: list[Callable[[list[str]], Body | None]] = []
"""Who else knows programs, by their words."""


def body_of(argv: list[str], env: dict[str, str], cwd: str) -> Body:
    """What a process with these words does. ENOENT for no program."""
    for find in OTHERS:
        if (body := find(argv)) is not None:
            return body
    name = argv[0].rsplit("/", 1)[-1]
    if name.startswith("python"):
        return in_python(_python(argv))
    if name == "nvidia-smi":
        return lambda: nvidia_smi(argv)
    if name in JOBS:
        return lambda: JOBS[name](argv[1:])
    raise refuse(errno.ENOENT, argv[0])


def in_python(body: Body) -> Body:
    def run() -> None:
        this().begin_python()
        body()

    return run


def _python(argv: list[str]) -> Body:
    if "-c" in argv:
        at = argv.index("-c")
        module, args = argv[at + 5], argv[at + 6 :]
        return lambda: SHIPPED.load(module).main(*args)
    script = next(word for word in argv[1:] if word.endswith(".py"))
    rest = argv[argv.index(script) + 1 :]
    if script.endswith("/checkpy.py"):
        return lambda: check_python(argv[0])
    if script.endswith("/rank.py"):
        return lambda: run_rank(rest)
    raise refuse(errno.ENOENT, script)


def check_python(path: str) -> None:
    """As checkpy.py: the interpreter has everything."""
    while calls.read(0, 1 << 16):
        pass
    answer = {"executable": path, "version": "3.11.7", "python_fits": True, "unmet": [], "folders": [], "found": {}}
    calls.write(1, json.dumps(answer).encode() + b"\n")


def run_rank(words: list[str]) -> None:
    code = SHIPPED.load("deployer.agent.rank").main(words)
    raise SystemExit(code)


def nvidia_smi(argv: list[str]) -> None:
    """A table of the host's GPUs and who computes on them; see World.gpus."""
    state = kernel().gpus  # type: ignore[attr-defined]
    fields = next(word for word in argv if word.startswith("--query"))
    calls.write(1, state.table(fields).encode())


# --- the jobs' programs -----------------------------------------------------------------------------------------------


def _sleep(words: list[str]) -> None:
    TIME.sleep(float(words[0]))


def _exit(words: list[str]) -> None:
    """exit CODE [AFTER_S]: says so."""
    say("begins")
    if len(words) > 1:
        TIME.sleep(float(words[1]))
    say(f"ends with {words[0]}")
    raise SystemExit(int(words[0]))


def _stubborn(words: list[str]) -> None:
    """Hears no TERM."""
    SIGNAL.signal(signal.SIGTERM, signal.SIG_IGN)
    say("begins")
    TIME.sleep(float(words[0]))


def _lingers(words: list[str]) -> None:
    SIGNAL.signal(signal.SIGTERM, signal.SIG_IGN)
    TIME.sleep(float(words[0]))


def _orderly(words: list[str]) -> None:
    """Ends well when it is told to."""

    def stop(number: int, frame: Any) -> None:
        say("stops")
        raise SystemExit(0)

    SIGNAL.signal(signal.SIGTERM, stop)
    say("begins")
    TIME.sleep(float(words[0]))


def _forks(words: list[str]) -> None:
    """forks N S WHAT: leaves N of CHILDREN behind (`mixed`: of each in turn) that live for S seconds, in sessions of
    their own."""
    say("begins")
    for number in range(int(words[0])):
        what = CHILDREN[number % len(CHILDREN)] if words[2] == "mixed" else words[2]
        MODULES["subprocess"].Popen([what, words[1]], start_new_session=True)
    TIME.sleep(0.1)
    say("ends")


def _differs(words: list[str]) -> None:
    """Rank N ends with N + 1, the last one first."""
    rank, size = int(this().env.get("RANK", "0")), int(this().env.get("WORLD_SIZE", "1"))
    say("begins")
    TIME.sleep(0.15 * (size - rank))
    raise SystemExit(rank + 1)


def _uneven(words: list[str]) -> None:
    """Rank 0 fails, and the others hear no TERM."""
    say("begins")
    if this().env.get("RANK", "0") == "0":
        raise SystemExit(3)
    SIGNAL.signal(signal.SIGTERM, signal.SIG_IGN)
    TIME.sleep(float(words[0]))


def _dies(words: list[str]) -> None:
    """Of a signal."""
    say("begins")
    process_calls.kill(this().pid, int(words[0]))


def _talks(words: list[str]) -> None:
    """talks LINES EVERY_S"""
    for number in range(int(words[0])):
        say(f"line {number} " + "x" * kernel().chance.randrange(100))
        TIME.sleep(float(words[1]))


def say(text: str) -> None:
    calls.write(1, text.encode() + b"\n")


def launcher(words: list[str]) -> None:
    """As torchrun: `launcher N PROGRAM…` starts N ranks under the wrapper, ends with 1 when one fails, and ends the
    others then."""
    count, program = int(words[0]), words[1:]
    popen = MODULES["subprocess"].Popen
    wrapper = [MODULES["sys"].executable, f"{HOME}/deployer/agent/rank.py", "--exec", *program]
    told: list[int] = []
    SIGNAL.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    ranks = []
    for number in range(count):
        env = {**this().env, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
        ranks.append(popen(wrapper, env=env))
    failed = False
    while any(rank.poll() is None for rank in ranks) and not failed and not told:
        TIME.sleep(0.1)
        failed = any(rank.returncode for rank in ranks)
    for rank in ranks:
        rank.terminate()
    ends = TIME.monotonic() + 30
    for rank in ranks:
        while rank.poll() is None and TIME.monotonic() < ends:
            TIME.sleep(0.1)
        rank.kill()
        rank.wait()
    failed = failed or any(rank.returncode for rank in ranks)
    raise SystemExit(1 if failed or told else 0)


JOBS: dict[str, Callable[[list[str]], None]] = {
    "sleep": _sleep,
    "lingers": _lingers,
    "exit": _exit,
    "stubborn": _stubborn,
    "orderly": _orderly,
    "forks": _forks,
    "differs": _differs,
    "uneven": _uneven,
    "dies": _dies,
    "talks": _talks,
    "launcher": launcher,
}

CHILDREN = ("sleep", "lingers")
"""What other programs start: nobody asks how it ends."""

__all__ = ["OS", "SHIPPED", "body_of", "os"]
