"""A conversation as tokens, and which of them are targets, by the tokenizer's own chat template.

Targets are chosen by position in the rendered text, never by token id: a tokenizer may use one token for padding and
for the end of a turn. Where the template marks what the assistant generates (`{% generation %}`), that decides.
Elsewhere each assistant turn is found by rendering again: with the turn left open, which shows where the prompt ends,
and with another content, which shows where the turn's own text ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from trainer.data.sources import Message, Row
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "Xq7sentinelq7X"
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
    messages, context = _with_system(row, system_prompt)
    if loss_on == "all":
        ids = _tokenize(tokenizer, render(tokenizer, messages, row_id=row.id))["input_ids"]
        return _encoded(row.id, ids, np.ones(len(ids), dtype=bool))
    if GENERATION_TAG.search(tokenizer.get_chat_template()):
        return _encode_with_tags(tokenizer, messages, context=context, row_id=row.id)
    return _encode_with_spans(tokenizer, messages, context=context, row_id=row.id)


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, row_id: str, open_turn: bool = False
) -> str:
    """The text of a conversation; `open_turn` adds what stands before the assistant's next words."""
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_turn)
    except jinja2.TemplateError as error:
        raise _refused(error, row_id) from None


def _refused(error: Exception, row_id: str) -> DataError:
    return DataError(
        f"the chat template refuses the conversation: {error}",
        where=row_id,
        hint="change the row, or set data.chat_template",
    )


def _with_system(row: Row, system_prompt: str | None) -> tuple[list[Message], int]:
    if system_prompt is None or any(message["role"] == "system" for message in row.messages):
        return row.messages, row.context
    return [{"role": "system", "content": system_prompt}, *row.messages], row.context + 1 if row.context else 0


def _encoded(row_id: str, ids: Sequence[int], is_target: np.ndarray) -> Encoded:
    return Encoded(row_id, np.asarray(ids, dtype=np.int32), is_target)


def _tokenize(tokenizer: PreTrainedTokenizerFast, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


# --- templates that mark the assistant's words -----------------------------------------------------------------------


def _encode_with_tags(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, context: int, row_id: str
) -> Encoded:
    try:
        out = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except jinja2.TemplateError as error:
        raise _refused(error, row_id) from None
    is_target = np.asarray(out["assistant_masks"], dtype=bool)
    turns = _assistant_turns(messages)
    if turns and not is_target.any():
        text = render(tokenizer, messages, row_id=row_id)
        raise _not_found(text, row_id, "its {% generation %} tags mark nothing")
    skipped = sum(index < context for index in turns)
    if skipped:
        is_target = _without_first_runs(is_target, skipped)
    return _encoded(row_id, out["input_ids"], is_target)


def _without_first_runs(mask: np.ndarray, count: int) -> np.ndarray:
    """`mask` without its first `count` runs of True."""
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return mask & (np.cumsum(starts) > count)


# --- templates that do not -------------------------------------------------------------------------------------------


def _encode_with_spans(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, context: int, row_id: str
) -> Encoded:
    text = render(tokenizer, messages, row_id=row_id)
    out = _tokenize(tokenizer, text)
    starts, ends = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    special = np.isin(out["input_ids"], special_ids(tokenizer))
    is_target = np.zeros(len(starts), dtype=bool)
    for turn in _assistant_turns(messages):
        if turn < context:
            continue
        begin, end = turn_span(tokenizer, messages, turn, text=text, row_id=row_id)
        end = _with_end_token(text, end, starts=starts[special], ends=ends[special])
        # a token that began in the prompt was not generated, so it is no target
        found = (starts >= begin) & (ends <= end) & (ends > starts)
        if not found.any() and end > begin:
            raise _not_found(text, row_id, f"no token lies within characters {begin} to {end} (turn {turn})")
        is_target |= found
    return _encoded(row_id, out["input_ids"], is_target)


def turn_span(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], turn: int, *, text: str, row_id: str
) -> Span:
    """Where the words of assistant turn `turn` stand in `text`, the rendering of all messages, without an end token.

    It begins where the prompt ends that the model would have answered, so that what the template puts before the words
    (Qwen3's empty `<think>` block) is part of it. A template may render a turn differently once more turns follow
    (Qwen3 removes earlier thoughts): everything is looked up in the final text.
    """
    closed = prompt = ""
    if turn > 0:  # many templates cannot render an empty conversation
        closed = render(tokenizer, messages[:turn], row_id=row_id)
        prompt = render(tokenizer, messages[:turn], row_id=row_id, open_turn=True)
    replaced = [*messages[:turn], {**messages[turn], "content": SENTINEL}, *messages[turn + 1 :]]
    before, found, after = render(tokenizer, replaced, row_id=row_id).partition(SENTINEL)
    # a template without a generation prompt leaves the assistant's header out; then the words alone are the turn
    begin = prompt if prompt != closed and text.startswith(prompt) else before
    span = len(begin), len(text) - len(after)
    if not found or not text.startswith(begin) or not text.endswith(after) or span[0] > span[1]:
        raise _not_found(text, row_id, f"turn {turn} (counted from 0)")
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


def _not_found(text: str, row_id: str, detail: str) -> DataError:
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"
    return DataError(
        f"the assistant's words cannot be found in what the chat template rendered: {detail}\n{shown}",
        where=row_id,
        hint="set data.chat_template to a template with {% generation %} tags, or data.loss_on=all",
    )
