"""The only command line that is sent to a host: a constant text for /bin/sh, and one word with everything else."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from deployer.agent.host.layout import AGENT_DIR
from deployer.agent.loader import name_of
from deployer.errors import FerryError

MAX_WORD = 96 * 1024
"""Linux allows 128 KiB for one argument, and the login shell gets the whole command as one argument."""

_MODULE = re.compile(r"(\w+/)*\w+\.py", re.ASCII)  # no editor's copy beside it: the loader takes nothing else

# The only shell text that is sent. It contains no single quote, backslash, exclamation mark or newline: every login
# shell (fish and tcsh too) passes it on unchanged. The job's interpreter is data; this one only runs the agent. An
# interpreter that is too old exits with status 97. One that ends before the loader has begun (it cannot start, or is a
# script that fails) has printed why. In both cases the next one is tried. One that a signal ended is not tried again.
# `-X utf8`: names are bytes, and the host's locale must not decode them in another way than the client wrote them.
_SHELL = (
    "for p in python3 /usr/bin/python3 /usr/local/bin/python3 /opt/conda/bin/python3 "
    "python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 python; do "
    "if command -v $p >/dev/null 2>&1; then "
    '$p -I -S -X utf8 -c "import sys; sys.version_info < (3, 8) and sys.exit(97); '
    'import zlib, base64; exec(zlib.decompress(base64.b64decode(sys.argv[1])))" "$0"; '
    "r=$?; case $r in 0|98|99|1[3-9][0-9]|129|2[0-9][0-9]) exit $r;; "
    "97) echo $p is $($p --version 2>&1), and too old >&2;; "
    "*) echo $p ended with exit status $r >&2;; esac; fi; done; "
    "echo torchferry-no-python >&2; exit 127"
)


_START = """\
try:
    load(json.loads({message!r}))
except Exception:
    sys.excepthook(*sys.exc_info())
    os._exit(98)  # it had begun: no other interpreter is to begin again
"""


def build_command(word: str) -> str:
    """The exec's command line: /bin/sh, the constant text, and the word; the same for every login shell."""
    return f"/bin/sh -c '{_SHELL}' {word}"


def build_word(message: dict[str, Any]) -> str:
    """Loader and message as one word of [A-Za-z0-9+/=]."""
    source = f"{_loader_source()}\n{_START.format(message=json.dumps(message))}"
    return base64.b64encode(zlib.compress(source.encode("utf-8"), 9)).decode("ascii")


@cache
def _loader_source() -> str:
    """The loader, after the modules whose functions it calls: it runs before any of them can be imported."""
    parts = ("guard.py", "bytecode.py", "loader.py")
    return "\n".join(Path(AGENT_DIR, part).read_text(encoding="utf-8") for part in parts)


@cache
def agent_sources() -> dict[str, str]:
    """Path below the agent's folder, with `/`, -> source, of every module of the agent package."""
    sources = {}
    for folder, folders, files in os.walk(AGENT_DIR):
        folders[:] = [name for name in folders if name != "__pycache__"]
        below = "" if folder == AGENT_DIR else os.path.relpath(folder, AGENT_DIR).replace(os.sep, "/") + "/"
        for file in files:
            if _MODULE.fullmatch(below + file):
                sources[below + file] = _read_module(Path(folder, file))
    return sources


def _read_module(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise FerryError(f"Torchferry's own {path} cannot be read: {reason}", hint="install Torchferry anew") from None


@cache
def agent_hash() -> str:
    """The name of this client's agent: any change of its files gives another name."""
    return name_of({path: source.encode("utf-8") for path, source in agent_sources().items()})
