"""Makes text from a host, a file or a job safe for a terminal: control sequences are replaced by visible text.

`deployer.terminal` takes only text of the type `Shown`, so mypy finds text that was not converted. `Shown` is one line:
line breaks are escaped too, so that a value from a host cannot begin a new line that looks like ours.
"""

from __future__ import annotations

import codecs
import re

# characters that control a terminal (C0, DEL, C1), break a line or reverse text (bidirectional marks), and halves of
# surrogate pairs, which cannot be sent to a terminal
_BEYOND_ASCII = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
_HIDDEN = re.compile(f"[\x00-\x1f{_BEYOND_ASCII}]")


class Shown(str):
    """One line of text that is safe for a terminal. Only `shown` makes it; joined or formatted text is a str again."""

    __slots__ = ()


def shown(value: object) -> Shown:
    """A value as one printable line: control characters, line breaks, bidirectional marks and lone halves of surrogate
    pairs become escapes (`\\n`, `\\x1b`)."""
    return Shown(_HIDDEN.sub(_visibly, str(value)))


def shown_lines(text: str) -> list[Shown]:
    """The lines of a text that may keep its line breaks, such as a log."""
    return [shown(line) for line in text.rstrip("\n").split("\n")]


def cells(*values: object) -> tuple[Shown, ...]:
    """Values as printable lines, for a row of a table."""
    return tuple(map(shown, values))


def _visibly(match: re.Match[str]) -> str:
    character = match.group()
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8, decoded with `surrogateescape`
        return f"\\x{ord(character) - 0xDC00:02x}"
    return ascii(character)[1:-1]


# --- logs -------------------------------------------------------------------------------------------------------------

_PLAIN = bytes([*b"\t\n\r", *range(0x20, 0x7F)])
_KEPT = r"\[(?:[\d;:]{0,60}m|0?K)"
_UNFIT = re.compile(
    f"[\x00-\x08\x0b\x0c\x0e-\x1f{_BEYOND_ASCII}]"
    rf"(?!(?<=\x1b){_KEPT})(?P<dropped>(?<=\x1b)\[[0-?]{{0,60}}[ -/]{{0,4}}[@-~])?"
)
_BEGUN = re.compile(rb"\x1b(\[[0-?]{0,60}[ -/]{0,4})?\Z")
"""A possible beginning of a control sequence, at the end of the data."""
_REST = r"[^\x1b\r\n]*(?:\x1b\[0?K[^\x1b\r\n]*)*"
_OPEN = re.compile(rf"(\x1b\[(?!0?m)[\d;:]{{1,60}}m)({_REST})(?=[\r\n]|\Z)")
"""A colour that is still on at the end of its line, and the rest of the line."""
_RESET = "\x1b[0m"


class LogText:
    """Converts a log's bytes to bytes that are safe for a terminal, one chunk at a time.

    Lines, tabs, carriage returns, UTF-8, colours (SGR) and the erasure of the rest of a line pass; a colour ends with
    its line. Other control sequences are dropped, everything else is escaped. A possible half of a character or a
    sequence at the end of a chunk is kept for the next one, so the output can be cut there.
    """

    def __init__(self, *, colours: bool = True, encoding: str = "utf-8") -> None:
        self._colours = colours
        self._encoding = encoding
        self._held = b""
        self._colour = ""  # that is on at the end of the output so far

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """Converts the next chunk; `final`: it is the last one."""
        if not self._held and not self._colour and not data.translate(None, _PLAIN):
            return data  # the usual case
        data, self._held = self._held + data, b""
        if not final and (begun := _BEGUN.search(data)):
            data, self._held = data[: begun.start()], begun.group()
        text, used = codecs.utf_8_decode(data, "surrogateescape", final)
        self._held = data[used:] + self._held
        if not self._colours:
            text = re.sub(rf"\x1b{_KEPT}", "", text)
        text = _UNFIT.sub(lambda match: "" if match["dropped"] else _visibly(match), text)
        return self._end_colours(text, final=final).encode(self._encoding, "backslashreplace")

    def _end_colours(self, text: str, *, final: bool) -> str:
        begun, self._colour = self._colour, ""
        if not begun and "\x1b" not in text:
            return text

        def end(match: re.Match[str]) -> str:
            if match.end() < len(begun + text) or final:
                return match.group() + _RESET
            self._colour = match[1]
            return match.group()

        return _OPEN.sub(end, begun + text)[len(begun) :]
