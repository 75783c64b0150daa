"""A file that others cut, write over or remove while it is read is an error that names it, and no process dies of it.

Each reading is in a forked process, so that a SIGBUS would be seen as what it is.
"""

from __future__ import annotations

import ast
import faulthandler
import gzip
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tests.support.configs import SMALL_MODEL
from tests.support.ferry import REPO
from tests.support.tiny import tiny_decoder
from tests.trainer.data.test_pretrain import corpus_file, load, pretraining_on
from tests.trainer.data.token_files import document, write
from trainer.data.dataset.store import PieceStore, RowTable
from trainer.data.rows.sources import read_conversations
from trainer.data.tokenize.token_file import TokenFile
from trainer.errors import DataError, ModelError
from trainer.export.model import verify_export, write_export
from trainer.files import FileChangedError, OpenFile
from trainer.models.hf import load_pretrained
from trainer.models.weight_files import open_weights

PAGES = 64 * mmap.PAGESIZE


def forked(work: Callable[[], object]) -> str:
    """What the work raised or gave, in a process of its own; `SIGBUS` where that died of it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        try:
            told = f"gave {work()}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else told


def cut(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def write_over(path: Path) -> None:
    """With as many bytes, of another time."""
    with path.open("r+b") as file:
        file.write(b"x" * path.stat().st_size)
    os.utime(path, ns=(1, 1))


CHANGES = pytest.mark.parametrize("change", [cut, empty, write_over])


def test_a_map_of_a_file_that_is_cut_ends_its_process(tmp_path):
    """What all others here must not do, and would be seen to."""
    path = tmp_path / "a"
    path.write_bytes(bytes(PAGES))
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    cut(path)
    assert forked(lambda: mapped[-1]) == "SIGBUS"


# --- token files -----------------------------------------------------------------------------------------------------


def large_token_file(path: Path) -> TokenFile:
    return write(path, [document(np.arange(PAGES // 8) % 250, name=f"d{number}") for number in range(4)])


@CHANGES
@pytest.mark.parametrize("way", ["document", "piece", "name", "keys", "check"])
def test_token_file_that_changes_is_named_however_it_is_read(tmp_path, change, way):
    file = large_token_file(tmp_path / "a.tokens")
    pieces = PieceStore([file], seq_len=128)
    read = {
        "document": lambda: file[3],
        "piece": lambda: pieces[len(pieces) - 1],
        "name": lambda: file.name(3),
        "keys": lambda: file.keys,
        "check": lambda: file.check(vocab_size=100),
    }[way]
    size = file.path.stat().st_size
    change(file.path)
    told = forked(read)
    assert told.startswith(f"DataError: the token file has changed while it was read: {size:,} bytes of ")
    assert f"now {file.path.stat().st_size:,} bytes of " in told
    assert f"  in {file.path}" in told


@CHANGES
def test_threads_that_lay_out_steps_hand_the_error_on(tmp_path, change):
    path = Path(corpus_file(tmp_path / "a.tokens", [2000] * 40))
    train = load(pretraining_on(str(path), global_batch_size=1), tmp_path).train
    change(path)
    told = forked(lambda: [train.step_batches(step) for step in range(train.total_steps)])
    assert told.startswith("DataError: the token file has changed while it was read")
    assert str(path) in told


def test_token_file_whose_name_goes_or_is_given_away_stays_readable(tmp_path):
    file = large_token_file(tmp_path / "a.tokens")
    write(file.path, [document([7])])
    assert forked(lambda: file[3].ids[:3].tolist()) == "gave [0, 1, 2]"
    file.path.unlink()
    assert forked(lambda: file[3].ids[:3].tolist()) == "gave [0, 1, 2]"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "uint8"), ("num_docs", 5), ("num_tokens", 99), ("sections", {}),
        ("sections", {"ids": [64, 10**12]}), ("has_targets", True),
        ("sections", {"ids": [66, 10]}), ("sections", {"offsets": [64, 24]}), ("sections", {"names": [128, 0]}),
    ],
)  # fmt: skip
def test_header_of_a_token_file_that_does_not_fit_the_file_is_refused(tmp_path, name, value):
    path = write(tmp_path / "a.tokens", [document([1, 2, 3]), document([4, 5])]).path
    data = path.read_bytes()
    start = int.from_bytes(data[16:24], "little")
    header = json.loads(data[start:])
    header[name] = {**header[name], **value} if value and isinstance(value, dict) else value
    changed = json.dumps(header).encode()
    path.write_bytes(data[:12] + len(changed).to_bytes(4, "little") + data[16:start] + changed)
    with pytest.raises(DataError, match="header is damaged") as error:
        TokenFile.open(path)
    assert error.value.where == str(path)


def test_row_table_that_is_cut_or_gone_is_named(tmp_path):
    path = tmp_path / "rows.npz"
    RowTable(*(np.zeros(9, kind) for kind in ("u2", "u8", "i8", "i8", "?"))).save(path)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) - 30):
        path.write_bytes(whole[:size])
        assert forked(lambda: RowTable.load(path, {})).startswith(f"DataError: {path} cannot be read")
    path.unlink()
    assert forked(lambda: RowTable.load(path, {})).startswith(f"DataError: {path} cannot be read")


# --- rows of a source ------------------------------------------------------------------------------------------------


def write_rows(path: Path) -> Path:
    rows = [{"question": f"q{number}", "answer": "a" * 50} for number in range(20_000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100, compression="none")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode(), compresslevel=0))
    else:
        path.write_text(lines)
    return path


@CHANGES
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_source_that_changes_while_its_rows_are_read_is_named(tmp_path, name, change):
    path = write_rows(tmp_path / name)
    rows = read_conversations(str(path))
    next(rows)
    change(path)
    told = forked(lambda: sum(1 for _ in rows))
    assert told.startswith("DataError: ")
    assert str(path) in told


def test_source_that_is_cut_between_two_rows_does_not_seem_to_end_there(tmp_path):
    path = write_rows(tmp_path / "a.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    rows = read_conversations(str(path))
    next(rows)
    os.truncate(path, sum(map(len, lines[:10_000])))
    told = forked(lambda: sum(1 for _ in rows))
    assert told.startswith(f"DataError: {path} has changed while it was read")


def test_source_that_is_left_in_the_middle_may_change(tmp_path):
    path = write_rows(tmp_path / "a.jsonl")
    rows = read_conversations(str(path), limit=2)
    next(rows)
    cut(path)
    assert forked(lambda: len(list(rows))) == "gave 1"


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_of_every_type_are_read_as_the_library_reads_them(tmp_path):
    path = tmp_path / "a.safetensors"
    torch.manual_seed(0)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {str(kind): torch.randn(7, 3, 2).to(kind) for kind in kinds}
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    tensors |= {str(kind): torch.randint(0, 2, (5, 4)).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.0), "nothing": torch.zeros(0, 4), "ä": torch.ones(1)}
    save_file(tensors, path, metadata={"format": "pt"})
    ours, theirs = open_weights(path), load_file(path)
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        got = ours[name].read()
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.view(-1).view(torch.uint8).tolist() == expected.view(-1).view(torch.uint8).tolist()
    part = (slice(2, 6), slice(1, 3), slice(0, 2))
    assert torch.equal(ours["torch.float32"].read(part), theirs["torch.float32"][part])


def save_weights(folder: Path) -> Path:
    """Of more than one block, so that several threads read them."""
    decoder = tiny_decoder(vocab_size=200_000)
    save_file({name: weight.detach() for name, weight in decoder.named_parameters()}, folder / "model.safetensors")
    return folder / "model.safetensors"


@CHANGES
def test_weights_that_change_between_opening_and_reading_are_named(tmp_path, change):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(PAGES), "b": torch.ones(PAGES)}, path)
    stored = open_weights(path)
    change(path)
    told = forked(lambda: stored["b"].read())
    assert told.startswith(f"ModelError: {path} has changed while it was read")


def test_model_whose_file_is_cut_by_others_at_any_moment_is_an_error_and_no_signal(tmp_path):
    path = save_weights(tmp_path)
    whole = path.read_bytes()
    for wait_s in (0.0, 0.01, 0.03, 0.1):
        path.write_bytes(whole)
        cutter = subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep({wait_s}); os.truncate({str(path)!r}, 4096)"]
        )

        def load_for_ever() -> None:
            while True:
                load_pretrained(tiny_decoder(vocab_size=200_000), tmp_path)

        told = forked(load_for_ever)
        assert cutter.wait() == 0
        assert told.startswith("ModelError: ")
        assert str(path) in told


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_header(path: Path, header: object, values: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({"data_offsets": [8, 4000]}, "b would begin at byte "),
        ({"data_offsets": [0, 24]}, "would begin at byte "),
        ({"data_offsets": [8, 10**15]}, "b would begin at byte|b has 999,999,999,999,992 bytes"),
        ({"data_offsets": [-8, 16]}, r"b\.data_offsets\[0\] is -8, not at least 0"),
        ({"data_offsets": [16]}, "its header is damaged"),
        ({"shape": [5]}, r"b has 24 bytes for \[5\] of F32, which take 20"),
        ({"shape": [-2, -3]}, r"b\.shape\[0\] is -2, not at least 0"),
        ({"shape": ["x"]}, "its header is damaged"),
        ({"shape": [float("inf")]}, "its header is damaged"),
        ({"dtype": "F64"}, r"b has 24 bytes for \[6\] of F64, which take 48"),
    ],
)
def test_header_that_lies_is_refused_with_file_and_key_as_the_library_refuses_it(tmp_path, lie, told):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(6)}, path)
    header, values = header_of(path)
    put_header(path, {**header, "b": {**header["b"], **lie}}, values)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt")
    with pytest.raises(ModelError, match=told) as error:
        open_weights(path)
    assert str(error.value).startswith(f"{path} cannot be read as safetensors: ")


def test_every_cut_and_every_added_byte_of_a_weights_file_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(6)}, path)
    whole = path.read_bytes()
    for content in (
        *(whole[:size] for size in range(len(whole))),
        whole + b"x",
        b"\xff" * 64,
        b"\2" + bytes(7) + b"[]",
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read as safetensors"):
            open_weights(path)
    with pytest.raises(ModelError, match="cannot be read as safetensors: No such file"):
        open_weights(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\xff"])
def test_damaged_index_of_weights_is_named(tmp_path, index):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(index.encode("latin-1"))
    with pytest.raises(ModelError, match=r"index\.json(: it| cannot)|weight_map") as error:
        load_pretrained(tiny_decoder(), tmp_path)
    assert str(path) in str(error.value)


def test_export_that_is_cut_before_it_is_compared_is_named(tmp_path):
    decoder = tiny_decoder()
    tensors = decoder.state_dict()
    write_export(tmp_path, decoder.shape, tensors=tensors, tokenizer=None)
    os.truncate(tmp_path / "model.safetensors", 5000)
    told = forked(lambda: verify_export(tmp_path, decoder.shape, tensors=tensors, rows=[[1, 2, 3]]))
    assert told.startswith(f"ModelError: {tmp_path / 'model.safetensors'} cannot be read as safetensors: it has 5,000")


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_run_of_two_ranks_whose_token_file_is_cut_ends_with_one_verdict_that_names_it(tmp_path):
    path = corpus_file(tmp_path / "a.tokens", [4000] * 300)
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "recipe": "pretrain",
                "target": {"device": "cpu", "gpu_ranks": [0, 1], "train_backend": "ddp"},
                "model": SMALL_MODEL,
                "data": {"train": [path], "eval_fraction": 0.0, "seq_len": 64},
                "train": {"steps": 10**6, "save_every": 0, "precision": "fp32", "global_batch_size": 4, "log_every": 1},
                "run": {"dir": str(tmp_path / "run"), "export": False},
            }
        )
    )  # JSON is YAML
    with (tmp_path / "output").open("w+") as output:
        command = [sys.executable, REPO / "train.py", config]
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            until = time.monotonic() + 240
            while run.poll() is None and not any(m.stat().st_size for m in tmp_path.glob("run/*/metrics.jsonl")):
                assert time.monotonic() < until, "no step in time"
                time.sleep(0.1)
            os.truncate(path, 4096)
            code = run.wait(240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
        output.seek(0)
        told = output.read()
    assert code == 2, told
    assert told.count("the token file has changed while it was read") == 1
    assert path in told
    assert "SIGBUS" not in told
    [outcome] = [json.loads(found.read_text()) for found in tmp_path.glob("run/*/outcome.json")]
    assert outcome["state"] == "failed"
    assert path in outcome["error"]


# --- what the rule rests on ------------------------------------------------------------------------------------------


def test_what_was_opened_ends_where_it_ended(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    file = OpenFile(path)
    assert file.read((2, 3), (0, 0), (9, 1)) == [b"234", b"", b"9"]
    with pytest.raises(OSError, match="it ends after 10 bytes"):
        file.read((8, 3))
    path.write_bytes(b"01")
    with pytest.raises(FileChangedError, match=r"10 bytes of .*, now 2 bytes of "):
        file.read((0, 1))


MAPPING = {
    "memmap",
    "mmap",
    "safe_open",
    "load_file",
    "from_file",
    "_from_file",
    "mmap_mode",
    "memory_map",
    "load_dataset",
}
"""Calls and keywords that map a file, of the libraries that the trainer uses."""
ALLOWED = {
    ("trainer/saver/region.py", "mmap"): "anonymous memory, which has no file",
    ("trainer/data/rows/sources.py", "load_dataset"): "the library's own cache, renamed into place and larger than "
    "memory; it can only be mapped",
}


def mapped_in(path: Path) -> set[tuple[str, str]]:
    called = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
            called |= {word.arg for word in node.keywords if word.arg and getattr(word.value, "value", True)}
    return {(path.relative_to(REPO).as_posix(), name) for name in called & MAPPING}


def test_no_module_of_the_trainer_maps_a_file():
    found = set().union(*(mapped_in(path) for path in (REPO / "trainer").rglob("*.py")))
    assert found == set(ALLOWED)
