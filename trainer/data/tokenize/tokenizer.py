"""The tokenizer of a run: the model's own, a named one, or the built-in one of bytes, which needs no download.

Before loading, a check finds out whether the Hugging Face Hub can be reached. The Hub's libraries try each file six
times, half a minute in all, before they use their cache or give up. They read HF_HUB_OFFLINE when they are imported, so
the check must come before the import.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainer.data.rows.sources import is_local
from trainer.errors import DataError
from trainer.files import expanded
from trainer.schema import Config, as_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTES = "builtin:bytes"
PAD, TURN_START, TURN_END, END_OF_TEXT = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHATML_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] + '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""ChatML; the assistant's words and the end token are inside generation tags."""
CONNECT_TIMEOUT_S = 5.0
MAX_TEMPLATE = 1 << 20


def load_tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """The tokenizer that `data.tokenizer` names, with the template of `data.chat_template` if that is set."""
    settle_offline(config)
    name = config.data.tokenizer
    if name == "auto":
        name = config.model.name or BYTES
    tokenizer = build_bytes_tokenizer() if name == BYTES else _load_pretrained(name)
    if config.data.chat_template is not None:
        tokenizer.chat_template = _read_template(expanded(config.data.chat_template))
    _check_template(tokenizer.chat_template, name)
    return tokenizer


def _check_template(template: object, name: str) -> None:
    """Raise DataError if the template is not text or is too long: the time to parse one grows more than in proportion
    to its length."""
    texts = list(template.values()) if isinstance(template, dict) else [template] if template is not None else []
    for text in texts:
        wrong = "no text" if not isinstance(text, str) else "too long" if len(text) > MAX_TEMPLATE else None
        if wrong:
            raise DataError(f"the chat template of the tokenizer {name!r} is {wrong}", hint="set data.chat_template")


def quiet_transformers() -> None:
    """Turn off transformers' progress bars, and the messages of torchao, which transformers imports if it is
    installed."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for name in ("torchao", "torch.utils._pytree"):  # about kernels for absent GPUs, and about a change in torch
        logging.getLogger(name).setLevel(logging.ERROR)


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """The rows that an embedding needs for all IDs; more than the number of tokens if the IDs have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """16 hex digits that change with anything that changes IDs: the fast tokenizer's file or the chat template."""
    digest = hashlib.blake2b(_file_of(tokenizer), digest_size=8)
    digest.update(json.dumps(tokenizer.chat_template, sort_keys=True).encode())
    return digest.hexdigest()


def vocabulary_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """16 hex digits that change with anything that changes the IDs of plain text; a chat template does not."""
    return hashlib.blake2b(_file_of(tokenizer), digest_size=8).hexdigest()


def _file_of(tokenizer: PreTrainedTokenizerFast) -> bytes:
    file = json.loads(tokenizer.backend_tokenizer.to_str())
    del file["truncation"], file["padding"]  # settings of the last call
    return json.dumps(file, sort_keys=True).encode()


def build_bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 bytes and 4 special tokens, 260 in all. Text in composed form (NFC) is unchanged after
    encoding and decoding."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    # an export of the qwen2 family is always reopened as Qwen2Tokenizer, which applies NFC
    model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([PAD, TURN_START, TURN_END, END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, END_OF_TEXT],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _load_pretrained(name: str) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    folder = expanded(name)
    if name.startswith(("/", "./", "../", "~")) and not folder.is_dir():
        raise DataError(f"there is no tokenizer folder {folder.absolute()}", hint="check data.tokenizer and model.name")
    source = str(folder) if folder.is_dir() else name
    try:
        has_code = bool(get_tokenizer_config(source).get("auto_map"))
        tokenizer = None if has_code else AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and the hub client's errors
        raise DataError(
            f"the tokenizer {name!r} cannot be loaded: {str(error).strip().splitlines()[0] if str(error) else error!r}",
            hint=f"data.tokenizer takes a Hugging Face name (needs internet), a folder, or {BYTES}",
        ) from error
    if has_code:
        raise DataError(
            f"the tokenizer {name!r} has its own code (auto_map in its tokenizer_config.json), which is never run; "
            "what a tokenizer.json says is supported",
            hint="if its tokenizer.json is the whole tokenizer, take auto_map out of a copy of tokenizer_config.json",
        )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"the tokenizer {name!r} has no fast version, so tokens cannot be traced to the text",
            hint="convert it to a folder with a tokenizer.json",
        )
    return tokenizer


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the chat template {path.absolute()} cannot be read: {error}", where="data.chat_template"
        ) from None


# --- the Hub ---------------------------------------------------------------------------------------------------------


def hub_names(config: Config) -> list[str]:
    """Models, tokenizers and data sets of the config that come only from the Hub or its cache."""
    models = [name for name in (config.model.name, config.data.tokenizer) if name and name != "auto"]
    missing = [name for name in models if not expanded(name).is_dir()]
    sources = [s.path for s in as_sources([*config.data.train, *config.data.eval]) if not is_local(s.path)]
    return [name for name in (*missing, *sources) if not name.startswith(("builtin:", "/", ".", "~"))]


def is_hub_reachable() -> bool:
    """Whether the Hub's host accepts a connection; always True behind a proxy, which only the libraries can use."""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if address.scheme in getproxies():
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def settle_offline(config: Config) -> None:
    """Make the Hub's libraries use only their cache if the config needs the Hub and it cannot be reached."""
    if hub_names(config) and "HF_HUB_OFFLINE" not in os.environ and not is_hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
