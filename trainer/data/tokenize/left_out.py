"""Finds what a chat template leaves out of a row: searches the rendered text for every word of the row.

White space may differ, tags around thoughts may be different ones, and text inside JSON is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.data.rows.findings import KEY, Remark
from trainer.data.rows.messages import Message, Row

THOUGHT_TAG = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]", re.IGNORECASE)
WORD = re.compile(r"\w+")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message with the model's thoughts before its answer: targets, like the answer."""
PLAIN = {"role", "content"}
ALWAYS_READ = {"tool_calls", *THOUGHT_KEYS}
"""Keys that the assistant generates: the search includes them even if the template does not name them."""

Span = tuple[int, int]


@dataclass(frozen=True)
class LeftOut:
    """Words of message `turn` that are not in the text; `turn` -1: one of the row's functions."""

    turn: int
    what: str
    words: str
    spoken: bool
    """Whether they are part of what is said (answers, thoughts, calls), and not another key of the message."""


@cache
def names_in(template: str) -> frozenset[str]:
    """All words of a template; the template cannot read a key that is not among them."""
    return frozenset(WORD.findall(template))


def readable(messages: list[Message], template: str) -> tuple[list[Message], list[Remark]]:
    """The messages with only those keys that the template may read, and remarks on the other keys."""
    if all(message.keys() <= PLAIN for message in messages):
        return messages, []
    names = names_in(template) | PLAIN | ALWAYS_READ
    unread = sorted({key for message in messages for key in message if key not in names})
    shown = [{key: value for key, value in message.items() if key in names} for message in messages]
    return shown, [(KEY, f"the key {key!r} of a message") for key in unread]


def is_all_there(row: Row, text: str) -> bool:
    """Whether `text` contains all messages word for word in this order: a quick check for simple rows."""
    at = 0
    for message in row.messages:
        content = message["content"].strip()
        found = text.find(content, at)
        if found < 0 or len(message) > 2:
            return False
        at = found + len(content)
    return not row.tools


def find_left_out(row: Row, text: str, spans: Mapping[int, Span]) -> Iterator[LeftOut]:
    """The parts of `row` that are not in its rendered `text`. `spans`: the known places of assistant turns in it.

    The assistant's words are searched there, or else between the previous message and the next known turn; those of
    others anywhere, because a template may put the system turn into a question.
    """
    at = 0
    for turn, message in enumerate(row.messages):
        content = message["content"].strip()
        begin, end = spans.get(turn) or (at, min((span[0] for t, span in spans.items() if t > turn), default=len(text)))
        found = text.find(content, begin, end)
        if found < 0 or len(message) > 2:
            area = text[begin:end] if message["role"] == "assistant" else text
            for what, piece in _pieces(content, message["role"]) if found < 0 else ():
                if not is_in(piece, area):
                    yield LeftOut(turn, what, piece, True)
            yield from _of_keys(turn, message, area)
        at = found + len(content) if found >= 0 else begin
    for tool in row.tools or ():
        name = str(tool.get("function", tool).get("name", "")) if isinstance(tool.get("function", tool), dict) else ""
        if name not in text:
            yield LeftOut(-1, "a function of 'tools'", name, False)


def _pieces(content: str, role: str) -> Iterator[tuple[str, str]]:
    """The thoughts of a message and the text around them."""
    parts = THOUGHT_TAG.split(content)
    for number, part in enumerate(parts):
        if part.strip():
            thought = number < len(parts) - 1 and role == "assistant"
            yield f"{'thoughts' if thought else 'words'} of {_a(role)} turn", part.strip()


def _of_keys(turn: int, message: Message, area: str) -> Iterator[LeftOut]:
    role = message["role"]
    for key, value in message.items():
        if key == "tool_calls":
            for call in value:
                yield from _of_call(turn, call["function"], area)
        elif key not in PLAIN and isinstance(value, str) and not is_in(value, area):
            yield LeftOut(turn, f"{key!r} of {_a(role)} turn", value, key in THOUGHT_KEYS)


def _of_call(turn: int, function: dict[str, Any], area: str) -> Iterator[LeftOut]:
    if function["name"] not in area:
        yield LeftOut(turn, "a call of a function", function["name"], True)
        return
    for text in _texts(function["arguments"]):
        if text not in area and not all(word in area for word in WORD.findall(text)):
            yield LeftOut(turn, "an argument of a call", text, True)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, without numbers and keys: each template writes these differently."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def is_in(words: str, area: str) -> bool:
    """Whether `area` contains `words`, possibly with other white space or escaped as in JSON."""
    words = words.strip()
    if words in area or json.dumps(words, ensure_ascii=False)[1:-1] in area:
        return True
    return "".join(words.split()) in "".join(area.split())


def _a(role: str) -> str:
    return f"an {role}" if role == "assistant" else f"a {role}"
