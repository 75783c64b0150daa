"""Questions and answers from the docstrings of the running interpreter's standard library.

Real English text that every machine has. Source files are parsed, never imported: no code runs, nothing is downloaded.
The pairs depend on the Python version; their order and the split depend only on their names.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIN_ANSWER_CHARS = 20
MAX_ANSWER_CHARS = 1200
MAX_SIGNATURE_CHARS = 120
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3", "ensurepip"}
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class DocPair:
    """One question with its answer; `name` is dotted and starts with `module`."""

    module: str
    name: str
    question: str
    answer: str


@cache  # parsing takes a second, and the training and the held-out rows both come from it
def read_stdlib_pairs(folder: Path | None = None) -> tuple[DocPair, ...]:
    """All pairs of the library (or of `folder`), each answer once, in an order that depends only on the names."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    first: dict[str, DocPair] = {}
    with _without_collections():
        for path in module_paths(folder):
            for pair in _pairs_of_file(path, folder):
                first.setdefault(pair.answer, pair)  # posixpath and ntpath share docstrings: a copy would leak
    return tuple(sorted(first.values(), key=lambda pair: (_digest(pair.name), pair.name)))


def is_held_out(module: str, share: float) -> bool:
    """True for about `share` of all modules, always the same ones; a larger share includes those of a smaller one."""
    return int(_digest(module)[:8], 16) < share * 16**8


def module_paths(folder: Path) -> list[Path]:
    """Python files below `folder` in sorted order, without tests and installed packages."""
    found = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            # config-3.12-x86_64-linux-gnu and the like hold the build's own scripts
            if entry.name not in SKIPPED_FOLDERS and not entry.name.startswith("config-") and not entry.is_symlink():
                found += module_paths(entry)
        elif entry.suffix == ".py":
            found.append(entry)
    return found


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disables garbage collection: with the many short-lived nodes of syntax trees it costs more than parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _pairs_of_file(path: Path, folder: Path) -> Iterator[DocPair]:
    parts = path.relative_to(folder).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in library files
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # some files are invalid on purpose, some are for another Python version
        return
    yield from _pair(module, module, f"What is the module `{module}` for?", tree)
    yield from _pairs_of_body(module, module, tree.body)


def _pairs_of_body(module: str, prefix: str, body: list[ast.stmt]) -> Iterator[DocPair]:
    for node in body:
        if isinstance(node, Definition):
            name = f"{prefix}.{node.name}"
            yield from _pair(module, name, _question(name, node), node)
            if isinstance(node, ast.ClassDef):
                yield from _pairs_of_body(module, name, node.body)


def _pair(module: str, name: str, question: str, node: ast.Module | Definition) -> Iterator[DocPair]:
    answer = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
    if MIN_ANSWER_CHARS <= len(answer) <= MAX_ANSWER_CHARS:
        yield DocPair(module, name, question, answer)


def _question(name: str, node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return f"What is the class `{name}`?"
    signature = f"{name}({ast.unparse(node.args)})"
    if len(signature) > MAX_SIGNATURE_CHARS:
        signature = signature[: MAX_SIGNATURE_CHARS - 2] + "…)"
    return f"What does `{signature}` do?"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
