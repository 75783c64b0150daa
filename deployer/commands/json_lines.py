"""A job's log as lines of JSON on stdout, for a script."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO

from deployer import terminal
from deployer.agent.host.layout import LogName
from deployer.launch.lines import LineStream
from deployer.launch.logview import LogView


def json_view(*, launcher: bool) -> JsonView:
    nowhere = io.BytesIO()
    return JsonView(nowhere, nowhere, terminal=False, bare=True, launcher=launcher, escapes=False)


@dataclass
class JsonView(LogView):
    """Prints each complete line with its source. `rank` is null if no rank wrote the line; `file` names its file."""

    def out_of(self, file: str, name: LogName | None) -> BinaryIO:
        role, node = (name.group.role, name.group.node) if name is not None else (None, None)
        rank, attempt = (name.rank, name.attempt) if name is not None else (None, None)
        whose = {"rank": rank, "role": role, "node": node, "attempt": attempt, "file": file}
        return LineStream(lambda line: terminal.say_json({**whose, "text": line}, indent=None))
