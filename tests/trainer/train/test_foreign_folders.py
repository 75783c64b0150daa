"""Models, tokenizers, adapters, data and checkpoints of somebody else: none of their code is run, whoever says yes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.saves import save, start
from tests.support.tiny import ALONE, tiny_shape
from tests.support.traps import (
    TEMPLATE,
    Trap,
    answering_yes,
    poison_metadata,
    put,
    write_model,
    write_tokenizer,
)
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.load import load, load_model, read_full
from trainer.checkpoint.reader import PlainReader

SHAPE = tiny_shape(vocab_size=260)
SUPPORTED = "qwen2, qwen3 and llama"


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """What is there once a trap has gone off."""
    return tmp_path / "sprung"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "saved", 1, *start(ALONE), {"data": {}}, ALONE)


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


# --- whole runs at a terminal -----------------------------------------------------------------------------------------


def model_of_a_strange_type(at: Path, sprung: Path) -> tuple[list[str], str]:
    model = write_model(folder(at, "m"), sprung, SHAPE, model_type="strange", code=True)
    return [f"model.name={model}"], f"{model}: model_type=strange is not supported; {SUPPORTED} are"


def model_with_code(at: Path, sprung: Path) -> tuple[list[str], str]:
    model = write_model(folder(at, "m"), sprung, SHAPE, code=True)
    return [f"model.name={model}"], f"{model}: its config.json has auto_map, for code of the model's own"


def pickled_weights(at: Path, sprung: Path) -> tuple[list[str], str]:
    model = write_model(folder(at, "m"), sprung, SHAPE)
    return [f"model.name={model}"], f"{model} has no weights: model.safetensors or "


def tokenizer_with_code(at: Path, sprung: Path) -> tuple[list[str], str]:
    words = write_tokenizer(folder(at, "t"), sprung)
    return [f"data.tokenizer={words}"], f"the tokenizer '{words}' has its own code (auto_map in its tokenizer_conf"


def pickled_adapter(at: Path, sprung: Path) -> tuple[list[str], str]:
    adapter = folder(at, "a")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    torch.save({"x": Trap(sprung)}, adapter / "adapter_model.bin")
    return [f"lora.adapter={adapter}"], f"{adapter}/adapter_model.safetensors cannot be read as safetensors"


def poisoned_checkpoint(at: Path, sprung: Path) -> tuple[list[str], str]:
    path = poison_metadata(save(at / "saved", 1, *start(ALONE), {"data": {}}, ALONE), sprung)
    return [f"train.resume={path}"], f"cannot load {path}: UnpicklingError: .metadata asks for posix.mkdir"


def template_that_leaves_its_sandbox(at: Path, sprung: Path) -> tuple[list[str], str]:
    template = at / "t.jinja"
    template.write_text(TEMPLATE.format(str(sprung)))
    return [f"data.chat_template={template}"], "access to attribute '__init__' of 'type' object is unsafe"


def data_set_with_a_script(at: Path, sprung: Path) -> tuple[list[str], str]:
    data = folder(at, "rows")
    (data / "rows.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\n")
    return [f"data.train=[{data}]"], f"the data set '{data}' (split 'train') cannot be loaded"


CASES = [
    model_of_a_strange_type,
    model_with_code,
    pickled_weights,
    tokenizer_with_code,
    pickled_adapter,
    poisoned_checkpoint,
    template_that_leaves_its_sandbox,
    data_set_with_a_script,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_foreign_folder_is_refused_in_one_message_and_none_of_its_code_is_run(
    tmp_path: Path, sprung: Path, case: Callable[[Path, Path], tuple[list[str], str]]
) -> None:
    words, message = case(tmp_path, sprung)
    tiny = ["target.device=cpu", "target.gpu_ranks=[0]", "train.steps=1", "--run-dir", str(tmp_path / "run")]
    cache = str(tmp_path / "cache")
    told = answering_yes("train.py", "configs/01_debug_sft.py", *tiny, *words, HF_HOME=cache)
    assert told.returncode in (1, 2), told
    assert message in told.stderr and "[y/N]" not in told.stdout + told.stderr
    lines = [line for line in told.stderr.splitlines() if not line.startswith(("hint: ", "  in "))]
    assert len(lines) == 1, lines
    assert not sprung.exists()


def test_traps_go_off_where_nobody_guards(tmp_path: Path, checkpoint: Path) -> None:
    """What the tests above rest on."""
    model = write_model(folder(tmp_path, "m"), tmp_path / "config", SHAPE, model_type="strange", code=True)
    ask = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(model)!r})"
    assert "[y/N]" in answering_yes("-c", ask, HF_HOME=str(tmp_path / "cache")).stdout
    torch.load(
        write_model(folder(tmp_path, "w"), tmp_path / "weights", SHAPE) / "pytorch_model.bin", weights_only=False
    )
    words = write_tokenizer(folder(tmp_path, "t"), tmp_path / "tokenizer")
    ask = f"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({str(words)!r})"
    answering_yes("-c", ask, HF_HOME=str(tmp_path / "cache"))
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(poison_metadata(checkpoint, tmp_path / "metadata")).read_metadata()
    jinja2.Environment().from_string(TEMPLATE.format(str(tmp_path / "template"))).render()
    for name in ("config", "weights", "tokenizer", "metadata", "template"):
        assert (tmp_path / name).is_dir(), name


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_object_in_the_place_of_a_tensor_is_not_unpickled(tmp_path: Path, checkpoint: Path, sprung: Path) -> None:
    model, _ = start(ALONE)
    tensors = {name: Trap(sprung) for name in model.state_dict()}
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for file in (tmp_path / "theirs").iterdir():
        put(checkpoint, file.name, file.read_bytes())
    with pytest.raises(CheckpointError, match=r"cannot load .*Missing key"):
        load_model(checkpoint, model, ALONE)
    assert not sprung.exists()
    with pytest.raises(dcp.api.CheckpointException):  # torch itself runs it
        dcp.load({"model": dict(model.state_dict())}, checkpoint_id=checkpoint, no_dist=True)
    assert sprung.exists()


def test_object_in_a_shard_is_not_unpickled(checkpoint: Path, sprung: Path) -> None:
    metadata = PlainReader(checkpoint).read_metadata()
    torch.save(Trap(sprung), checkpoint / "trap")
    trap = (checkpoint / "trap").read_bytes()
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(trap)
    put(checkpoint, "__0_0.distcp", trap)
    put(checkpoint, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"cannot load .*Weights only load failed"):
        read_full(checkpoint)
    assert not sprung.exists()


def test_object_in_a_random_state_is_not_unpickled(checkpoint: Path, sprung: Path) -> None:
    torch.save(Trap(sprung), checkpoint / "trap")
    put(checkpoint, "random_0.pt", (checkpoint / "trap").read_bytes())
    with pytest.raises(CheckpointError, match=r"cannot load .*Weights only load failed"):
        load(checkpoint, *start(ALONE), ALONE)
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "float32.__class__"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("pathlib", "Path"),
    ],
)
def test_metadata_may_name_nothing_but_its_own_kinds(checkpoint: Path, module: str, name: str) -> None:
    put(checkpoint, ".metadata", b"\x80\x04" + pickled(module) + pickled(name) + b"\x93.")
    with pytest.raises(pickle.UnpicklingError, match=rf"asks for {module}\.{name}, which no checkpoint needs"):
        PlainReader(checkpoint).read_metadata()


def pickled(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def test_metadata_may_not_reach_other_attributes_by_getattr(checkpoint: Path) -> None:
    of = pickled("torch.distributed.checkpoint.metadata") + pickled("Metadata") + b"\x93"
    asked = pickled("builtins") + pickled("getattr") + b"\x93" + of + pickled("__init__") + b"\x86R."
    put(checkpoint, ".metadata", b"\x80\x04" + asked)
    with pytest.raises(pickle.UnpicklingError, match=r"asks for __init__ of "):
        PlainReader(checkpoint).read_metadata()


def test_metadata_may_not_change_the_kinds_that_it_is_built_of(checkpoint: Path) -> None:
    """The second half of a state is set by `setattr`, on a class too, for as long as the process lives."""
    exists = Path.exists
    put(checkpoint, ".metadata", b"cpathlib\nPosixPath\n(N(dVexists\ncpathlib\nPosixPath\nstb.")
    try:
        with pytest.raises(pickle.UnpicklingError, match="sets attributes of <class 'pathlib"):
            PlainReader(checkpoint).read_metadata()
        assert Path.exists is exists
    finally:
        Path.exists = exists  # type: ignore[method-assign]


def test_metadata_of_a_python_that_names_members_of_an_enum_is_read(checkpoint: Path) -> None:
    """As 3.11.2 pickles them."""
    whole = (checkpoint / ".metadata").read_bytes()
    expected = PlainReader(checkpoint).read_metadata().state_dict_metadata
    metadata = PlainReader(checkpoint).read_metadata()
    kind = type(next(iter(expected.values())).properties.__getstate__()[3])
    by_value = kind.__reduce_ex__
    try:
        kind.__reduce_ex__ = lambda self, protocol: (getattr, (type(self), self._name_))
        put(checkpoint, ".metadata", pickle.dumps(metadata))
    finally:
        kind.__reduce_ex__ = by_value
    assert b"getattr" in (checkpoint / ".metadata").read_bytes() and b"getattr" not in whole
    assert PlainReader(checkpoint).read_metadata().state_dict_metadata == expected


@pytest.mark.parametrize("path", ["../../other/__0_0.distcp", "/etc/passwd"])
def test_metadata_may_name_no_file_elsewhere(checkpoint: Path, path: str) -> None:
    metadata = PlainReader(checkpoint).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = path
    put(checkpoint, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata names {path}, which is not in its folder"):
        read_full(checkpoint)
