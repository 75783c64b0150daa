"""Folders that somebody else made: what reads them with too much trust makes a folder that should not be there."""

from __future__ import annotations

import json
import os
import pickle
import pty
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from tests.support.saves import change_state
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.models.families.decoder_shape import shape_to_hf_config

TEMPLATE = "{{{{ cycler.__init__.__globals__.os.mkdir({!r}) }}}}"


class Trap:
    """Unpickled without a limit it makes the folder `sprung`."""

    def __init__(self, sprung: Path) -> None:
        self._sprung = str(sprung)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._sprung,)


def write_code(folder: Path, sprung: Path) -> None:
    """The code that an auto_map names."""
    (folder / "code_of_its_own.py").write_text(
        f"import os\nos.mkdir({str(sprung)!r})\n"
        "from transformers import PreTrainedConfig, PreTrainedTokenizerFast\n"
        "class Config(PreTrainedConfig):\n    model_type = 'strange'\n"
        "class Words(PreTrainedTokenizerFast):\n    pass\n"
    )


def write_model(folder: Path, sprung: Path, shape: Any, *, model_type: str = "qwen3", code: bool = False) -> Path:
    """A model's config and tokenizer; its weights are a pickle."""
    build_bytes_tokenizer().save_pretrained(folder)
    config = {**shape_to_hf_config(shape).to_dict(), "model_type": model_type}
    if code:
        config["auto_map"] = {"AutoConfig": "code_of_its_own.Config"}
        write_code(folder, sprung)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"model.norm.weight": Trap(sprung)}, folder / "pytorch_model.bin")
    return folder


def write_tokenizer(folder: Path, sprung: Path) -> Path:
    """A tokenizer whose class is code of its own."""
    build_bytes_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": [None, "code_of_its_own.Words"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "Words", "auto_map": auto_map}))
    write_code(folder, sprung)
    return folder


def put(checkpoint: Path, name: str, data: bytes) -> None:
    """Another file in a checkpoint, with all checksums as if a save had written it."""
    (checkpoint / name).write_bytes(data)
    files = json.loads((checkpoint / "state.json").read_text())["files"]
    change_state(checkpoint, files={**files, name: [len(data), zlib.crc32(data)]})


def poison_metadata(checkpoint: Path, sprung: Path) -> Path:
    put(checkpoint, ".metadata", pickle.dumps(Trap(sprung)))
    return checkpoint


def answering_yes(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a Python program does at a terminal where somebody says yes to everything."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 20)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    try:
        return subprocess.run(
            [sys.executable, *argv],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            cwd=REPO,
            env=environment,
        )
    finally:
        os.close(ours)
        os.close(theirs)
