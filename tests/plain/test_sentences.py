"""The wording of the README and the pages for users: short sentences, and no phrases that are hard to read."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.ferry import REPO

LONGEST = 30
MOST_WORDS = 1000
README = REPO / "README.md"
NAMES = (
    "using",
    "troubleshooting",
    "security",
    "hosts",
    "multi-node",
    "tasks",
    "seeing",
    "automation",
    "neighbours",
    "simulation",
)
PAGES = [README, *(REPO / "docs" / f"{name}.md" for name in NAMES)]
HARD_TO_READ = ("of its own", "of their own", "for so long", "what is none")


def prose(text: str) -> list[str]:
    """The paragraphs, list items and headings: without code blocks, tables, remarks and the addresses of links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts = re.split(r"\n\s*\n|\n(?= *(?:[*#]|\d+\.) )", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(text: str) -> list[str]:
    """Split at `.`, `!` or `?` before a blank. Text in backquotes counts as one word."""
    found = []
    for part in prose(text):
        part = re.sub(r"`[^`]*`", "CODE", part)
        ends = [0, *(match.end() for match in re.finditer(r"[.!?][*)]*\s", part)), len(part)]
        found += [part[begin:end].strip() for begin, end in pairwise(ends)]
    return [sentence for sentence in found if sentence]


def words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


def test_no_sentence_of_the_readme_is_over_thirty_words() -> None:
    found = sentences(README.read_text())
    assert len(found) > 40
    assert [sentence for sentence in found if len(words(sentence)) > LONGEST] == []


def test_prose_of_the_readme_stays_short() -> None:
    assert sum(len(part.split()) for part in prose(README.read_text())) < MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_phrase_that_is_hard_to_read(page: Path) -> None:
    text = " ".join(page.read_text().lower().split())
    assert [phrase for phrase in HARD_TO_READ if phrase in text] == []


def test_sentences_are_counted_without_code_tables_and_addresses() -> None:
    text = "# A head\n\nOne `a b. c` [two](x y). Three!\n* Four.\n\n| no | row |\n\n```console\n$ no. code\n```\n"
    assert sentences(text) == ["# A head", "One CODE [two].", "Three!", "* Four."]
    assert [len(words(sentence)) for sentence in sentences(text)] == [2, 3, 1, 1]
