"""Which tokens of a conversation are targets, by the templates that models really have.

The templates are short re-creations of the public formats on the tokenizer of bytes. Expected targets are written out.
"""

from __future__ import annotations

import re

import pytest

from tests.support.chat_tokens import QWEN25_SYSTEM, chat_tokenizer
from trainer.data.rows.messages import Row
from trainer.data.tokenize.chat import Encoded, encode
from trainer.data.tokenize.tokenizer import CHATML_TEMPLATE, build_bytes_tokenizer
from trainer.errors import DataError

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# puts a system turn of its own before conversations that have none
QWEN25 = QWEN25_SYSTEM + CHATML

# takes the thoughts out of all answers before the last question, and gives the others an empty one
QWEN3 = """\
{%- set ns = namespace(last_query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role != 'assistant' -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else -%}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = '' -%}
{%- if '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query -%}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif -%}
{{ content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA3 = """\
{%- for m in messages -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

# no header for an open turn, a space before and behind the words, the end token after it
LLAMA2 = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}"""

THREE_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello é."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "\nIt is\n\n4\n"},
    {"role": "user", "content": "Say <|im_end|>"},
    {"role": "assistant", "content": "Bye"},
]


def target_texts(tokenizer, encoded: Encoded) -> list[str]:
    """The text of every unbroken run of targets."""
    marks = "".join("x" if target else "." for target in encoded.is_target)
    return [tokenizer.decode(encoded.ids[m.start() : m.end()].tolist()) for m in re.finditer("x+", marks)]


@pytest.mark.parametrize(
    ("template", "targets"),
    [
        (CHATML_TEMPLATE, ["Hello é.<|im_end|>", "\nIt is\n\n4\n<|im_end|>", "Bye<|im_end|>"]),
        (CHATML, ["Hello é.<|im_end|>", "\nIt is\n\n4\n<|im_end|>", "Bye<|im_end|>"]),
        (QWEN25, ["Hello é.<|im_end|>", "\nIt is\n\n4\n<|im_end|>", "Bye<|im_end|>"]),
        (QWEN3, ["Hello é.<|im_end|>", "It is\n\n4\n<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"]),
        (LLAMA3, ["Hello é.<|eot_id|>", "It is\n\n4<|eot_id|>", "Bye<|eot_id|>"]),
    ],
    ids=["builtin", "chatml", "qwen2.5", "qwen3", "llama3"],
)
def test_three_turns_train_the_answers_with_their_end_tokens(template, targets):
    tokenizer = chat_tokenizer(template)
    assert target_texts(tokenizer, encode(Row("r", THREE_TURNS), tokenizer)) == targets


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML, QWEN25, QWEN3, LLAMA3])
def test_ids_are_those_of_the_template_alone(template):
    tokenizer = chat_tokenizer(template)
    ids = tokenizer.apply_chat_template(THREE_TURNS, tokenize=True, return_dict=True)["input_ids"]
    for loss_on in ("assistant", "all"):
        assert encode(Row("r", THREE_TURNS), tokenizer, loss_on=loss_on).ids.tolist() == ids


def test_mask_without_generation_tags_equals_transformers_mask_with_them():
    with_tags = chat_tokenizer(CHATML_TEMPLATE)
    out = with_tags.apply_chat_template(
        THREE_TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )  # fmt: skip
    encoded = encode(Row("r", THREE_TURNS), chat_tokenizer(CHATML))
    assert encoded.ids.tolist() == out["input_ids"]
    assert encoded.is_target.astype(int).tolist() == out["assistant_masks"]


def test_template_without_header_for_an_open_turn_trains_words_and_end_token():
    tokenizer = chat_tokenizer(LLAMA2)
    tokenizer.eos_token = "</s>"
    encoded = encode(Row("r", THREE_TURNS[:2]), tokenizer)
    assert target_texts(tokenizer, encoded) == ["Hello é. </s>"]


def test_llama3_has_one_beginning_of_text():
    tokenizer = chat_tokenizer(LLAMA3)
    ids = encode(Row("r", THREE_TURNS), tokenizer).ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML])
def test_end_token_is_a_target_though_it_is_also_the_padding(template):
    tokenizer = chat_tokenizer(template)
    tokenizer.pad_token = "<|im_end|>"
    encoded = encode(Row("r", THREE_TURNS), tokenizer)
    assert target_texts(tokenizer, encoded)[-1] == "Bye<|im_end|>"


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML])
def test_answers_within_a_prompt_are_no_targets(template):
    tokenizer = chat_tokenizer(template)
    encoded = encode(Row("r", THREE_TURNS, context=5), tokenizer, system_prompt="Be kind.")
    assert target_texts(tokenizer, encoded) == ["Bye<|im_end|>"]


def test_loss_on_all_makes_every_token_a_target():
    encoded = encode(Row("r", THREE_TURNS), chat_tokenizer(CHATML), loss_on="all")
    assert encoded.is_target.all()


def test_system_prompt_comes_first_unless_the_row_has_one():
    tokenizer = chat_tokenizer(CHATML)
    own = [{"role": "system", "content": "Own."}, *THREE_TURNS]
    added = tokenizer.decode(encode(Row("r", THREE_TURNS), tokenizer, system_prompt="Be kind.").ids)
    kept = tokenizer.decode(encode(Row("r", own), tokenizer, system_prompt="Be kind.").ids)
    assert added.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi")
    assert kept.startswith("<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user\nHi")


def test_row_without_an_answer_has_no_target():
    for template in (CHATML, CHATML_TEMPLATE):
        assert encode(Row("r", THREE_TURNS[:1]), chat_tokenizer(template)).num_targets == 0


def test_tokenizer_without_template_is_an_error_naming_the_key():
    with pytest.raises(DataError, match="no chat template") as error:
        encode(Row("r", THREE_TURNS), chat_tokenizer(""))
    assert "data.chat_template" in error.value.hint


def test_template_that_refuses_a_role_names_the_row():
    template = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system turn') }}{%- endif -%}" + CHATML
    with pytest.raises(DataError, match="no system turn") as error:
        encode(Row("a.jsonl:7", THREE_TURNS), chat_tokenizer(template), system_prompt="x")
    assert error.value.where == "a.jsonl:7"


@pytest.mark.parametrize(
    "template",
    [
        "{%- for m in messages -%}{{ m.role + ': ' + m.content | upper + '\\n' }}{%- endfor -%}",
        "{%- for m in messages -%}{{ m.role + ': ' }}{% generation %}{% endgeneration %}{{ 'HI\\n' }}{%- endfor -%}",
    ],
    ids=["words changed", "empty tags"],
)
def test_answer_that_cannot_be_found_is_an_error_showing_the_text(template):
    with pytest.raises(DataError, match="cannot be found") as error:
        encode(Row("a.jsonl:7", THREE_TURNS[:2]), chat_tokenizer(template))
    assert "user: HI\nassistant: " in error.value.message
    assert error.value.where == "a.jsonl:7"


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 'a'.index('z') }}", "{% for i in range(10**9) %}{% endfor %}"])
def test_template_that_fails_like_a_program_names_the_row(template):
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"the chat template refuses the conversation: \w+Error"):
        encode(Row("a:1", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]), tokenizer)
