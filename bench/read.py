"""What reading by offset costs beside a memory map: documents of a token file, rows of pretraining, a model's weights.

    python bench/read.py                    # three rounds, turn about; the least and the most of each, and their ratio
    python bench/read.py --rounds 5 --folder /big/disk

The map is the same work over `numpy.memmap`, and safetensors' own `safe_open`. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainer.data.dataset.store import PieceStore, Store
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.token_file import TokenFile, TokenHeader
from trainer.data.tokenize.token_writer import TokenWriter
from trainer.files import OpenFile
from trainer.models.weight_files import open_weights

SEQ_LEN = 2048
READS = 20_000
BLOCK_ROWS = 4096
Work = Callable[[], float]
"""Does the work once, and returns how many items (or GB) were read."""


class MappedFile(TokenFile):
    """A token file whose documents are read through a memory map."""

    def __init__(self, file: OpenFile, header: TokenHeader) -> None:
        super().__init__(file, header)
        data = np.memmap(file.path, mode="r", dtype=np.uint8)
        parts = {name: np.asarray(data[start : start + size]) for name, (start, size) in header.sections.items()}
        self._mapped_ids, self._targets, self._names = parts["ids"].view("<i4"), parts["targets"], parts["names"]

    def part(self, index: int, begin: int, end: int) -> Encoded:
        """Like TokenFile's, plus the check of the file's size and time that a map needs in addition."""
        self.path.stat()
        first, last = int(self._offsets[index]) + begin, int(self._offsets[index]) + end
        ids = self._mapped_ids[first:last].copy()
        name = self._names[self._name_offsets[index] : self._name_offsets[index + 1]].tobytes().decode()
        if not self.header.has_targets:
            return Encoded(name, ids, np.ones(last - first, dtype=bool))
        bits = np.unpackbits(self._targets[first // 8 : -(-last // 8)], bitorder="little")
        return Encoded(
            name, self._mapped_ids[first:last].copy(), bits[first % 8 : first % 8 + last - first].astype(bool)
        )


def write_tokens(path: Path, lengths: np.ndarray, *, has_targets: bool) -> TokenFile:
    random = np.random.default_rng(0)
    with TokenWriter(path, vocab_size=151_936, tokenizer="-", has_targets=has_targets) as writer:
        for number, length in enumerate(lengths):
            ids = random.integers(0, 151_936, length).astype(np.int32)
            writer.add(Encoded(f"rows.jsonl:{number}", ids, random.random(length) < 0.5))
    return TokenFile.open(path)


def documents(folder: Path) -> tuple[Work, Work]:
    """Conversations of 50 to 800 tokens, in random order: read by ours, and by the map."""
    ours = write_tokens(folder / "rows.tokens", np.random.default_rng(1).integers(50, 800, 50_000), has_targets=True)
    return reading(ours, len(ours)), reading(MappedFile.open(ours.path), len(ours))


def pieces(folder: Path) -> tuple[Work, Work]:
    """Rows of 2048 tokens from long documents, in random order: read by ours, and by the map."""
    file = write_tokens(folder / "a.tokens", np.random.default_rng(2).integers(1000, 30_000, 2000), has_targets=False)
    ours, mapped = (PieceStore([each], seq_len=SEQ_LEN) for each in (file, MappedFile.open(file.path)))
    return reading(ours, len(ours)), reading(mapped, len(ours))


def reading(store: Store, count: int) -> Work:
    order = np.random.default_rng(3).permutation(count)[:READS].tolist()

    def read() -> float:
        for index in order:
            store[index]
        return float(len(order))

    return read


def weights(folder: Path) -> tuple[Work, Work]:
    """GB of bf16 matrices in blocks, cast to fp32 parameters: read by ours, and by safetensors' map."""
    path = folder / "model.safetensors"
    save_file({f"layer{n}": torch.randn(BLOCK_ROWS * 4, 1024).bfloat16() for n in range(16)}, path)
    target = torch.zeros(BLOCK_ROWS, 1024)

    def ours() -> float:
        for stored in open_weights(path).values():
            for begin in range(0, stored.shape[0], BLOCK_ROWS):
                target.copy_(stored.read((slice(begin, begin + BLOCK_ROWS),)))
        return path.stat().st_size / 1e9

    def mapped() -> float:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                for begin in range(0, BLOCK_ROWS * 4, BLOCK_ROWS):
                    target.copy_(file.get_slice(name)[begin : begin + BLOCK_ROWS])
        return path.stat().st_size / 1e9

    return ours, mapped


CASES = {"documents/s": documents, f"rows of {SEQ_LEN}/s": pieces, "weights GB/s": weights}


def rate(work: Work) -> float:
    """Items per second of this process's CPU time, so that other load on the machine counts less."""
    began = time.process_time()
    return work() / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are written; 0.8 GB")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            ours, mapped = case(Path(folder))
            ours(), mapped()  # into the page cache
            rates = [(rate(ours), rate(mapped)) for _ in range(asked.rounds)]
        columns = [f"{min(values):,.1f}-{max(values):,.1f}" for values in zip(*rates, strict=True)]
        ratio = max(pair[0] for pair in rates) / max(pair[1] for pair in rates)
        print(f"{name:18} by offset {columns[0]:>22}   map {columns[1]:>22}   ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
