"""Converts a conversation to tokens, and decides which are targets, with the tokenizer's own chat template.

Targets are chosen by position in the rendered text, never by token id: a tokenizer may use one token for padding and
for the end of a turn. If the template marks what the assistant generates (`{% generation %}`), that decides.
Otherwise each assistant turn is found by rendering again: with the turn left open, which shows where the prompt ends,
and with other content, which shows where the turn's own text ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from trainer.data.rows.findings import LEFT_OUT, Remark
from trainer.data.rows.messages import Message, Row, shorten
from trainer.data.tokenize.left_out import LeftOut, find_left_out, is_all_there, readable
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "Xq7sentinelq7X"
DATE_CALL = re.compile(r"""strftime_now\((?P<quote>["'])(?P<form>.*?)(?P=quote)\)""")
TODAY = datetime(2024, 7, 26)
"""The date for templates that ask for one (Llama's default): tokens must not depend on the day."""
SHOWN_CHARS = 2000

Span = tuple[int, int]
Parts = tuple[Sequence[int], np.ndarray, list[LeftOut]]
"""IDs, a mask of the targets among them, and the parts of the row that are not in the tokens."""


@dataclass(frozen=True)
class Encoded:
    """A document: `ids` [T] int32, and `is_target` [T] bool, true if the token itself is to be predicted. `remarks`:
    the parts of its row that are not in it."""

    id: str
    ids: np.ndarray
    is_target: np.ndarray
    remarks: tuple[Remark, ...] = ()

    @property
    def num_targets(self) -> int:
        """How many tokens are predicted; the first one never is, because nothing precedes it."""
        return int(self.is_target[1:].sum())

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens."""
        return Encoded(self.id, self.ids[:length], self.is_target[:length])


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises DataError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} has no chat template",
            hint="set data.chat_template to a Jinja file, or train an instruct model's tokenizer",
        )


def encode(
    row: Row,
    tokenizer: PreTrainedTokenizerFast,
    *,
    loss_on: str = "assistant",
    system_prompt: str | None = None,
    turns: str = "all",
) -> Encoded:
    """The tokens of `row` with its targets: the assistant's turns with their end token, or everything; `turns` "last":
    only what the assistant says after the last question.

    The beginning-of-text token is the template's, so there is at most one. Raises DataError when the template refuses
    the row, or when the row has an assistant turn that cannot be found in what the template made of it.
    """
    check_template(tokenizer)
    row = _with_system(row, system_prompt)
    if turns == "last":
        row = _last_answer_alone(row)
    messages, unread = readable(row.messages, tokenizer.get_chat_template(tools=row.tools))
    chat = Chat(replace(row, messages=messages), tokenizer)
    if GENERATION_TAG.search(chat.template) and loss_on != "all":
        ids, is_target, left_out = _encode_with_tags(chat)
    else:
        ids, is_target, left_out = _encode_with_spans(chat, everything=loss_on == "all")
    _refuse_lost_targets(chat, left_out, everything=loss_on == "all")
    remarks = [*row.remarks, *unread, *dict.fromkeys((LEFT_OUT, one.what) for one in left_out)]
    return Encoded(row.id, np.asarray(ids, dtype=np.int32), is_target, tuple(remarks))


def _refuse_lost_targets(chat: Chat, left_out: Sequence[LeftOut], *, everything: bool) -> None:
    """Raise DataError if the text lacks words that would be targets."""
    spoken = [one for one in left_out if one.spoken]
    targets = set(range(len(chat.row.messages))) - {*chat.row.untrained} if everything else {*chat.targets()}
    lost = next((one for one in spoken if one.turn in targets), None)
    if lost is None:
        return
    earlier = "data.turns=last trains on the last answer alone; `weight: 0` in a message takes it out of the loss; "
    key = "take the key out of the rows, or " if lost.what.startswith("'") else ""
    raise DataError(
        f"the chat template leaves out {lost.what} that is trained on (turn {lost.turn}): {shorten(lost.words)}",
        where=chat.row.id,
        hint=f"{earlier if lost.turn < max(targets) else ''}{key}set data.chat_template to one that keeps these words",
    )


def _last_answer_alone(row: Row) -> Row:
    """`row` with only the targets after the last answered question."""
    roles = [message["role"] for message in row.messages]
    last = max((index for index, role in enumerate(roles) if role == "assistant"), default=0)
    question = max((index for index in range(last) if roles[index] == "user"), default=-1)
    return replace(row, untrained=tuple({*row.untrained, *range(question + 1)}))


@dataclass(frozen=True)
class Chat:
    """A row with the tokenizer whose template renders it."""

    row: Row
    tokenizer: PreTrainedTokenizerFast

    @property
    def template(self) -> str:
        """The tokenizer's template for this row; it may have several."""
        return self.tokenizer.get_chat_template(tools=self.row.tools)

    def render(self, messages: Sequence[Message] | None = None, *, open_turn: bool = False) -> str:
        """The text of `messages` (default: all). `open_turn` adds the text before the assistant's next words."""
        messages = self.row.messages if messages is None else messages
        text: str = self.apply(messages, tokenize=False, add_generation_prompt=open_turn)
        return text

    def apply(self, messages: Sequence[Message], **how: Any) -> Any:
        """The tokenizer's `apply_chat_template`. Raises DataError if the template refuses the messages."""
        tools: list[dict[Any, Any] | Callable[..., Any]] | None = None if self.row.tools is None else [*self.row.tools]
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=undated(self.template), **how
            )
        except Exception as error:  # a template is a program: division, indexing and filters may raise any Python error
            raise DataError(
                f"the chat template refuses the conversation: {_reason(error)}",
                where=self.row.id,
                hint="change the row, or set data.chat_template",
            ) from None

    def targets(self) -> list[int]:
        """The indices of the assistant's turns that are trained on."""
        turns = range(self.row.context, len(self.row.messages))
        return [index for index in turns if self.is_answer(index) and index not in self.row.untrained]

    def answers(self) -> list[int]:
        """The indices of all turns of the assistant."""
        return [index for index in range(len(self.row.messages)) if self.is_answer(index)]

    def is_answer(self, index: int) -> bool:
        """Whether the assistant wrote the message."""
        role: str = self.row.messages[index]["role"]
        return role == "assistant"

    def not_found(self, text: str, detail: str) -> DataError:
        """The error to raise if a turn is not found at its place in the rendered `text`."""
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
    untrained = tuple(index + 1 for index in row.untrained)
    return replace(row, messages=messages, context=row.context + 1 if row.context else 0, untrained=untrained)


def _tokenize(tokenizer: PreTrainedTokenizerFast, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


# --- templates that mark the assistant's words -----------------------------------------------------------------------


def _encode_with_tags(chat: Chat) -> Parts:
    out = chat.apply(chat.row.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    is_target = np.asarray(out["assistant_masks"], dtype=bool)
    run_ends = np.flatnonzero(is_target & ~np.append(is_target[1:], False))
    turns, targets = chat.answers(), chat.targets()
    if turns and not is_target.any():
        raise chat.not_found(chat.render(), "its {% generation %} tags mark nothing")
    is_plain = len(run_ends) == len(turns)  # a piece of the text for each turn
    if turns != targets:
        if not is_plain:
            detail = f"its {{% generation %}} tags mark {len(run_ends)} pieces in {len(turns)} turns, not all targets"
            raise chat.not_found(chat.render(), detail)
        run = np.searchsorted(run_ends, np.arange(len(is_target)))
        is_target &= np.isin(run, [place for place, turn in enumerate(turns) if turn in targets])
    text = chat.render()
    if is_all_there(chat.row, text):
        return out["input_ids"], is_target, []
    offsets = _tokenize(chat.tokenizer, text)["offset_mapping"]
    ends = [int(offsets[index][1]) for index in run_ends] if is_plain else []
    spans = dict(zip(turns, pairwise([0, *ends]), strict=False))
    return out["input_ids"], is_target, list(find_left_out(chat.row, text, spans))


# --- templates that do not -------------------------------------------------------------------------------------------


def _encode_with_spans(chat: Chat, *, everything: bool) -> Parts:
    """`everything`: all tokens are targets, except the answers that the row excludes."""
    text = chat.render()
    out = _tokenize(chat.tokenizer, text)
    starts, ends = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    special = np.isin(out["input_ids"], special_ids(chat.tokenizer))
    is_target = np.full(len(starts), everything)
    spans: dict[int, Span] = {}
    for turn in set(chat.answers()) & set(chat.row.untrained) if everything else chat.targets():
        begin, end = spans[turn] = turn_span(chat, turn, text=text)
        end = _with_end_token(text, end, starts=starts[special], ends=ends[special])
        # a token that began in the prompt was not generated, so it is not a target
        found = (starts >= begin) & (ends <= end) & (ends > starts)
        if not found.any() and end > begin:
            raise chat.not_found(text, f"no token lies within characters {begin} to {end} (turn {turn})")
        is_target[found] = not everything
    return out["input_ids"], is_target, list(find_left_out(chat.row, text, spans))


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
    """`end` moved after the special token that closes the turn, if there is only white space between."""
    following = np.flatnonzero(starts >= end)
    if following.size and not text[end : starts[following[0]]].strip():
        return int(ends[following[0]])
    return end


def special_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the tokens that stand for no text, such as the end of a turn."""
    added = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return [*added, *tokenizer.all_special_ids]
