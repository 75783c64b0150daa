"""The tokenizer of bytes with the special tokens of the public chat formats, for tests of templates."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from trainer.data.tokenize.tokenizer import build_bytes_tokenizer

SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "</s>")
QWEN25_SYSTEM = """\
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
"""
"""The beginning of Qwen2.5's template: a system turn for conversations that have none."""


def chat_tokenizer(template: str, *, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Its beginning-of-text token is Llama 3's; `end` closes a text."""
    tokenizer = build_bytes_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.bos_token, tokenizer.eos_token = SPECIAL[0], end
    tokenizer.chat_template = template
    return tokenizer
