"""docs/config.md says what the schema says."""

from __future__ import annotations

import dataclasses

from trainer import schema
from trainer.config.accelerate import RULES
from trainer.config.docs import PAGE, field_docs, render_page
from trainer.config.keys import aliases, field_kinds, is_section, known_facts, known_keys


def test_page_is_what_the_schema_gives():
    assert PAGE.read_text(encoding="utf-8") == render_page(), "run `make docs`"


def test_every_field_has_a_docstring():
    docs = field_docs()
    fields = [
        (cls.__name__, name)
        for cls in vars(schema).values()
        if dataclasses.is_dataclass(cls)
        for name, kind in field_kinds(cls).items()
        if not is_section(kind)
    ]
    assert [field for field in fields if field not in docs] == []


def test_every_key_has_a_row_and_its_other_names_stand_in_it():
    rows = {line.split("`")[1]: line for line in render_page().splitlines() if line.startswith("| `")}
    assert set(known_keys()) <= set(rows)
    assert [name for name, key in aliases().items() if f"`{name}`" not in rows[key]] == []


def test_row_shows_type_limit_default_meaning_and_other_names():
    expected = (
        "| `train.keep_last` | a whole number; 0 or more | `2` | Complete checkpoints kept, the newest; 0: all. |"
        " `save_total_limit` |"
    )
    assert expected in render_page().splitlines()


def test_keys_of_an_entry_of_a_list_have_a_section_of_their_own():
    assert "## An entry of `data.train`" in render_page()
    assert ("SourceConfig", "weight") in field_docs()


def test_every_fsdp_key_of_accelerate_is_on_the_page_and_none_that_it_lacks():
    page = render_page()
    assert [name for name in RULES if name.startswith("fsdp_") and name != "fsdp_config" and name not in page] == []
    elsewhere = {name for facts in known_facts().values() for name in facts.elsewhere}
    named = {name for name in elsewhere if name.startswith(("fsdp_", "dynamo_"))}
    assert named - set(RULES) == set()
