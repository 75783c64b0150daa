"""What reads the files of somebody else says at each call that it runs none of their code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
SAFE = {
    "from_pretrained": "trust_remote_code=False",
    "from_config": "trust_remote_code=False",
    "load_dataset": "trust_remote_code=False",
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "numpy.load": "allow_pickle=False",
    "dcp.load": "storage_reader=PlainReader(path)",
}
"""The last name of a call, or its last two, and what it must say."""
NEVER = {
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "pickle._Unpickler",
        "dill.load",
        "dill.loads",
        "joblib.load",
        "marshal.loads",
    ),
    *("shelve.open", "read_pickle", "FileSystemReader", "AutoConfig", "get_class_from_dynamic_module"),
}
"""Names that stand nowhere, called or not."""
BUILTIN = {"eval", "exec"}
ALLOWED = {
    ("trainer/checkpoint/reader.py", "FileSystemReader"): "PlainReader is made of it, with a reading of its own",
    ("trainer/checkpoint/reader.py", "pickle._Unpickler"): "what it may build is listed there",
    ("trainer/config/files.py", "exec"): "a config is the user's own program",
    ("trainer/export/adapter.py", "from_pretrained"): "a class of transformers by name, and an adapter that we wrote",
    ("trainer/saver/messages.py", "pickle.loads"): "between two processes of ours, over a socket of their own",
}


def sources() -> list[Path]:
    folders = [path for name in ("trainer", "deployer", "bench") for path in (REPO / name).rglob("*.py")]
    return sorted([*folders, *REPO.glob("*.py")])


def unsafe(source: str) -> Iterator[str]:
    """The names in a source that read what may hold code, without the word that keeps it from running."""
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        names = _names(node)
        if isinstance(node, ast.Name) and id(node) in called and names & BUILTIN:
            yield node.id
        if names & NEVER:
            yield max(names & NEVER)
        for name in names & SAFE.keys():
            call = called.get(id(node))
            said = {ast.unparse(keyword) for keyword in call.keywords} if call else set()
            if SAFE[name] not in said:
                yield name
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "weights_only", "allow_pickle"):
            word = f"{node.arg}={ast.unparse(node.value)}"
            if word not in SAFE.values():
                yield word


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        inner = _names(node.value)
        return {node.attr, *(f"{name}.{node.attr}" for name in inner if "." not in name)}
    if isinstance(node, ast.ImportFrom):
        return {name for alias in node.names for name in (alias.name, f"{node.module}.{alias.name}")}
    return set()


def test_no_call_reads_foreign_files_without_the_word_that_keeps_their_code_from_running() -> None:
    found = {(str(path.relative_to(REPO)), name) for path in sources() for name in unsafe(path.read_text())}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "AutoTokenizer.from_pretrained(folder)",
        "AutoModel.from_pretrained(folder, trust_remote_code=None)",
        "AutoModel.from_pretrained(folder, trust_remote_code=config.trust)",
        "read = AutoModel.from_pretrained",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "datasets.load_dataset(name)",
        "from torch import load",
        "from pickle import loads",
        "pickle.load(file)",
        "class Reader(pickle.Unpickler): pass",
        "dcp.load(state, checkpoint_id=path)",
        "torch.distributed.checkpoint.FileSystemReader(path)",
        "eval(text)",
        "call(**{'a': 1}, trust_remote_code=True)",
    ],
)
def test_scan_finds(source: str) -> None:
    assert list(unsafe(source))


@pytest.mark.parametrize(
    "source",
    [
        "AutoModel.from_pretrained(folder, trust_remote_code=False)",
        "torch.load(file, map_location='cpu', weights_only=True)",
        "model.eval()",
        "json.load(file)",
        "dcp.load(state, storage_reader=PlainReader(path))",
    ],
)
def test_scan_lets_pass(source: str) -> None:
    assert not list(unsafe(source))
