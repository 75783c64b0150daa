"""A copy of a configuration as ssh has read it: reading the copy does not run the user's commands (`Match exec`)
again."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

_PATHS = (
    "identityfile|certificatefile|identityagent|revokedhostkeys|pkcs11provider|securitykeyprovider|xauthlocation|setenv"
)
_LISTS = "userknownhostsfile|globalknownhostsfile"
_LEFT_OUT = r"\w*forward|permitremoteopen|remotecommand|localcommand|canonical\w*|control(path|master|persist)"
"""Settings that our connections never use or set themselves; ssh prints some of them in a form that it cannot read."""


def freeze(output: str, path: Path) -> bool:
    """Writes the output of `ssh -G` to a new file (0600) that has the same meaning for ssh. Returns whether ssh can
    read it."""
    text = "".join(f"{line}\n" for line in map(_line, output.splitlines()) if line)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    check = ["ssh", "-G", "-F", str(path), "--", "none"]
    return subprocess.run(check, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _line(line: str) -> str:
    """One line, with the quotes that `ssh -G` leaves out; "" for an unneeded line. The result applies to every host."""
    key, _, value = line.partition(" ")
    if key == "host" or re.fullmatch(_LEFT_OUT, key):
        return ""
    if re.fullmatch(_PATHS, key):
        return f'{key} "{value}"'
    if re.fullmatch(_LISTS, key):
        return f"{key} " + " ".join(f'"{part}"' for part in re.split(r" (?=[/~%$])", value))
    return line
