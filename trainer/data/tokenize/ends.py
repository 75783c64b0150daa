"""Finds the token with which a run teaches the model to end its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.rows.messages import Row
from trainer.data.tokenize.chat import encode, special_ids
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = "yes"


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token that closes the assistant's turn in the chat template and is a target; None without one."""
    messages = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
    try:
        turn = encode(Row("a turn", messages), tokenizer)
    except DataError:  # the template is for another kind of rows
        return None
    special = set(special_ids(tokenizer))
    for token in reversed(turn.ids[turn.is_target].tolist()):
        if token in special:
            return int(token)
        if str(tokenizer.decode([token])).strip():
            return None
    return None
