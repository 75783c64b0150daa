"""Public models' chat templates, word for word: what they render, and which of it is trained on.

tests/golden/*.txt show the text with the targets between ⟦ and ⟧, looked through by eye. The templates' own versions
with generation tags, which TRL ships, are another judge.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.chat_tokens import chat_tokenizer
from trainer.data.rows.messages import Row, build_row
from trainer.data.tokenize.chat import Encoded, encode
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.errors import DataError

HERE = Path(__file__).parent
PLAIN = ["chatml", "zephyr"]
WITH_TOOLS = ["qwen2.5", "qwen3", "llama3.2"]
END = {"zephyr": "</s>", "llama3.2": "<|eot_id|>"}

TURNS = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi, é?"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Write <|im_end|> twice"},
        {"role": "assistant", "content": "Two lines,\n\nas you see."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TOOLS = {
    "messages": [
        {"role": "user", "content": "Rain in Bern?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "dry, 21"},
        {"role": "assistant", "content": "No, it is dry."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "Now it rains."},
    ],
    "tools": [WEATHER],
}


def make_tokenizer(template: str, end: str = "<|im_end|>") -> Any:
    tokenizer = chat_tokenizer(template, end=end)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>", "<tool_call>")])
    return tokenizer


def of_model(name: str) -> Any:
    return make_tokenizer((HERE / "templates" / f"{name}.jinja").read_text(), END.get(name, "<|im_end|>"))


def of_trl(name: str) -> Any:
    return make_tokenizer((files("trl") / "chat_templates" / f"{name}.jinja").read_text(), "<|eot_id|>")


def make_row(record: dict[str, Any]) -> Row:
    return build_row(record, "messages", row_id="r")


def marked(tokenizer: Any, encoded: Encoded) -> str:
    """The text with every unbroken run of targets between ⟦ and ⟧."""
    parts, start = [], 0
    for index in range(1, len(encoded.ids) + 1):
        if index == len(encoded.ids) or encoded.is_target[index] != encoded.is_target[start]:
            text = tokenizer.decode(encoded.ids[start:index].tolist())
            parts.append(f"⟦{text}⟧" if encoded.is_target[start] else text)
            start = index
    return "".join(parts)


CASES = [(name, "turns", TURNS) for name in PLAIN + WITH_TOOLS] + [(name, "tools", TOOLS) for name in WITH_TOOLS]


@pytest.mark.parametrize(("name", "kind", "record"), CASES, ids=[f"{name}-{kind}" for name, kind, _ in CASES])
def test_targets_of_a_public_template_are_those_of_the_golden_file(name, kind, record):
    tokenizer = of_model(name)
    encoded = encode(make_row(record), tokenizer)
    assert marked(tokenizer, encoded) == (HERE / "golden" / f"{name}-{kind}.txt").read_text()


@pytest.mark.parametrize(("name", "kind", "record"), CASES, ids=[f"{name}-{kind}" for name, kind, _ in CASES])
def test_ids_are_those_of_transformers(name, kind, record):
    tokenizer = of_model(name)
    # the one change that is wanted: the date does not depend on the day
    tokenizer.chat_template = tokenizer.chat_template.replace('strftime_now("%d %b %Y")', '"26 Jul 2024"')
    row = make_row(record)
    ids = tokenizer.apply_chat_template(row.messages, tools=row.tools, tokenize=True, return_dict=True)["input_ids"]
    assert encode(row, of_model(name)).ids.tolist() == ids


@pytest.mark.parametrize("name", [*PLAIN, "qwen2.5", "llama3.2"])
def test_longer_conversation_begins_with_the_bytes_of_the_shorter(name):
    tokenizer = of_model(name)
    whole = encode(make_row(TURNS), tokenizer)
    for end in (3, 5):
        part = encode(make_row({"messages": TURNS["messages"][:end]}), tokenizer)
        assert whole.ids[: len(part.ids)].tobytes() == part.ids.tobytes()
        assert whole.is_target[: len(part.ids)].tobytes() == part.is_target.tobytes()


def test_llama_has_one_beginning_of_text():
    tokenizer = of_model("llama3.2")
    assert encode(make_row(TOOLS), tokenizer).ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(("plain", "tagged", "trimmed"), [("llama3", "llama3", 0), ("qwen2_5", "qwen2_5", 1)])
def test_targets_found_by_rendering_are_those_of_trl_with_generation_tags(plain, tagged, trimmed):
    tokenizer = of_trl(f"{tagged}_training")
    row = make_row(TURNS)
    out = tokenizer.apply_chat_template(
        row.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )  # fmt: skip
    ours = encode(row, of_trl(plain))
    assert ours.ids.tolist() == out["input_ids"]
    # TRL's tags for Qwen take in the newlines before and behind a turn, which the model does not write
    newline = tokenizer("\n")["input_ids"][0]
    theirs = list(out["assistant_masks"])
    for index in range(1, len(theirs)) if trimmed else ():
        first, last = not theirs[index - 1], index + 1 == len(theirs) or not theirs[index + 1]
        if theirs[index] and ours.ids[index] == newline and (first or last):
            theirs[index] = 0
    assert ours.is_target.astype(int).tolist() == theirs


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_written_as_text_or_with_nulls_render_like_objects(name):
    tokenizer = of_model(name)
    as_text = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    with_nulls = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "zip": None}}}
    messages = [dict(message) for message in TOOLS["messages"]]
    messages[1]["tool_calls"], messages[5]["tool_calls"] = [as_text], [with_nulls]
    row = make_row({"messages": messages, "tools": json.dumps([WEATHER])})
    assert encode(row, tokenizer).ids.tolist() == encode(make_row(TOOLS), tokenizer).ids.tolist()


@pytest.mark.parametrize("template", ["chatml", "tagged"])
def test_template_that_leaves_calls_out_is_an_error(template):
    tokenizer = build_bytes_tokenizer() if template == "tagged" else of_model(template)
    with pytest.raises(DataError, match=r'leaves out a call .* \(turn 1\): "weather"'):
        encode(make_row(TOOLS), tokenizer)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("weather()", "not a list of calls"),
        ([{"function": {"arguments": {}}}], "without the name"),
        ([{"name": "weather", "arguments": "{city"}], "arguments holds no JSON"),
        ([{"name": "weather", "arguments": [1]}], "not an object"),
    ],
)
def test_calls_of_another_form_are_an_error(calls, message):
    with pytest.raises(DataError, match=message):
        make_row({"messages": [TOOLS["messages"][0], {"role": "assistant", "tool_calls": calls}]})
