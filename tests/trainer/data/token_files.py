"""Token files, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.token_file import TokenFile
from trainer.data.tokenize.token_writer import TokenWriter


def document(ids, *, name: str = "d", targets=None) -> Encoded:
    is_target = np.ones(len(ids), dtype=bool) if targets is None else np.asarray(targets, dtype=bool)
    return Encoded(name, np.asarray(ids, dtype=np.int32), is_target)


def write(path: Path, docs, *, vocab_size: int = 151_936, has_targets: bool = False, tokenizer: str = "t1"):
    with TokenWriter(path, vocab_size=vocab_size, tokenizer=tokenizer, has_targets=has_targets) as writer:
        for doc in docs:
            writer.add(doc)
    return TokenFile.open(path)
