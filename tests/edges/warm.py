"""A `python3` of the host that is warm: each agent is a fork of one process that has loaded the standard library.

The client is the real one with its own local transport. What it starts finds this `python3` first on PATH: a shell
script that leaves the command's word in a folder, from where the warm process takes it, forks, opens the pipes of the
script as its own and runs the very same text: the real loader, which enters the agent of the root. After `load` that
agent's modules are there already, as its own loader reads them.

A `lie` may stand between the agent and the client: then another fork reads what the agent writes, and damages it.
This file is run by itself too, as the warm process: it imports nothing of this repository.
"""
# ruff: noqa: PTH102, PTH108, PTH110, PTH118, PTH123, PTH202, SIM115

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

SCRIPT = """#!/bin/sh
[ "$1$2$3$4$5" = -I-S-Xutf8-c ] || exec {python} "$@"
for word; do :; done
trap 'exit 0' TERM
exec 3<> {folder}/calls 4<> {folder}/never 5<&0 6>&1 7>&2
printf %s "$word" > {folder}/call.$$
echo $$ >&3
read -r _ <&4
"""


ANSWER, FIRST, LATER = "answer", "first", "later"
"""Which messages may be damaged: the agent's, the client's first request, what it sends later."""
BEGINS = "\ntry:\n    load("
"""What follows the loader in a command's word: a call of it, with a message."""


class Warm:
    """The warm process and its folder, whose `bin` is to come first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("calls", "never"):
            os.mkfifo(folder / name)
        script = folder / "bin" / "python3"
        script.write_text(SCRIPT.format(folder=folder, python=sys.executable))
        script.chmod(0o755)
        self._process = subprocess.Popen([sys.executable, "-I", "-S", "-X", "utf8", __file__, str(folder)], cwd="/")
        while not (folder / "up").exists():
            time.sleep(0.01)

    def load(self, home: Path) -> None:
        """The agent in this folder is loaded once for all."""
        (self.folder / "load").write_text(str(home))

    def lie(self, seed: int | None, which: str = ANSWER) -> None:
        """One message to or from the next agent comes damaged, by this seed; None: of no one."""
        note = self.folder / "lie"
        if seed is None:
            note.unlink(missing_ok=True)
        else:
            note.write_text(f"{seed} {which}")

    @property
    def served(self) -> int:
        """How many agents there have been."""
        return int((self.folder / "served").read_text() or 0)

    def settle(self, *, timeout_s: float = 60.0, ends: bool = False) -> None:
        """Returns once no agent is there any more; `ends` those that stay, as the end of a client's process would."""
        deadline = time.monotonic() + timeout_s
        while marks := list((self.folder / "agents").iterdir()):
            if time.monotonic() > deadline:
                assert ends, "an agent does not end"
                for mark in marks:
                    with suppress(OSError, ValueError):  # it has ended just now, or has only begun
                        os.kill(int(mark.read_text()), signal.SIGKILL)
            time.sleep(0.001)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


# --- the warm process -------------------------------------------------------------------------------------------------


def serve(folder: str) -> None:
    """Forks an agent for each call."""
    import base64
    import select  # noqa: F401
    import zlib

    served = 0
    compiled: dict[str, CodeType] = {}
    agents = os.path.join(folder, "agents")
    os.mkdir(agents)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    calls = os.open(os.path.join(folder, "calls"), os.O_RDWR)
    open(os.path.join(folder, "up"), "w").close()
    with open(calls, closefd=False) as lines:
        for line in lines:
            pid, path = line.strip(), os.path.join(folder, "call." + line.strip())
            text = zlib.decompress(base64.b64decode(open(path).read())).decode()
            loader, begin, message = text.rpartition(BEGINS)
            if loader not in compiled:
                compiled[loader] = compile(loader, "<string>", "exec")
            if os.path.exists(os.path.join(folder, "load")):
                _load(loader, open(os.path.join(folder, "load")).read())
                os.unlink(os.path.join(folder, "load"))
            mark = os.path.join(agents, pid)
            open(mark, "w").close()
            if os.fork() == 0:
                _be_agent(pid, compiled[loader], begin + message, mark, _lie_of(folder))
            served += 1
            with open(os.path.join(folder, "served"), "w") as f:
                f.write(str(served))
            _await_opened(mark)
            os.unlink(path)
            with suppress(OSError):  # its client has ended it
                os.kill(int(pid), signal.SIGTERM)


def _load(loader: str, home: str) -> None:
    """Imports all of an agent, by its own loader."""
    from importlib import import_module

    own: dict[str, Any] = {"__name__": "loader"}
    exec(loader, own)
    own["enter"](home)
    for folder, _, files in os.walk(os.path.join(home, "agent")):
        for file in files:
            path = os.path.relpath(os.path.join(folder, file), home)
            if path.endswith(".py") and file not in ("guard.py", "bytecode.py", "loader.py", "rank.py", "checkpy.py"):
                import_module(path[:-3].replace("/", ".").replace(".__init__", ""))
    gc.freeze()  # a collection in a fork would touch, and so copy, all of it


def _await_opened(mark: str) -> None:
    """The script may end once its pipes are open here."""
    with suppress(OSError):  # it has ended already
        while os.path.getsize(mark) == 0:
            time.sleep(0.0002)


def _lie_of(folder: str) -> list[str]:
    try:
        with open(os.path.join(folder, "lie")) as f:
            found = f.read().split(" ")
        os.unlink(os.path.join(folder, "lie"))  # who tries again hears the truth
    except OSError:
        return []
    return found


def _be_agent(pid: str, loader: CodeType, call: str, mark: str, lie: list[str]) -> None:
    """Runs a call's text as `python3 -c` would, on the pipes of the script; a process above it removes the mark."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, its, mode in ((0, 5, os.O_RDONLY), (1, 6, os.O_WRONLY), (2, 7, os.O_WRONLY)):
        own = os.open(f"/proc/{pid}/fd/{its}", mode)  # a redirection takes 0 to 2 for its while
        os.dup2(own, fd)
        os.close(own)
    with open(f"/proc/{pid}/environ", "rb") as f:
        given = dict(entry.split(b"=", 1) for entry in f.read().split(b"\0") if b"=" in entry)
    with open(mark, "w") as f:
        f.write("open")
    seed, which = (int(lie[0]), lie[1]) if lie else (0, "")
    if which == FIRST:
        call = _with_other_request(call, seed)
    elif which:
        _stand_between(0 if which == LATER else 1, seed)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environb.clear()
        os.environb.update(given)
        os.chdir(given.get(b"PWD", b"/"))
        sys.argv = ["-c"]
        try:
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(loader, names)
            exec(call, names)
        except SystemExit:
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    with open(mark, "w") as f:
        f.write(str(child))
    os.close(0)
    os.close(1)
    os.waitpid(child, 0)
    os.unlink(mark)
    os._exit(0)


def _stand_between(fd: int, seed: int) -> None:
    """Another process has the agent's stdin or stdout from now on, and the agent a pipe to it."""
    outer, pipe = os.dup(fd), os.pipe()
    ours, inner = (pipe[1], pipe[0]) if fd == 0 else pipe
    os.dup2(inner, fd)
    os.close(inner)
    if os.fork() == 0:
        for standard in range(3):
            os.close(standard)
        source, out, begin = (outer, ours, 0) if fd == 0 else (ours, outer, NONCE)
        _pass_on(source, out, seed, begin)
        os._exit(0)
    os.close(ours)
    os.close(outer)


def _with_other_request(call: str, seed: int) -> str:
    """The call with another first request: a value of it is of another type, or missing."""
    import ast
    import json
    import random

    constant = next(node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Constant))
    message = json.loads(constant.value)
    if "request" in message:
        message["request"] = _other_head(message["request"], random.Random(seed), from_client=True)
    return call.replace(repr(constant.value), repr(json.dumps(message)), 1)


NONCE = 32
FRAMING = ("id", "op", "payload", "ahead", "patch")
"""What says how much follows: who announces more than it sends is awaited, by right."""


def _pass_on(source: int, out: int, seed: int, begin: int) -> None:
    """Passes on what one end writes to the other, its first bytes as they are; one of the first messages damaged."""
    import json
    import random
    import struct

    chance = random.Random(seed)
    which, number = chance.choice((0, 0, 1, 1, 2, 3, 4)), 0

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = os.read(source, size - len(data))
            if not part:
                break
            data += part
        return data

    def write(data: bytes) -> None:
        try:
            while data:
                data = data[os.write(out, data) :]
        except OSError:
            pass  # the client has gone

    write(read(begin))
    while True:
        lengths = read(8)
        if len(lengths) < 8:
            break
        n, m = struct.unpack(">II", lengths)
        head, body = read(n), read(m)
        if number == which:
            how = chance.choice(("head", "head", "head", "head", "body", "bytes", "length", "cut", "again", "deep"))
            if how == "head":
                head = json.dumps(_other_head(json.loads(head), chance, from_client=not begin)).encode("ascii")
            elif how == "body" and body:
                body = _other_body(body, chance)
            elif how == "bytes":
                head = chance.randbytes(len(head))
            elif how == "deep":
                head = b"[" * chance.choice((40, 3000, 60000))
            elif how == "again":
                write(lengths + head + body)
            elif how == "cut":
                write((lengths + head + body)[: chance.randrange(8 + n + m)])
                break
            lengths = struct.pack(">II", len(head), len(body))
            if how == "length":
                lengths = chance.randbytes(8)
        write(lengths + head + body)
        number += 1
    os.close(out)
    while os.read(source, 1 << 16):  # the other end notices by itself that nobody is there
        pass


def _other_head(value: object, chance: object, *, from_client: bool) -> object:
    """A client's requests alone are other ones: without its grants and ends, an agent waits by right."""
    other = mistyped(value, chance)
    if not from_client:
        return other
    if not isinstance(value, dict) or not isinstance(other, dict) or "op" not in value:
        return value
    kept = {key: value[key] for key in FRAMING if key in value}
    return {**{key: found for key, found in other.items() if key not in FRAMING}, **kept}


def _other_body(body: bytes, chance: object) -> bytes:
    import json

    try:
        return json.dumps(mistyped(json.loads(body), chance)).encode("ascii")
    except ValueError:
        return chance.randbytes(len(body))  # type: ignore[attr-defined, no-any-return]


# --- JSON that is not what it was -------------------------------------------------------------------------------------


def mistyped(value: object, chance: object) -> object:
    """A JSON value with one value in it of another type or size, missing, or beside one more."""
    odd = (
        *("x", "", "\x1b[31m", "\ud800", "a\nb", "../..", "x" * 5000, "\0", 5, -1, 0, 1e99, 10**30, -(10**400)),
        *(float("nan"), float("inf"), True, None, [], [1], {}, {"a": {}}, [[]] * 50, nested(40), nested(500)),
    )
    pick = chance.choice  # type: ignore[attr-defined]
    if isinstance(value, dict) and value and pick((True, True, True, False)):
        key = pick(sorted(value))
        how = pick(("inside", "inside", "inside", "gone", "more"))
        if how == "gone":
            return {k: v for k, v in value.items() if k != key}
        if how == "more":
            return {**value, pick(("x", "id", "\x1b[31m", "state")): pick(odd)}
        return {**value, key: mistyped(value[key], chance)}
    if isinstance(value, list) and value and pick((True, True, False)):
        at = pick(range(len(value)))
        if pick((True, True, False)):
            return [*value[:at], mistyped(value[at], chance), *value[at + 1 :]]
        return [*value[:at], *value[at + 1 :]]
    return pick(odd)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


if __name__ == "__main__":
    serve(sys.argv[1])
