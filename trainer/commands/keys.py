"""`train.py keys`: shows the part of docs/config.md about a config's keys in the shell. Imports no torch."""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap

import click

from trainer.commands.help import CONTEXT, Command
from trainer.config.docs import KeyDoc, key_docs
from trainer.console import write_json, write_line
from trainer.errors import UserError

MOST_WIDTH = 110

HELP = """Show the keys of a config and what they mean.

Each key is shown with its type, default, meaning and names in other tools. With WORD, the command shows the keys that
have a WORD in one of these names. If there is none, it shows the keys that have one in their meaning.

\b
Examples:
  python train.py keys lora.              # one section
  python train.py keys max_steps          # another tool's name of train.steps
  python train.py keys checkpoint --json

Exit codes: 0 shown; 2 no key has such a word.
"""


@click.command("keys", cls=Command, help=HELP, context_settings=CONTEXT)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def keys(words: tuple[str, ...], as_json: bool, debug: bool) -> None:
    docs = key_docs()
    found = matching(docs, words)
    if not found:
        near = difflib.get_close_matches(words[0], [doc.key.rpartition(".")[2] for doc in docs], n=3)
        hint = f"near it: {', '.join(near)}" if near else "without a word every key is shown"
        raise UserError(f"no key of a config has {' or '.join(map(repr, words))}", hint=hint)
    if as_json:
        write_json([{**doc._asdict(), "elsewhere": list(doc.elsewhere)} for doc in found])
        return
    width = min(MOST_WIDTH, shutil.get_terminal_size((MOST_WIDTH, 24)).columns)
    write_line(sys.stdout, "\n".join(render(doc, width) for doc in found))


def matching(docs: list[KeyDoc], words: tuple[str, ...]) -> list[KeyDoc]:
    """The keys whose names contain one of the words, else those whose meaning does; without words all keys."""
    wanted = [word.lower() for word in words]

    def has(text: str) -> bool:
        return not wanted or any(word in text.lower() for word in wanted)

    by_name = [doc for doc in docs if has(" ".join((doc.key, *doc.elsewhere)))]
    return by_name or [doc for doc in docs if has(doc.meaning)]


def render(doc: KeyDoc, width: int) -> str:
    """A key on its first line, with its meaning below."""
    default = f"[{doc.default}]" if doc.default else "(required)"
    elsewhere = f" Elsewhere: {', '.join(doc.elsewhere)}." if doc.elsewhere else ""
    about = textwrap.fill(
        doc.meaning + elsewhere, max(width, 40), initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    return f"{doc.key} {default}  {doc.kind}\n{about}"
