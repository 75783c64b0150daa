"""No key, column or word of a row is lost in silence: it is honoured, counted and told, or an error when it was a
target."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chat_tokens import chat_tokenizer
from tests.support.tiny import ALONE
from tests.trainer.data.test_data_chat import CHATML, LLAMA3, QWEN3, THREE_TURNS, target_texts
from trainer.data.loader import build_data
from trainer.data.rows.findings import MAX_FINDINGS, Findings
from trainer.data.rows.messages import Row, build_row
from trainer.data.tokenize.chat import encode
from trainer.data.tokenize.encode import content_key
from trainer.data.tokenize.tokenizer import CHATML_TEMPLATE, build_bytes_tokenizer
from trainer.errors import DataError
from trainer.schema import Config, DataConfig, TrainConfig

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
BYE = [{"role": "user", "content": "Bye?"}, {"role": "assistant", "content": "See you"}]


def of(messages: list[dict[str, Any]], **columns: Any) -> Row:
    return build_row({"messages": messages, **columns}, "messages", row_id="a.jsonl:7")


def marked(key: str, value: Any) -> list[dict[str, Any]]:
    """Two answers, the first of them marked."""
    return [HI[0], {**HI[1], key: value}, *BYE]


# --- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML, QWEN3, LLAMA3])
@pytest.mark.parametrize(
    ("key", "value"), [("weight", 0), ("weight", 0.0), ("train", False), ("training", False), ("loss", False)]
)
def test_message_that_is_marked_is_no_target_and_changes_no_id(template, key, value):
    tokenizer = chat_tokenizer(template)
    encoded, plain = encode(of(marked(key, value)), tokenizer), encode(of([*HI, *BYE]), tokenizer)
    assert encoded.ids.tolist() == plain.ids.tolist()
    assert target_texts(tokenizer, encoded) == target_texts(tokenizer, plain)[1:]
    assert encoded.remarks == ()
    assert content_key(of(marked(key, value))) == content_key(of([*HI, *BYE]))
    for yes in (1, True, None):
        assert target_texts(tokenizer, encode(of(marked(key, yes)), tokenizer)) == target_texts(tokenizer, plain)


@pytest.mark.parametrize("name", ["llama3_training", "qwen2_5_training", "phi3_training"])
def test_marks_take_their_turn_out_of_the_mask_that_transformers_gives_with_trl_templates(name):
    tokenizer = chat_tokenizer((files("trl") / "chat_templates" / f"{name}.jinja").read_text(), end="<|eot_id|>")
    how: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    whole = tokenizer.apply_chat_template([*HI, *BYE], **how)
    expected = np.array(whole["assistant_masks"])
    expected[: len(tokenizer.apply_chat_template(HI, tokenize=True, return_dict=True)["input_ids"])] = 0
    encoded = encode(of(marked("weight", 0)), tokenizer)
    assert encoded.ids.tolist() == whole["input_ids"]
    assert 0 < expected.sum() < sum(whole["assistant_masks"])
    assert encoded.is_target.astype(int).tolist() == expected.tolist()


def test_marks_hold_where_everything_is_a_target_and_behind_a_system_prompt():
    tokenizer = chat_tokenizer(CHATML)
    row = of(marked("weight", 0))
    for template in (CHATML, CHATML_TEMPLATE):
        tokenizer.chat_template = template
        encoded = encode(row, tokenizer, loss_on="all")
        masked = tokenizer.decode(encoded.ids[~encoded.is_target].tolist())
        assert masked == "Hello<|im_end|>"
        assert target_texts(tokenizer, encode(row, tokenizer, system_prompt="Be kind.")) == ["See you<|im_end|>"]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"weight": 0.5}, "weight is 0.5, neither 0 nor 1"),
        ({"weight": "0"}, 'weight is "0", neither 0 nor 1'),
        ({"train": [0]}, r"train is \[0\], neither"),
        ({"weight": 1, "train": False}, "marked as a target and as none"),
    ],
)
def test_other_mark_is_an_error_with_its_place(marks, message):
    with pytest.raises(DataError, match=message) as error:
        of([HI[0], HI[1] | marks])
    assert (error.value.where, "messages[1]" in error.value.message) == ("a.jsonl:7", True)


def test_mark_of_a_call_without_words_holds():
    row = of([HI[0], {"role": "assistant", "tool_calls": [{"name": "f"}], "weight": 0}, *BYE])
    assert (row.untrained, row.messages[1].keys()) == ((1,), {"role", "content", "tool_calls"})


def test_mark_that_asks_to_train_on_a_question_is_told():
    row = of([{**HI[0], "train": True}, {**HI[1], "train": True}])
    assert row.remarks == (("mark", "a mark that a user message is trained on: only the assistant's are"),)


@pytest.mark.parametrize(
    ("template", "roles"), [(QWEN3, "uaua"), (CHATML_TEMPLATE, "uaua"), (CHATML, "uauatau"), (CHATML, "sua")]
)
def test_last_turns_alone_are_those_behind_the_last_answered_question(template, roles):
    names = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    messages = [{"role": names[role], "content": f"{role}{place}"} for place, role in enumerate(roles)]
    tokenizer = chat_tokenizer(template)
    encoded = encode(of(messages), tokenizer, turns="last")
    question = roles.rstrip("u").rindex("u")
    wanted = [m["content"] for place, m in enumerate(messages) if place > question and m["role"] == "assistant"]
    assert [text.split("\n\n")[-1] for text in target_texts(tokenizer, encoded)] == [f"{w}<|im_end|>" for w in wanted]


# --- what a template leaves out --------------------------------------------------------------------------------------

THINK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "<think>\nadd again\n</think>\n\n6"},
]


def test_thoughts_of_an_earlier_turn_that_the_template_cuts_are_an_error_that_names_the_ways_out():
    tokenizer = chat_tokenizer(QWEN3)
    with pytest.raises(DataError, match=r'leaves out thoughts of an assistant turn .* \(turn 1\): "add"') as error:
        encode(of(THINK), tokenizer)
    assert error.value.where == "a.jsonl:7"
    # each way that the hint names
    ways = [
        encode(of(THINK), tokenizer, turns="last"),
        encode(of([THINK[0], THINK[1] | {"weight": 0}, *THINK[2:]]), tokenizer),
    ]
    for way, words in zip(ways, ("data.turns=last", "`weight: 0`"), strict=True):
        assert words in error.value.hint
        assert target_texts(tokenizer, way) == ["<think>\nadd again\n</think>\n\n6<|im_end|>"]
        assert way.remarks == (("left out", "thoughts of an assistant turn"),)
    assert "data.chat_template" in error.value.hint
    assert encode(of(THINK), chat_tokenizer(CHATML)).remarks == ()


NO_SYSTEM = CHATML.replace("{{ '<|im_start|>' + m.role", "{%- if m.role != 'system' -%}{{ '<|im_start|>' + m.role")
NO_SYSTEM = NO_SYSTEM.replace("'<|im_end|>\\n' }}\n{%- endfor", "'<|im_end|>\\n' }}{%- endif -%}\n{%- endfor", 1)
TOOL = {"role": "tool", "name": "sum", "content": "four"}


@pytest.mark.parametrize(
    ("template", "messages", "columns", "remarks"),
    [
        (CHATML, [{"role": "user", "content": " Hi\n\t you "}, HI[1]], {}, []),
        (LLAMA3, [{"role": "user", "content": " Hi\n\t you "}, HI[1]], {}, []),
        (NO_SYSTEM, HI, {"system": "Be brief."}, [("left out", "words of a system turn")]),
        (NO_SYSTEM, HI, {}, []),
        (CHATML, [HI[0], TOOL, HI[1]], {}, [("key", "the key 'name' of a message")]),
        (CHATML + "{# name #}", [HI[0], TOOL, HI[1]], {}, [("left out", "'name' of a tool turn")]),
        (CHATML, HI, {"tools": [{"name": "sum"}]}, [("left out", "a function of 'tools'")]),
        (CHATML, [HI[0] | {"id": 3, "at": None}, HI[1]], {}, [("key", "the key 'id' of a message")]),
        (CHATML.replace("m.role +", "m.role + m.id|default('') +"), [HI[0] | {"id": "u3"}, HI[1]], {}, []),
    ],
)
def test_what_the_template_does_not_show_is_told_and_space_is_no_loss(template, messages, columns, remarks):
    assert list(encode(of(messages, **columns), chat_tokenizer(template)).remarks) == remarks


@pytest.mark.parametrize(
    ("template", "message", "lost"),
    [
        (CHATML, {"reasoning_content": "I add."}, "'reasoning_content' of an assistant turn"),
        (CHATML_TEMPLATE, {"thinking": "I add."}, "'thinking' of an assistant turn"),
        (CHATML, {"tool_calls": [{"name": "add", "arguments": {}}]}, "a call of a function"),
        (
            CHATML.replace("+ m.content", "+ (m.tool_calls[0].function.name if m.tool_calls else '') + m.content"),
            {"tool_calls": [{"name": "add", "arguments": {"to": "the sum"}}]},
            "an argument of a call",
        ),
    ],
)
def test_target_that_the_template_does_not_show_is_an_error(template, message, lost):
    tokenizer = chat_tokenizer(template)
    with pytest.raises(DataError, match=f"leaves out {lost} that is trained on"):
        encode(of([HI[0], HI[1] | message]), tokenizer)
    untrained = of([HI[0], HI[1] | message | {"weight": 0}, *BYE])
    assert encode(untrained, tokenizer).remarks == (("left out", lost),)


def test_everything_is_a_target_so_a_lost_system_turn_is_an_error():
    with pytest.raises(DataError, match="leaves out words of a system turn that is trained on"):
        encode(of(HI, system="Be brief."), chat_tokenizer(NO_SYSTEM), loss_on="all")


# --- columns ---------------------------------------------------------------------------------------------------------

RECORDS = {
    "messages": {"messages": HI},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "prompt_completion": {"prompt": "Hi", "completion": "Hello"},
    "instruction_output": {"instruction": "Hi", "output": "Hello"},
    "question_answer": {"question": "Hi", "answer": "Hello"},
}


@pytest.mark.parametrize("schema", RECORDS)
def test_system_column_is_read_in_every_schema_and_the_others_are_told(schema):
    columns = {"system": "Be brief.", "tools": [], "history": [], "prompt": "Hi", "input": ""}
    row = build_row(columns | RECORDS[schema], schema, row_id="r")
    assert row.messages == [{"role": "system", "content": "Be brief."}, *HI]
    assert row.context == (2 if schema == "prompt_completion" else 0)
    others = {"prompt": "prompt_completion", "input": "instruction_output"}
    told = [(name, f"{name!r}, which data.schema={other} reads") for name, other in others.items() if other != schema]
    told = [("column", "'history'"), *(("column", what) for _, what in told)]
    assert list(row.remarks) == told


def test_system_column_that_repeats_the_system_turn_comes_once_and_no_text_is_an_error():
    turn = {"role": "system", "content": "Be brief."}
    assert of([turn, *HI], system="Be brief.").messages == [turn, *HI]
    with pytest.raises(DataError, match="system holds no text but"):
        of(HI, system={"a": 1})


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": "x"}], [{"type": "text", "text": "a"}, {"type": "image"}]]
)
def test_parts_that_are_no_text_are_refused_by_their_type(content):
    with pytest.raises(DataError, match=r"messages\[0\] has parts of the type .image"):
        of([{"role": "user", "content": content}, HI[1]])


# --- the account -----------------------------------------------------------------------------------------------------


def config_of(folder: Path, **data: Any) -> Config:
    rows: list[dict[str, Any]] = [{"messages": THREE_TURNS, "id": n, "source": "web"} for n in range(3)]
    rows.append({"messages": [HI[0] | {"at": 1}, HI[1]]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {"train": [str(folder / "rows.jsonl")], "eval_fraction": 0.0} | data
    return Config(data=DataConfig(**values), train=TrainConfig(micro_batch_size=1, steps=2))


def test_account_is_the_same_in_memory_in_a_run_folder_after_a_restart_and_of_a_stream(tmp_path):
    config = config_of(tmp_path)
    tokenizer = build_bytes_tokenizer()
    first = build_data(config, ALONE, tokenizer, run_dir=tmp_path / "run").report
    stream = replace(config, data=replace(config.data, streaming=True, max_eval_rows=1))
    others = [
        build_data(config, ALONE, tokenizer, run_dir=tmp_path / "run").report,
        build_data(config, ALONE, tokenizer).report,
        build_data(stream, ALONE, tokenizer).report,
    ]
    place = f"{tmp_path}/rows.jsonl"
    assert first.render()[-2:] == [
        f"note: columns that are not read: 'id' (3 rows), 'source' (3 rows); the first in {place}:1",
        f"note: the chat template does not read the key 'at' of a message: 1 rows, the first is {place}:4",
    ]
    assert [report.findings for report in others] == [first.findings] * 3


def test_last_turns_alone_give_other_tokens_than_the_run_has(tmp_path):
    config = config_of(tmp_path)
    tokenizer = build_bytes_tokenizer()
    whole = build_data(config, ALONE, tokenizer, run_dir=tmp_path / "run").report.train.target_tokens
    last = replace(config, data=replace(config.data, turns="last"))
    assert build_data(last, ALONE, tokenizer, run_dir=tmp_path / "run").report.train.target_tokens < whole


def test_account_is_bounded_where_each_row_has_columns_of_its_own():
    findings = Findings()
    for number in range(1000):
        findings.add([("column", f"'c{number}'")], f"r{number}")
    found = findings.list()
    assert (len(found), sum(one.rows for one in found)) == (MAX_FINDINGS + 1, 1000)
    assert (found[-1].what, found[-1].rows) == ("others", 1000 - MAX_FINDINGS)
