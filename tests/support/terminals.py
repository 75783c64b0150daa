"""What programs write to a terminal, and whether it could drive one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.limits import HANG_S

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\rback\x7f\ud800\nError: forged\nhint: run me\n  in forged"
"""Text that sets a title, clears the screen, turns text around, and begins lines as if they were ours."""


def on_terminal(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> bytes:
    """What a program writes to a terminal, stdout and stderr alike."""
    ours, theirs = os.openpty()
    environment = {**env, "TERM": "xterm-256color"}
    program = subprocess.Popen(argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as stream:  # EIO: the program has ended
        while data := stream.read(1 << 16):
            output += data
    program.wait(HANG_S)
    return output


def assert_tame(output: bytes) -> None:
    """Nothing but lines of text and colours, none of them forged, and no stack trace."""
    text = re.sub(r"\x1b\[[\d;]*m", "", output.decode().replace("\r\n", "\n"))
    assert not re.search("[^\n\t\x20-\x7e\xa0-\u200d\u2010-\u2027\u2030-\u2065\u2070-\uffff]", text), ascii(text)
    assert not re.search("^(Error: forged|hint: run me|  in forged)", text, re.MULTILINE), ascii(text)
    assert "Traceback" not in text
