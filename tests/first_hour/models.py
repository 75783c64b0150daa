"""Folders of small models as Hugging Face writes them, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import tiny_decoder
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.export.model import write_export

VOCABULARY = 260


def write_model(folder: Path, **shape: Any) -> Path:
    """A model with random weights that transformers opens. They are large, and the head is its own: it does not say one
    token for ever."""
    decoder = tiny_decoder(**{"vocab_size": VOCABULARY, "tie_embeddings": False, **shape})
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach() * (10 if parameter.dim() > 1 else 1) for name, parameter in decoder.named_parameters()
    }
    write_export(folder, decoder.shape, tensors=tensors, tokenizer=build_bytes_tokenizer())
    return folder
