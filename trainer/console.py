"""Makes the trainer's output safe for a terminal: names and values from data files, model folders and checkpoints are
untrusted text. Imports no torch.

The deployer has a copy in `deployer/printable.py`, because the trainer must work without the deployer.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import logging
    from types import TracebackType

# characters that control a terminal (C0, DEL, C1), break a line or change the text's direction; lone surrogates
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")


def shown(value: object) -> str:
    """A value as one printable line: control characters, line breaks and bidirectional marks become visible escapes."""
    return _HIDDEN.sub(lambda match: ascii(match.group())[1:-1], str(value))


def printable(text: str) -> str:
    """A text of several lines, each made printable; tabs stay."""
    return "\n".join("\t".join(map(shown, line.split("\t"))) for line in text.split("\n"))


def write_line(stream: TextIO, text: str) -> None:
    """Writes a line in one piece: the ranks share the stream, and an unbuffered print would write the line break
    separately."""
    stream.write(f"{printable(text)}\n")
    stream.flush()


def write_error(text: str) -> None:
    """Prints a failing process's message. If stderr cannot be written (full disk, closed terminal), the process must
    still end as it would have."""
    try:
        write_line(sys.stderr, text)
    except (OSError, ValueError, AttributeError):  # it may be closed, or None
        sys.stderr = None  # else Python would flush it at exit, fail, and exit with 120


def write_json(value: object) -> None:
    """Prints a value on stdout as one line of JSON without raw control characters."""
    write_line(sys.stdout, json.dumps(value).replace("\x7f", "\\u007f"))


def tame_others() -> None:
    """Makes libraries' log records and warnings printable, and stack traces: they repeat values of files they read."""
    import logging
    import traceback
    import warnings

    make = logging.getLogRecordFactory()

    def record(*args: object, **more: object) -> logging.LogRecord:
        made = make(*args, **more)
        made.msg, made.args = printable(made.getMessage()).replace("\n", "\n    "), ()
        return made

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write_line(sys.stderr, "".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))

    plain = warnings.formatwarning
    logging.setLogRecordFactory(record)
    warnings.formatwarning = lambda *args, **more: printable(plain(*args, **more))
    sys.excepthook = show
