"""A conversation as tokens, and which of them are targets, by the tokenizer's own chat template.

Targets are chosen by position in the rendered text, never by token id: a tokenizer may use one token for padding and
for the end of a turn. Where the template marks what the assistant generates (`{% generation %}`), that decides.
Elsewhere each assistant turn is found by rendering again: with the turn left open, which shows where the prompt ends,
and with another content, which shows where the turn's own text ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from trainer.data.rows.messages import Message, Row
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "Xq7sentinelq7X"
DATE_CALL = re.compile(r"""strftime_now\((?P<quote>["'])(?P<form>.*?)(?P=quote)\)""")
TODAY = datetime(2024, 7, 26)
"""What a template that asks for the date is told (Llama's own default): tokens must not depend on the day."""
SHOWN_CHARS = 2000

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A document: `ids` [T] int32, and `is_target` [T] bool, true where the token itself is to be predicted."""

    id: str
    ids: np.ndarray
    is_target: np.ndarray

    @property
    def num_targets(self) -> int:
        """How many tokens are predicted: the first one never is, for nothing precedes it."""
        return int(self.is_target[1:].sum())

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens."""
        return Encoded(self.id, self.ids[:length], self.is_target[:length])


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises DataError when the tokenizer cannot render a conversation at all."""
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} has no chat template",
            hint="set data.chat_template to a Jinja file, or train an instruct model's tokenizer",
        )


def encode(
    row: Row, tokenizer: PreTrainedTokenizerFast, *, loss_on: str = "assistant", system_prompt: str | None = None
) -> Encoded:
    """The tokens of `row` with its targets: the assistant's turns with their end token, or everything.

    The beginning-of-text token is the template's, so there is at most one. Raises DataError when the template refuses
    the row, or when the row has an assistant turn that cannot be found in what the template made of it.
    """
    check_template(tokenizer)
    chat = Chat(_with_system(row, system_prompt), tokenizer)
    if loss_on == "all":
        ids = _tokenize(tokenizer, chat.render())["input_ids"]
        return _encoded(row.id, ids, np.ones(len(ids), dtype=bool))
    if GENERATION_TAG.search(chat.template):
        return _encode_with_tags(chat)
    return _encode_with_spans(chat)


@dataclass(frozen=True)
class Chat:
    """A row with the tokenizer whose template renders it."""

    row: Row
    tokenizer: PreTrainedTokenizerFast

    @property
    def template(self) -> str:
        """The template that this row takes, of those that the tokenizer has."""
        return self.tokenizer.get_chat_template(tools=self.row.tools)

    def render(self, messages: Sequence[Message] | None = None, *, open_turn: bool = False) -> str:
        """The text of `messages`, all unless given; `open_turn` adds what stands before the assistant's next words."""
        messages = self.row.messages if messages is None else messages
        text: str = self.apply(messages, tokenize=False, add_generation_prompt=open_turn)
        return text

    def apply(self, messages: Sequence[Message], **how: Any) -> Any:
        """The tokenizer's `apply_chat_template`; DataError when the template refuses the messages."""
        tools: list[dict[Any, Any] | Callable[..., Any]] | None = None if self.row.tools is None else [*self.row.tools]
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=undated(self.template), **how
            )
        except Exception as error:  # a template is a program: dividing, indexing and filters raise what Python has
            raise DataError(
                f"the chat template refuses the conversation: {_reason(error)}",
                where=self.row.id,
                hint="change the row, or set data.chat_template",
            ) from None

    def targets(self) -> list[int]:
        """The indices of the assistant's turns that are trained on."""
        turns = range(self.row.context, len(self.row.messages))
        return [index for index in turns if self.row.messages[index]["role"] == "assistant"]

    def not_found(self, text: str, detail: str) -> DataError:
        """What to raise when a turn is not where it should be in the rendered `text`."""
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"
        return DataError(
            f"the assistant's words cannot be found in what the chat template rendered: {detail}: {shown}",
            where=self.row.id,
            hint="set data.chat_template to a template with {% generation %} tags, or data.loss_on=all",
        )


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


@cache
def undated(template: str) -> str:
    """`template` with TODAY wherever it asks for the date."""
    return DATE_CALL.sub(lambda call: json.dumps(TODAY.strftime(call["form"])), template)


def _with_system(row: Row, system_prompt: str | None) -> Row:
    if system_prompt is None or any(message["role"] == "system" for message in row.messages):
        return row
    messages = [{"role": "system", "content": system_prompt}, *row.messages]
    return replace(row, messages=messages, context=row.context + 1 if row.context else 0)


def _encoded(row_id: str, ids: Sequence[int], is_target: np.ndarray) -> Encoded:
    return Encoded(row_id, np.asarray(ids, dtype=np.int32), is_target)


def _tokenize(tokenizer: PreTrainedTokenizerFast, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


# --- templates that mark the assistant's words -----------------------------------------------------------------------


def _encode_with_tags(chat: Chat) -> Encoded:
    row = chat.row
    out = chat.apply(row.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    is_target = np.asarray(out["assistant_masks"], dtype=bool)
    turns = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    if turns and not is_target.any():
        raise chat.not_found(chat.render(), "its {% generation %} tags mark nothing")
    if any("tool_calls" in row.messages[turn] for turn in turns):
        text = chat.render()
        for turn in turns:
            _check_calls(chat, turn, text=text, shown=text)
    skipped = sum(index < row.context for index in turns)
    if skipped:
        is_target = _without_first_runs(is_target, skipped)
    return _encoded(row.id, out["input_ids"], is_target)


def _without_first_runs(mask: np.ndarray, count: int) -> np.ndarray:
    """`mask` without its first `count` runs of True."""
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return mask & (np.cumsum(starts) > count)


def _check_calls(chat: Chat, turn: int, *, text: str, shown: str) -> None:
    """Raise DataError when a call of `turn` is not in `text`: the template knows no tools and left it out."""
    for call in chat.row.messages[turn].get("tool_calls", ()):
        if call["function"]["name"] not in text:
            raise chat.not_found(
                shown, f"turn {turn} calls {call['function']['name']!r}, which the template leaves out"
            )


# --- templates that do not -------------------------------------------------------------------------------------------


def _encode_with_spans(chat: Chat) -> Encoded:
    text = chat.render()
    out = _tokenize(chat.tokenizer, text)
    starts, ends = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    special = np.isin(out["input_ids"], special_ids(chat.tokenizer))
    is_target = np.zeros(len(starts), dtype=bool)
    for turn in chat.targets():
        begin, end = turn_span(chat, turn, text=text)
        end = _with_end_token(text, end, starts=starts[special], ends=ends[special])
        _check_calls(chat, turn, text=text[begin:end], shown=text)
        # a token that began in the prompt was not generated, so it is no target
        found = (starts >= begin) & (ends <= end) & (ends > starts)
        if not found.any() and end > begin:
            raise chat.not_found(text, f"no token lies within characters {begin} to {end} (turn {turn})")
        is_target |= found
    return _encoded(chat.row.id, out["input_ids"], is_target)


def turn_span(chat: Chat, turn: int, *, text: str) -> Span:
    """Where the words of assistant turn `turn` stand in `text`, the rendering of all messages, without an end token.

    It begins where the prompt ends that the model would have answered, so that what the template puts before the words
    (Qwen3's empty `<think>` block) is part of it. A template may render a turn differently once more turns follow
    (Qwen3 removes earlier thoughts): everything is looked up in the final text. Calls of tools are part of the turn:
    words in their place show where it ends.
    """
    messages = chat.row.messages
    closed = prompt = ""
    if turn > 0:  # many templates cannot render an empty conversation
        closed = chat.render(messages[:turn])
        prompt = chat.render(messages[:turn], open_turn=True)
    words = {"role": "assistant", "content": SENTINEL}
    before, found, after = chat.render([*messages[:turn], words, *messages[turn + 1 :]]).partition(SENTINEL)
    # a template without a generation prompt leaves the assistant's header out; then the words alone are the turn
    begin = prompt if prompt != closed and text.startswith(prompt) else before
    span = len(begin), len(text) - len(after)
    if not found or not text.startswith(begin) or not text.endswith(after) or span[0] > span[1]:
        raise chat.not_found(text, f"turn {turn} (counted from 0)")
    return span


def _with_end_token(text: str, end: int, *, starts: np.ndarray, ends: np.ndarray) -> int:
    """`end` moved behind the special token that closes the turn, when only white space lies between."""
    following = np.flatnonzero(starts >= end)
    if following.size and not text[end : starts[following[0]]].strip():
        return int(ends[following[0]])
    return end


def special_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the tokens that stand for no text, such as the end of a turn."""
    added = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return [*added, *tokenizer.all_special_ids]
