"""Real shells on a terminal, and what they make of a line when somebody presses TAB."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.jobs import wait_for
from tests.support.limits import HANG_S

TAB = "\t"
EVERY = "\x18a"
"""Ctrl-X a: writes every completion into the line."""
_TELL = "\x18l"
"""Ctrl-X l: tells the line and empties it."""

_BASH = """\
PS1='ready> '
bind 'set bell-style none'
bind 'set enable-bracketed-paste off'
bind '"\\C-xa": insert-completions'
_tell() { printf '%s\\n' "$READLINE_LINE" >> TOLD; READLINE_LINE=; READLINE_POINT=0; }
bind -x '"\\C-xl": _tell'
source SCRIPT
"""

_ZSH = """\
PS1='ready> '
unsetopt beep
unset zle_bracketed_paste
autoload -Uz compinit && compinit -u -d DUMP
zstyle ':completion:all-matches::::' completer _all_matches _complete
zstyle ':completion:all-matches:*' insert true
zle -C all-matches complete-word _generic
bindkey '^Xa' all-matches
_tell() { print -r -- "$BUFFER" >> TOLD; BUFFER=; }
zle -N _tell
bindkey '^Xl' _tell
source SCRIPT
"""


class Shell:
    """One that reads its lines from here."""

    def __init__(self, ours: int, told: Path) -> None:
        self._ours, self._told = ours, told
        self.screen = b""
        """All that it has drawn."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with suppress(OSError):  # EIO: the shell has ended
            while data := os.read(self._ours, 1 << 16):
                self.screen += data

    def becomes(self, line: str, keys: str = TAB) -> str:
        """What the line is after these keys."""
        lines = self._lines()
        os.write(self._ours, f"{line}{keys}{_TELL}".encode())
        wait_for(lambda: len(self._lines()) > len(lines))
        return self._lines()[-1]

    def offers(self, line: str) -> list[str]:
        """The words that may stand at the end of the line."""
        before, _, begun = line.rpartition(" ")
        words = shlex.split(self.becomes(line, EVERY).removeprefix(before))
        return [] if words == [begun] else words

    def _lines(self) -> list[str]:
        return self._told.read_text().split("\n")[:-1]


@contextmanager
def shell(name: str, script: str, folder: Path, env: Mapping[str, str], cwd: Path) -> Iterator[Shell]:
    """A bash or a zsh that has read the script."""
    for file, text in {"script": script, "told": ""}.items():
        (folder / file).write_text(text)
    words = {"TOLD": folder / "told", "SCRIPT": folder / "script", "DUMP": folder / "dump"}
    settings = {"bash": _BASH, "zsh": _ZSH}[name]
    for word, path in words.items():
        settings = settings.replace(word, shlex.quote(str(path)))
    (folder / ".zshrc").write_text(settings)
    argv = {"bash": ["bash", "--noprofile", "--rcfile", str(folder / ".zshrc"), "-i"], "zsh": ["zsh", "-i"]}[name]
    ours, theirs = os.openpty()
    environment = {**env, "TERM": "xterm", "COLUMNS": "200", "LINES": "60", "ZDOTDIR": str(folder), "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [str(shutil.which(name)), *argv[1:]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    running = Shell(ours, folder / "told")
    try:
        wait_for(lambda: b"ready> " in running.screen)
        yield running
    finally:
        process.kill()
        process.wait(HANG_S)
        os.close(ours)
