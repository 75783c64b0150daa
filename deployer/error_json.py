"""An error as JSON for a script."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from typing import Any

from deployer.errors import FerryError
from deployer.terminal import as_invoked

_COMMAND_AT_END = re.compile(
    r"(?:did you mean|go on with|pull them with): (?:\S+ )?(?:\S+/)?(?:deploy\.py|torchferry) ([^…]+)$"
)


def error_as_json(error: FerryError) -> dict[str, Any]:
    """The error as JSON for a script. If the hint ends with a command, `next` contains that command too."""
    told = {**error.as_json(), "hint": as_invoked(error.hint) or None}
    if told["next"] is None and (line := _COMMAND_AT_END.search(error.hint)) is not None:
        with suppress(ValueError):
            told["next"] = shlex.split(line[1])
    return told
