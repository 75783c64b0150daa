"""Conversations from files, data set names and the built-in text, whatever their schema, as one kind of row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config import LOCAL_STARTS
from trainer.config_rules import LOCAL_SUFFIXES
from trainer.data.stdlib_docs import is_held_out, read_stdlib_pairs
from trainer.errors import DataError

STDLIB_DOCS = "builtin:stdlib-docs"
TRAIN, HELD_OUT = "train", "test"
"""The two splits of the built-in text."""

Message = dict[str, str]
Record = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool"}

SCHEMA_KEYS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction_output": ("instruction", "output"),
    "question_answer": ("question", "answer"),
}
"""Keys that each schema must have; `auto` takes the first schema of this order that fits."""


@dataclass(frozen=True)
class Row:
    """One conversation: `messages` of {"role", "content"}; the first `context` of them are never targets."""

    id: str
    messages: list[Message]
    context: int = 0


def read_conversations(
    spec: str, *, split: str = TRAIN, schema: str = "auto", limit: int | None = None, held_out_share: float = 0.05
) -> list[Row]:
    """The first `limit` conversations of `spec`, in its own order.

    `spec`: a .jsonl, .jsonl.gz, .json (list) or .parquet file, a Hugging Face data set (`name` or `name:config`) or a
    folder that `datasets` can load, or `builtin:stdlib-docs`. `split` names a split of data sets and of the built-in
    text, where "test" is `held_out_share` of the modules. Raises DataError for anything that cannot be read.
    """
    if spec.startswith("builtin:"):
        return _read_builtin(spec, split, held_out_share)[:limit]
    records = list(islice(_read_records(spec, split), limit))
    if not records:
        raise DataError(f"{spec} has no rows", where=_shown(spec))
    if schema == "auto":
        schema = detect_schema(records[0][1], where=records[0][0])
    return [build_row(record, schema, row_id=row_id) for row_id, record in records]


def detect_schema(record: Record, *, where: str) -> str:
    """The schema that the keys of a first row show."""
    for schema, keys in SCHEMA_KEYS.items():
        if all(key in record for key in keys):
            return schema
    known = "; ".join(f"{' + '.join(keys)}" for keys in SCHEMA_KEYS.values())
    raise DataError(
        f"no known schema has the keys {', '.join(map(repr, record)) or '(none)'}",
        where=where,
        hint=f"known: {known}; rename the columns or set data.schema",
    )


def build_row(record: Record, schema: str, *, row_id: str) -> Row:
    """The conversation that a record of the given schema holds."""
    missing = [key for key in SCHEMA_KEYS[schema] if key not in record]
    if missing:
        raise DataError(
            f"the row has no {' and no '.join(map(repr, missing))}; its keys are {', '.join(map(repr, record))}",
            where=row_id,
            hint=f"data.schema={schema} needs them in every row",
        )
    messages, context = _BUILDERS[schema](record, row_id)
    if not any(message["content"].strip() for message in messages):
        raise DataError("the row holds no text", where=row_id, hint="remove it")
    return Row(row_id, messages, context)


# --- schemas ---------------------------------------------------------------------------------------------------------


def _from_messages(record: Record, row_id: str) -> tuple[list[Message], int]:
    return _messages(record["messages"], "messages", row_id), 0


def _from_conversations(record: Record, row_id: str) -> tuple[list[Message], int]:
    messages = _messages(record["conversations"], "conversations", row_id)
    system = record.get("system")
    if isinstance(system, str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    return messages, 0


def _from_prompt_completion(record: Record, row_id: str) -> tuple[list[Message], int]:
    prompt = _turns(record["prompt"], "prompt", "user", row_id)
    completion = _turns(record["completion"], "completion", "assistant", row_id)
    return prompt + completion, len(prompt)


def _from_instruction_output(record: Record, row_id: str) -> tuple[list[Message], int]:
    instruction = _text(record["instruction"], "instruction", row_id)
    extra = _text(record.get("input") or "", "input", row_id)
    question = f"{instruction}\n\n{extra}" if extra else instruction
    return _question_answer(question, _text(record["output"], "output", row_id)), 0


def _from_question_answer(record: Record, row_id: str) -> tuple[list[Message], int]:
    question = _text(record["question"], "question", row_id)
    return _question_answer(question, _text(record["answer"], "answer", row_id)), 0


_BUILDERS: dict[str, Callable[[Record, str], tuple[list[Message], int]]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "prompt_completion": _from_prompt_completion,
    "instruction_output": _from_instruction_output,
    "question_answer": _from_question_answer,
}


def _question_answer(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _turns(value: Any, key: str, role: str, row_id: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, key, row_id)


def _messages(value: Any, key: str, row_id: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} is {_short(value)}, not a list of messages", where=row_id)
    return [_message(item, f"{key}[{index}]", row_id) for index, item in enumerate(value)]


def _message(item: Any, key: str, row_id: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"{key} is {_short(item)}, not a message", where=row_id)
    role, content = (item["role"], item.get("content")) if "role" in item else (item.get("from"), item.get("value"))
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"{key} has the unknown role {role!r}", where=row_id, hint=f"known roles: {known}")
    if item.get("tool_calls"):
        raise DataError(f"{key} has tool calls, which are not supported", where=row_id, hint="write them as text")
    return {"role": SHAREGPT_ROLES[role], "content": _text(content, key, row_id)}


def _text(value: Any, key: str, row_id: str) -> str:
    """`value` when it is a string; the joined text when it is a list of {"type": "text"} parts."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise DataError(f"{key} holds half a surrogate pair, which is no text", where=row_id, hint="remove the row")
        return value
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(_text(part.get("text"), key, row_id) for part in value)
    raise DataError(f"{key} holds no text but {_short(value)}", where=row_id, hint="only text can be trained on")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:80] + "…"


# --- where records come from -----------------------------------------------------------------------------------------


def is_local(spec: str) -> bool:
    """Whether `spec` can only mean a file or folder of this machine, never the name of a data set."""
    return spec.startswith(LOCAL_STARTS) or spec.endswith(LOCAL_SUFFIXES) or Path(spec).exists()


def _shown(spec: str) -> str:
    return str(Path(spec).expanduser().absolute()) if is_local(spec) else spec


def _read_records(spec: str, split: str) -> Iterator[tuple[str, Record]]:
    if not is_local(spec):
        return _read_dataset(spec, split)
    path = Path(spec).expanduser()
    if not path.exists():
        raise DataError(f"there is no file {path.absolute()}", hint="check data.train and data.eval")
    if path.is_dir():
        return _read_dataset(str(path), split)
    if spec.endswith(".parquet"):
        return _read_parquet(path, spec)
    if spec.endswith((".json", ".json.gz")):
        return _read_json_list(path, spec)
    if spec.endswith((".jsonl", ".jsonl.gz")):
        return _read_json_lines(path, spec)
    raise DataError(f"{path.absolute()} is no kind of file that can be read", hint="use .jsonl, .json or .parquet")


def _read_json_lines(path: Path, spec: str) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(_read_lines(path), start=1):
        if line.strip():
            yield f"{spec}:{number}", _record(_parse_json(line, f"{spec}:{number}"), f"{spec}:{number}")


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.absolute()} cannot be read: {error}") from None


def _read_json_list(path: Path, spec: str) -> Iterator[tuple[str, Record]]:
    value = _parse_json(b"".join(_read_lines(path)), spec)
    if not isinstance(value, list):
        raise DataError("the file holds no list of rows", where=_shown(spec), hint="one object a line is .jsonl")
    for index, item in enumerate(value):
        yield f"{spec}[{index}]", _record(item, f"{spec}[{index}]")


def _parse_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}", where=where) from None
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}" if b"\n" in data.rstrip() else where
        raise DataError(f"not JSON: {error.msg} at column {error.colno}", where=place) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise DataError(f"not readable JSON: {error}", where=where) from None


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"the row is {_short(value)}, not an object", where=where)
    return value


def _read_parquet(path: Path, spec: str) -> Iterator[tuple[str, Record]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            index = 0
            for part in file.iter_batches():
                for record in part.to_pylist():
                    yield f"{spec}[{index}]", record
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable Parquet file: {error}", where=_shown(spec)) from None


def _read_dataset(spec: str, split: str) -> Iterator[tuple[str, Record]]:
    import datasets

    name, _, config = spec.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the library raises its own, the hub client's, OSError and ValueError alike
        raise DataError(
            f"the data set {spec!r} (split {split!r}) cannot be loaded: {_first_line(error)}",
            hint="without internet use a file; a configuration is written as name:config; "
            "splits are data.train_split and data.eval_split",
        ) from error
    for index, record in enumerate(dataset):
        yield f"{spec}[{index}]", record


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _read_builtin(spec: str, split: str, held_out_share: float) -> list[Row]:
    if spec != STDLIB_DOCS:
        raise DataError(f"there is no {spec}", hint=f"the one built-in text is {STDLIB_DOCS}")
    rows = [
        Row(f"{spec}[{pair.name}]", _question_answer(pair.question, pair.answer))
        for pair in read_stdlib_pairs()
        if is_held_out(pair.module, held_out_share) == (split != TRAIN)
    ]
    if not rows:
        raise DataError(
            f"{spec} has no rows for the split {split!r} with {held_out_share:.0%} of its modules held out",
            hint="change data.eval_fraction",
        )
    return rows
