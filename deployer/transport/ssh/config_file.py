"""The ssh_config file: which one is read, and the host names in it. Only `ssh -G` decides what they mean."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator

from deployer.agent.host.files import read_whole

CONFIG_ENV = "TORCHFERRY_SSH_CONFIG"
"""Names an ssh_config to use instead of ~/.ssh/config, like `ssh -F`."""
MOST_BYTES = 1 << 20
MOST_FILES = 100


def chosen_config(config_file: str | None) -> str | None:
    """The ssh_config to use instead of the user's own; None: the user's own."""
    return config_file or os.environ.get(CONFIG_ENV) or None


def host_aliases() -> list[str]:
    """Every name after `Host` without a wildcard, in the files' order. An unreadable file counts as empty."""
    left = [os.path.expanduser(chosen_config(None) or "~/.ssh/config")]  # noqa: PTH111 - Path's own raises RuntimeError
    names: dict[str, None] = {}
    seen: set[str] = set()
    while left and len(seen) < MOST_FILES:
        path = left.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for keyword, words in _lines(path):
            if keyword == "host":
                names |= dict.fromkeys(word for word in words if not set("*?!") & set(word))
            else:
                left += [found for word in words for found in _included(word)]
    return list(names)


def _lines(path: str) -> Iterator[tuple[str, list[str]]]:
    """The words of each line that begins with `Host` or `Include`."""
    try:
        text = read_whole(path, MOST_BYTES).decode("utf-8", "surrogateescape")
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        match = re.match(r"(?i)\s*(host|include)(?:\s*=\s*|\s+)(.*)", line)
        if match:
            try:
                yield match[1].lower(), shlex.split(match[2], comments=True)
            except ValueError:  # an unclosed quote
                continue


def _included(pattern: str) -> list[str]:
    path = os.path.expanduser(pattern)  # noqa: PTH111
    return sorted(glob.glob(path if path.startswith("/") else os.path.expanduser(f"~/.ssh/{path}")))  # noqa: PTH111, PTH207
