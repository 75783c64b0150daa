"""Makes docs/config.md from the schema: `python -m trainer.config.docs --write`; without --write it prints the page.

A key's meaning is the docstring below it in `trainer/schema/`; its type and default are the dataclass's. Its limit and
its names in other tools come from `key` beside the field, where the rules and the errors read them too.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from trainer import schema
from trainer.config.fields import describe
from trainer.config.fsdp1 import DROPPED_WORDS, render_words
from trainer.config.keys import DROPPED, field_kinds, is_section, known_facts
from trainer.schema import Config
from trainer.schema.key import NONE

PAGE = Path(__file__).parent.parent.parent / "docs" / "config.md"

HEAD = """\
# Every key of a config

Made from `trainer/schema/` by `make docs`: change it there.

A config is a `.py` file that defines `config = Config(...)` with these classes, or YAML with the same sections and
keys. Any key can be overridden on the command line by its dotted name: `train.steps=50`, `data.train=a.jsonl,b.jsonl`,
`target.env.NAME=value`, `optim.decay_steps=null`. An unknown key is an error that names the nearest one; a key that can
have no effect beside the others is either an error or one line before the run. `torchferry inspect CONFIG` shows what
a run of it would train on, and how (rows, memory, schedule). A file that says how your own program runs is a task file:
[tasks.md](tasks.md).

"Elsewhere" lists the names of the same thing in transformers, TRL, accelerate, FSDP1 or torchrun. They are not accepted
as keys; for most of them the error names the key to use.
"""

FSDP_WORDS = """\
## FSDP1's options, and what FSDP2 makes of them

`--fsdp-config FILE` reads a file of `accelerate config` as it is: `torchferry train CONFIG --fsdp-config FILE`, and
`torchferry CONFIG --fsdp-config FILE`. Its settings win over those of the config, and overrides win over both.

Five of these options were `parallel.*` keys in earlier versions: `parallel.backward_prefetch`,
`parallel.limit_all_gathers`, `parallel.use_orig_params`, `parallel.buffer_dtype` and `parallel.state_dict_type`. YAML
and the command line still accept them, with the meanings of this table. Remove them from a `.py` config.

| option or value | meaning here | elsewhere |
|---|---|---|
"""

FORMER_KEYS = """\
## Keys of earlier versions

YAML and the command line still accept these keys, and the five `parallel.*` keys
[above](#fsdp1s-options-and-what-fsdp2-makes-of-them). Remove them from a `.py` config. The former default of such a key
is skipped silently, because every config.yaml of an earlier version contains it.

| key | what its values come to |
|---|---|
"""


def render_page() -> str:
    sections = [(name, kind) for name, kind in field_kinds(Config).items() if is_section(kind)]
    own = [name for name, kind in field_kinds(Config).items() if not is_section(kind)]
    parts = [HEAD, _section("Top level", Config, "", only=own)]
    for name, kind in sections:
        parts.append(_section(f"`{name}`", kind, f"{name}."))
        parts += [_section(f"An entry of `{key}`", entry, "") for key, entry in _entries(kind, f"{name}.")]
    former = [f"| `{key}` | {gone.render()} |" for key, gone in DROPPED.items() if key not in DROPPED_WORDS]
    parts += [FSDP_WORDS + "\n".join(render_words()) + "\n", FORMER_KEYS + "\n".join(former) + "\n"]
    return "\n".join(parts)


def field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring that follows the field; fields that share a docstring all have it."""
    found: dict[tuple[str, str], str] = {}
    sections = {kind.__module__ for kind in vars(schema).values() if dataclasses.is_dataclass(kind)}
    for section in sorted(sections):
        for node in ast.parse(inspect.getsource(sys.modules[section])).body:
            if isinstance(node, ast.ClassDef):
                found |= {(node.name, field): text for field, text in _docs_of(node)}
    return found


def _docs_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for before, after in pairwise(node.body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield before.target.id, re.sub(r"(?<!=)\bNone\b", "null", " ".join(str(after.value.value).split()))


def _entries(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The sections that may be entries of a list, each with the first key that accepts it."""
    seen = set()
    for name, kind in field_kinds(cls).items():
        for entry in _sections_within(kind):
            if entry not in seen:
                seen.add(entry)
                yield f"{prefix}{name}", entry


def _sections_within(kind: Any) -> Iterator[Any]:
    for member in get_args(kind):
        if is_section(member):
            yield member
        else:
            yield from _sections_within(member)


class KeyDoc(NamedTuple):
    """A key's facts on the page, in plain text."""

    key: str
    kind: str
    """Its type and limit, in words."""
    default: str
    """In YAML; "" for a key that has none."""
    meaning: str
    elsewhere: tuple[str, ...]
    """Its names in other tools."""


def key_docs() -> list[KeyDoc]:
    """The KeyDoc of every key of a config, in the order of the page."""
    docs, found = field_docs(), []
    for name, kind in field_kinds(Config).items():
        prefix, cls = (f"{name}.", kind) if is_section(kind) else ("", Config)
        fields = [field for field in dataclasses.fields(cls) if prefix or field.name == name]
        found += [_key_doc(field, cls, f"{prefix}{field.name}", docs) for field in fields]
    return found


def _key_doc(field: Any, cls: Any, key: str, docs: Mapping[tuple[str, str], str]) -> KeyDoc:
    kind, facts = field_kinds(cls)[field.name], known_facts().get(key, NONE)
    words = describe(kind) + (f"; {facts.limit.words}" if facts.limit else "")
    meaning = docs.get((cls.__name__, field.name), "")
    return KeyDoc(key, words, _default(field), meaning, (*facts.aliases, *facts.elsewhere))


def _section(title: str, cls: Any, prefix: str, *, only: list[str] | None = None) -> str:
    docs, names = field_docs(), only or list(field_kinds(cls))
    fields = {field.name: field for field in dataclasses.fields(cls)}
    rows = [_row(_key_doc(fields[name], cls, f"{prefix}{name}", docs)) for name in names]
    head = ["| key | type | default | meaning | elsewhere |", "|---|---|---|---|---|"]
    about = " ".join((cls.__doc__ or "").split())
    return "\n".join([f"## {title}", "", about, "", *head, *rows, ""])


def _row(doc: KeyDoc) -> str:
    default = f"`{doc.default}`" if doc.default else "required"
    elsewhere = ", ".join(f"`{name}`" for name in doc.elsewhere)
    cells = [f"`{doc.key}`", doc.kind, default, doc.meaning, elsewhere]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    return _yaml(value)


def _yaml(value: object) -> str:
    """A default in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return "{}" if isinstance(value, Mapping) else str(value)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(render_page(), encoding="utf-8")
    else:
        sys.stdout.write(render_page())
