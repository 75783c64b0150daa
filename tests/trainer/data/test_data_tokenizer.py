"""The tokenizer of bytes, and errors about other ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.support.ferry import REPO
from trainer.data.tokenize.tokenizer import (
    build_bytes_tokenizer,
    load_tokenizer,
    tokenizer_hash,
    vocab_size,
    vocabulary_hash,
)
from trainer.errors import DataError
from trainer.schema import Config, DataConfig, ModelConfig

TEXT = "héllo\n\tworld  日本 \U0001f600 e\u0301 don't\r\n 12 345"


def test_bytes_tokenizer_spends_one_token_per_byte():
    tokenizer = build_bytes_tokenizer()
    assert len(tokenizer) == 260
    assert len(tokenizer("日本")["input_ids"]) == 6
    assert tokenizer.decode(tokenizer("日本 \n é")["input_ids"]) == "日本 \n é"


def test_ids_with_gaps_need_more_rows_than_there_are_tokens():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert vocab_size(PreTrainedTokenizerFast(tokenizer_object=model)) == 10
    assert vocab_size(build_bytes_tokenizer()) == 260


def test_bytes_tokenizer_ends_turns_with_its_eos():
    tokenizer = build_bytes_tokenizer()
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert tokenizer("<|im_start|>")["input_ids"] == [257]


def test_chatml_text_of_two_turns():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text = build_bytes_tokenizer().apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3", "llama"])
def test_saved_bytes_tokenizer_reopens_as_the_same(tmp_path, model_type):
    tokenizer = build_bytes_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    if model_type:  # an export has a config beside it, and transformers looks at both
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_auto_takes_the_tokenizer_of_the_model_folder(tmp_path):
    build_bytes_tokenizer().save_pretrained(tmp_path)
    assert len(load_tokenizer(Config(model=ModelConfig(name=str(tmp_path))))) == 260


def test_auto_without_a_model_name_is_bytes():
    assert len(load_tokenizer(Config())) == 260


def test_template_file_replaces_the_template(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(Config(data=DataConfig(chat_template=str(path))))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False) == "é"


@pytest.mark.parametrize("make_folder", [True, False])
def test_folder_without_a_tokenizer_gives_one_error(tmp_path, make_folder):
    folder = tmp_path / "model"
    if make_folder:
        folder.mkdir()
    with pytest.raises(DataError) as error:
        load_tokenizer(Config(data=DataConfig(tokenizer=str(folder))))
    assert str(folder) in error.value.message
    assert "data.tokenizer" in error.value.hint


def test_unreachable_hub_gives_errors_without_retries():
    # a new process, because the libraries look at the environment once; nothing listens on port 1
    code = """
from trainer.data.rows.sources import read_conversations
from trainer.data.tokenize.tokenizer import load_tokenizer
from trainer.schema import Config, ModelConfig
config = Config(model=ModelConfig(name="some/model"))
for ask in (lambda: load_tokenizer(config), lambda: list(read_conversations("some/data"))):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__, error.message)
"""
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": "/nonexistent"}
    root = REPO
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    tokenizer, data = done.stdout.splitlines()
    assert tokenizer.startswith("DataError the tokenizer 'some/model' cannot be loaded")
    assert data.startswith("DataError the data set 'some/data' (split 'train') cannot be loaded")
    assert "Retry" not in done.stderr


def test_missing_template_file_is_named():
    with pytest.raises(DataError, match=r"none\.jinja") as error:
        load_tokenizer(Config(data=DataConfig(chat_template="none.jinja")))
    assert error.value.where == "data.chat_template"


def test_hash_changes_with_tokens_and_template_only(tmp_path):
    tokenizer = build_bytes_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_hash(tokenizer)
    more, other = build_bytes_tokenizer(), build_bytes_tokenizer()
    more.add_tokens(["<more>"])
    other.chat_template += " "
    assert len({tokenizer_hash(each) for each in (tokenizer, more, other)}) == 3
    assert vocabulary_hash(tokenizer) == vocabulary_hash(other) != vocabulary_hash(more)


def test_hash_is_that_of_the_tokenizer_however_it_was_last_called():
    tokenizer = build_bytes_tokenizer()
    before = tokenizer_hash(tokenizer), vocabulary_hash(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert (tokenizer_hash(tokenizer), vocabulary_hash(tokenizer)) == before
