"""What the trainer tells on its streams, made fit for a terminal: names and values of data files, model folders and
checkpoints are other people's text. No torch.

The deployer has the same in `deployer/printable.py`: the trainer may stand without it.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import logging
    from types import TracebackType

# what could drive a terminal (C0, DEL, C1), break a line, turn text around, or is half of a surrogate pair
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")


def shown(value: object) -> str:
    """A value as one printable line: control characters, line breaks and bidirectional marks are made visible."""
    return _HIDDEN.sub(lambda match: ascii(match.group())[1:-1], str(value))


def printable(text: str) -> str:
    """A text of several lines, each of them printable; tabs stay."""
    return "\n".join("\t".join(map(shown, line.split("\t"))) for line in text.split("\n"))


def write_line(stream: TextIO, text: str) -> None:
    """In one piece: the ranks share the stream, and an unbuffered print would write the line's end apart."""
    stream.write(f"{printable(text)}\n")
    stream.flush()


def write_error(text: str) -> None:
    """Prints a failing process's message. If stderr cannot be written (full disk, closed terminal), the process must
    still end as it would have."""
    try:
        write_line(sys.stderr, text)
    except (OSError, ValueError, AttributeError):  # it may be closed, or None
        sys.stderr = None  # Python would write the rest of it at its end, and end with 120


def write_json(value: object) -> None:
    """A value on stdout as one line of JSON without a raw control character."""
    write_line(sys.stdout, json.dumps(value).replace("\x7f", "\\u007f"))


def tame_others() -> None:
    """Makes printable what libraries log and warn of, and stack traces: they repeat values of the files they read."""
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
