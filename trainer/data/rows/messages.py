"""Converts records of every known schema to one kind of row: a conversation with its tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainer.data.rows.findings import COLUMN, MARK, Remark
from trainer.errors import DataError
from trainer.schema.data import SCHEMA_KEYS, schema_of, unknown_columns
from trainer.words import shortened

Message = dict[str, Any]
"""`role`, `content` (a text), and the message's other keys: a template that names such a key gets it."""
Record = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool"}

MARK_HINT = "0 or false: this message is no target; 1 or true: it is"
KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Keys of a message, in addition to role and content, that chat templates read; each template decides what to show."""

MARKS = ("weight", "train", "training", "trainable", "loss")
"""Keys that mark a message as a target (1) or not (0), as OpenAI, Mistral, axolotl and ms-swift write them."""

EVERY_SCHEMA = ("system", "tools")
OPTIONAL_KEYS = {"instruction_output": ("input",)}


@dataclass(frozen=True)
class Row:
    """One conversation. The first `context` messages and those with an index in `untrained` are never targets. `tools`:
    the functions that the model may call; `remarks`: the parts of the record that are not read."""

    id: str
    messages: list[Message]
    context: int = 0
    tools: list[Record] | None = None
    untrained: tuple[int, ...] = ()
    remarks: tuple[Remark, ...] = ()


def detect_schema(record: Record, *, where: str) -> str:
    """The schema that fits the keys of a first row."""
    schema = schema_of(record)
    if schema is None:
        what, hint = unknown_columns(record)
        raise DataError(what, where=where, hint=hint)
    return schema


def build_row(record: Record, schema: str, *, row_id: str) -> Row:
    """The conversation in a record of the given schema."""
    missing = [key for key in SCHEMA_KEYS[schema] if key not in record]
    if missing:
        raise DataError(
            f"the row has no {' and no '.join(map(repr, missing))}; its keys are {', '.join(map(repr, record))}",
            where=row_id,
            hint=f"data.schema={schema} needs them in every row",
        )
    messages, context = _BUILDERS[schema](record, row_id)
    system = _text(record.get("system") or "", "system", row_id)
    if system.strip() and messages[0] != (turn := {"role": "system", "content": system}):
        messages, context = [turn, *messages], context + 1 if context else 0
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise DataError("the row holds no text", where=row_id, hint="remove it")
    remarks = _unread_columns(schema, tuple(record)) + tuple(_marks_without_effect(messages))
    weights = [message.pop(MARKS[0], 1) for message in messages]
    untrained = tuple(index for index, weight in enumerate(weights) if weight == 0)
    return Row(row_id, messages, context, _tools(record.get("tools"), row_id), untrained, remarks)


@lru_cache(maxsize=256)  # nearly all rows of a source have the same columns
def _unread_columns(schema: str, columns: tuple[str, ...]) -> tuple[Remark, ...]:
    read = {*SCHEMA_KEYS[schema], *OPTIONAL_KEYS.get(schema, ()), *EVERY_SCHEMA}
    return tuple((COLUMN, _column(name)) for name in columns if name not in read)


def _column(name: str) -> str:
    """The column's name, with the schema that would read it."""
    others = [other for other, keys in SCHEMA_KEYS.items() if name in (*keys, *OPTIONAL_KEYS.get(other, ()))]
    return f"{name!r}, which data.schema={others[0]} reads" if others else repr(name)


def _marks_without_effect(messages: list[Message]) -> Iterator[Remark]:
    for message in messages:
        if message.get(MARKS[0]) == 1 and message["role"] != "assistant":
            yield MARK, f"a mark that a {message['role']} message is trained on: only the assistant's are"


# --- schemas ---------------------------------------------------------------------------------------------------------


def _from_messages(record: Record, row_id: str) -> tuple[list[Message], int]:
    return _messages(record["messages"], "messages", row_id), 0


def _from_conversations(record: Record, row_id: str) -> tuple[list[Message], int]:
    return _messages(record["conversations"], "conversations", row_id), 0


def _from_prompt_completion(record: Record, row_id: str) -> tuple[list[Message], int]:
    prompt = _turns(record["prompt"], "prompt", "user", row_id)
    completion = _turns(record["completion"], "completion", "assistant", row_id)
    return prompt + completion, len(prompt)


def _from_instruction_output(record: Record, row_id: str) -> tuple[list[Message], int]:
    instruction = _text(record["instruction"], "instruction", row_id)
    extra = _text(record.get("input") or "", "input", row_id)
    question = f"{instruction}\n\n{extra}" if extra else instruction
    return question_answer(question, _text(record["output"], "output", row_id)), 0


def _from_question_answer(record: Record, row_id: str) -> tuple[list[Message], int]:
    question = _text(record["question"], "question", row_id)
    return question_answer(question, _text(record["answer"], "answer", row_id)), 0


_BUILDERS: dict[str, Callable[[Record, str], tuple[list[Message], int]]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "prompt_completion": _from_prompt_completion,
    "instruction_output": _from_instruction_output,
    "question_answer": _from_question_answer,
}


def question_answer(question: str, answer: str) -> list[Message]:
    """A conversation of two turns."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _turns(value: Any, key: str, role: str, row_id: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, key, row_id)}]
    return _messages(value, key, row_id)


def _messages(value: Any, key: str, row_id: str) -> list[Message]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # from a CSV file, which has no lists
        value = _json_object(value, key, row_id)
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} is {shorten(value)}, not a list of messages", where=row_id)
    return [_message(item, f"{key}[{index}]", row_id) for index, item in enumerate(value)]


def _message(item: Any, key: str, row_id: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{key} is {shorten(item)}, not a message", where=row_id)
    read = ("role", "content") if "role" in item else ("from", "value")
    role, content = item.get(read[0]), item.get(read[1])
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"{key} has the unknown role {role!r}", where=row_id, hint=f"known roles: {known}")
    kept = {name: value for name in KEPT_KEYS if (value := _without_nulls(item.get(name)))}
    if others := item.keys() - {*read, *KEPT_KEYS}:
        kept |= _other_keys({name: item[name] for name in item if name in others}, key, row_id)
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{key}.tool_calls", row_id)
        content = content or ""  # a call often comes without words
    return {"role": SHAREGPT_ROLES[role], "content": _text(content, key, row_id)} | kept


def _other_keys(item: Record, key: str, row_id: str) -> Message:
    """The keys of a message that are not read here, and under `weight` whether it is marked as a target."""
    others = {name: value for name, value in item.items() if value is not None}
    marks = {name: others.pop(name) for name in MARKS if name in others}
    for name, value in marks.items():
        if value not in (0, 1):
            raise DataError(f"{key}.{name} is {shorten(value)}, neither 0 nor 1", where=row_id, hint=MARK_HINT)
    if len({int(value) for value in marks.values()}) > 1:
        raise DataError(f"{key} is marked as a target and as none: {shorten(marks)}", where=row_id, hint=MARK_HINT)
    if "role" in others or "content" in others:  # beside `from` and `value`
        raise DataError(f"{key} has both value and content", where=row_id, hint="keep role and content")
    return others | dict.fromkeys(MARKS[:1] if marks else (), int(all(marks.values())))


def _text(value: Any, key: str, row_id: str) -> str:
    """`value` when it is a string; the joined text when it is a list of {"type": "text"} parts."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise DataError(f"{key} holds half a surrogate pair, which is no text", where=row_id, hint="remove the row")
        return value
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(_text(part.get("text"), key, row_id) for part in value)
    if isinstance(value, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in value):
        kinds = {str(part.get("type")) for part in value if isinstance(part, dict)} - {"text"}
        named = shorten(", ".join(sorted(kinds)))
        raise DataError(f"{key} has parts of the type {named}", where=row_id, hint="only text can be trained on")
    raise DataError(f"{key} holds no text but {shorten(value)}", where=row_id, hint="only text can be trained on")


def _tool_calls(value: Any, key: str, row_id: str) -> list[Record]:
    """The calls as transformers' templates need them: a list of {"type", "function": {"name", "arguments": object}}."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{key} is {shorten(value)}, not a list of calls", where=row_id)
    return [_tool_call(call, f"{key}[{index}]", row_id) for index, call in enumerate(value)]


def _tool_call(call: Any, key: str, row_id: str) -> Record:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{key} is {shorten(call)}, without the name of a function", where=row_id)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form; a template would quote the text a second time
        arguments = _json_object(arguments, f"{key}.arguments", row_id)
    if not isinstance(arguments, dict):
        raise DataError(f"{key}.arguments is {shorten(arguments)}, not an object", where=row_id)
    outer = {name: call[name] for name in ("id",) if name in call}
    return {"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any, row_id: str) -> list[Record] | None:
    """The row's functions as JSON schemas. `value`: a list, or a JSON text of one."""
    if isinstance(value, str) and value.strip():
        value = _json_object(value, "tools", row_id)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"tools is {shorten(value)}, not a list of function schemas", where=row_id)
    return [_without_nulls(tool) for tool in value]


def _json_object(text: str, key: str, row_id: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key} holds no JSON: {error}", where=row_id) from None


def _without_nulls(value: Any) -> Any:
    """`value` without the keys that are null: Arrow gives every call the arguments of all the others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def shorten(value: Any) -> str:
    """`value` as JSON of at most 80 characters, for messages."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), 80)
