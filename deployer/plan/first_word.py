"""Checks a program's first word: a program that cannot start is reported here, with the correct words, and not on the
host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from deployer.agent.store.tree import FILE
from deployer.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATORS = ("&&", "||", ";", "|", "&", ">", ">>", "<", "2>&1")
_OF_THE_SHELL = (".", "alias", "cd", "eval", "exec", "export", "for", "if", "set", "source", "ulimit", "umask", "while")
_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


def check_first_word(argv: tuple[str, ...], *, modes: Mapping[str, str], project: Path) -> list[str]:
    """Raises UsageError if the words start no program. Returns warnings for what will hardly run. `modes`: path -> mode
    of the files that are sent."""
    first = argv[0]
    set_here = next((n for n, word in enumerate(argv) if not _ASSIGNMENT.fullmatch(word)), len(argv))
    if set_here:
        options = " ".join(f"--env {shlex.quote(word)}" for word in argv[:set_here])
        rest = shlex.join(argv[set_here:]) or "PROGRAM"
        raise UsageError(f"{first} sets a variable and starts no program", hint=f"{options} -- {rest}")
    path = os.path.normpath(first)
    is_local = "/" in first and path in modes
    if first.endswith(".py") and "/" not in first and (path in modes or not re.search(r"\s", first)):
        words = shlex.join(argv)
        raise UsageError(f"{first} is no program", hint=f"-- python {words}, or --torchrun --gpus 0,1 -- {words}")
    if first in _OF_THE_SHELL or (re.search(r"\s", first) and not is_local):
        what = f"{first} is the shell's own" if first in _OF_THE_SHELL else f"no program is named {first!r}"
        raise UsageError(what, hint=f"-- bash -c {shlex.quote(_as_typed(argv))}")
    if "/" not in first and path in modes and shutil.which(first) is None:
        raise UsageError(
            f"{first} is no program on the search path", hint=f"-- {shlex.join((f'./{first}', *argv[1:]))}"
        )
    if is_local and _ends_with_cr(project / path):
        raise UsageError(
            f"{first} has Windows line ends (CRLF), so its interpreter would not be found", hint=_without_cr(path)
        )
    if is_local and modes[path] == FILE:
        raise UsageError(f"{first} is not executable", hint=f"chmod +x {shlex.quote(path)}")
    script = os.path.normpath(argv[1]) if argv[1:] and os.path.basename(first) in _SHELLS else ""  # noqa: PTH119
    if script in modes and _ends_with_cr(project / script):
        return [
            f"{script} has Windows line ends (CRLF), which a shell takes for a part of the words: {_without_cr(script)}"
        ]
    return []


def _as_typed(argv: tuple[str, ...]) -> str:
    """The words as a shell's line; a first word with spaces is already such a line."""
    rest = (word if word in _OPERATORS else shlex.quote(word) for word in argv[1:])
    return " ".join((argv[0], *rest))


def _without_cr(path: str) -> str:
    return f"perl -pi -e 's/\\r$//' {shlex.quote(path)}"


def _ends_with_cr(path: Path) -> bool:
    """Whether a script's first line ends with a carriage return."""
    try:
        with path.open("rb") as file:
            return file.readline(4096).endswith(b"\r\n")
    except OSError:
        return False
