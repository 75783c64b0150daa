"""Encodes a text that a model continues: as the user's turn of a conversation, or as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.rows.messages import Message, Row
from trainer.data.tokenize.chat import Chat, check_template
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast, text: str, *, chat: bool, system: str | None = None, where: str = "the prompt"
) -> list[int]:
    """The IDs before the model's first word, in the form that a run with this tokenizer trains on.

    `chat`: in the tokenizer's template, with the assistant's turn open. Raises DataError with `where`.
    """
    if chat:
        check_template(tokenizer)
        turns: list[Message] = [{"role": "user", "content": text}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        rendered = Chat(Row(where, turns), tokenizer).render(open_turn=True)
        ids: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = tokenizer(text, verbose=False)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id:  # some tokenizers add it, but the text does not end here
            ids = ids[:-1]
    if not ids:
        raise DataError("the prompt is empty", where=where, hint="write what the model is to go on from")
    return ids
