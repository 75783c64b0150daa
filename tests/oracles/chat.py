"""Which tokens of a conversation are targets, compared with the mask of transformers' generation tags."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from tests.oracles.measure import Oracle
from tests.support.chat_tokens import QWEN25_SYSTEM, chat_tokenizer
from trainer.data.rows.sources import Row
from trainer.data.tokenize.chat import encode

# the public formats, with tags around what the assistant generates
CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' -%}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

QWEN25 = QWEN25_SYSTEM + CHATML

LLAMA3 = """\
{%- for m in messages -%}
{%- if loop.first -%}{{ '<|begin_of_text|>' }}{%- endif -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'assistant' -%}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else -%}{{ m.content | trim + '<|eot_id|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello é."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is\n\n4"},
    {"role": "user", "content": "Say Hello é."},
    {"role": "assistant", "content": "Hello é."},
]


def without_tags(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


def differing_positions(folder: Path, *, template: str) -> float:
    """Of ids and targets; ours are found without the tags."""
    tokenizer = chat_tokenizer(template)
    theirs = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    tokenizer.chat_template = without_tags(template)
    ours = encode(Row("row", TURNS), tokenizer)
    assert sum(theirs["assistant_masks"]) > 20
    pairs = zip(ours.ids.tolist(), ours.is_target.tolist(), strict=True)
    expected = zip(theirs["input_ids"], map(bool, theirs["assistant_masks"]), strict=True)
    return float(sum(mine != other for mine, other in zip(pairs, expected, strict=True)))


ORACLES = [
    Oracle(
        "positions where the loss mask differs from the template's generation tags",
        "transformers return_assistant_tokens_mask",
        f"{name} template without and with tags, 3 answers",
        0,
        partial(differing_positions, template=template),
    )
    for name, template in {"ChatML": CHATML, "Qwen2.5": QWEN25, "Llama 3": LLAMA3}.items()
]
