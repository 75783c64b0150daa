"""The files that a setup command depends on: if one of them changes, the setup runs again."""

from __future__ import annotations

import itertools
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from deployer.agent.host.files import blake2b
from deployer.agent.job.plan import Setup

READS: Mapping[str, tuple[str, ...]] = {
    "make": ("Makefile", "makefile", "GNUmakefile"),
    "uv": ("pyproject.toml", "uv.lock"),
    "poetry": ("pyproject.toml", "poetry.lock"),
    "pdm": ("pyproject.toml", "pdm.lock"),
}
"""Files that programs read without an argument."""
_OF_BUILD = re.compile(
    r"(?:^|/)(?:pyproject\.toml|setup\.py|setup\.cfg|CMakeLists\.txt|[^/]+\.(?:c|cc|cpp|cu|cuh|h|hpp|pyx|rs))\Z"
)
"""Files of a folder installed with `-e` that matter; its Python files are used in place."""
_SEPARATORS = frozenset(("", ";", "&", "&&", "|", "||", "(", "{", "!", "then", "do", "else", "\n"))


def make_setup(command: str, timeout_s: float, files: Mapping[str, str]) -> Setup:
    """`files`: path -> content hash, of the files that are sent."""
    named = {path: files[path] for path in named_paths(command, files)}
    return Setup(
        command, blake2b(json.dumps([command, named], sort_keys=True).encode(), digest_size=20).hexdigest(), timeout_s
    )


def named_paths(command: str, files: Mapping[str, str]) -> list[str]:
    """The files that a word of the command names, or that are in a folder that a word names."""
    found: set[str] = set()
    names = [posixpath.normpath(name) for name in _names(command)]
    patterns = [name.split("/") for name in names if re.search(r"[*?\[]", name)]
    plain, editable = set(names), set(_editable(command))
    for path in files:
        parts = path.split("/")
        tops = {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        is_named = "." in plain - editable or bool(tops & (plain - editable))
        is_of_build = "." in editable or bool(tops & editable)
        if (
            is_named
            or any(_matches(parts, pattern) for pattern in patterns)
            or (is_of_build and _OF_BUILD.search(path))
        ):
            found.add(path)
    return sorted(found)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether a shell pattern matches this path or a folder above it."""
    return len(parts) >= len(pattern) and all(map(fnmatchcase, parts, pattern))


def _names(command: str) -> Iterator[str]:
    """The words that may be paths, also after `=`, `@` or the letter of an option."""
    before = ""
    for word in _words(command):
        if word in READS and (before in _SEPARATORS or "=" in before):
            yield from READS[word]
        for text in (word, word.partition("=")[2], word.lstrip("@<>"), word[2:] if re.match(r"-\w[^-]", word) else ""):
            is_source = text == "." and before in _SEPARATORS  # the shell's own `. FILE`
            if text and not is_source:
                yield text.partition("[")[0] if re.match(r"\.?[^*?\[]*\[[\w,-]+\]\Z", text) else text  # .[extra]
                yield text
        before = word


def _editable(command: str) -> Iterator[str]:
    words = _words(command)
    for before, word in itertools.pairwise(words):
        if before in ("-e", "--editable"):
            yield posixpath.normpath(word.partition("[")[0])


def _words(command: str) -> list[str]:
    """The command as a shell splits it, and the pieces between other shell characters: `$(cat x)` names x."""
    try:
        lexer = shlex.shlex(command.replace("\n", " ; "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        words = list(lexer)
    except ValueError:  # a quote without an end: the shell will say so
        words = command.split()
    pieces = [piece for word in words if re.search(r"[\s;&|<>()`'\"$]", word) for piece in _PIECES.findall(word)]
    return [*words, *pieces]


_PIECES = re.compile(r"[^\s;&|<>()`'\"$]+")
