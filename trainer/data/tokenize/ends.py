"""The token that a run teaches a model to end with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.rows.messages import Row
from trainer.data.tokenize.chat import encode, special_ids
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = "yes"


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token that closes the assistant's turn in the chat template, as it is trained; None without one."""
    messages = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
    try:
        turn = encode(Row("a turn", messages), tokenizer)
    except DataError:  # a template for rows of another kind
        return None
    special = set(special_ids(tokenizer))
    for token in reversed(turn.ids[turn.is_target].tolist()):
        if token in special:
            return int(token)
        if str(tokenizer.decode([token])).strip():
            return None
    return None
