"""A stand-in for torch in the world: a tensor is some bytes. What writes and reads shards makes the calls that
torch.distributed.checkpoint (2.13) makes, in the same order."""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from tests.world.linux.calls import this
from tests.world.linux.modules import OS
from tests.world.trainer import groups
from tests.world.trainer.groups import ProcessGroup
from tests.world.trainer.paths import Path


class dtype:
    """Of the same name there is one."""

    known: dict[str, dtype] = {}  # noqa: RUF012 - shared on purpose

    def __new__(cls, name: str, itemsize: int = 1) -> dtype:
        if name not in cls.known:
            made = cls.known[name] = super().__new__(cls)
            made.name, made.itemsize = name, itemsize
        return cls.known[name]

    name: str
    itemsize: int

    def __reduce__(self) -> Any:
        return dtype, (self.name,)


UINT8 = dtype("uint8", 1)
BITS = {name: dtype(name, size) for name, size in (("int16", 2), ("int32", 4), ("int64", 8), ("float32", 4))}


class Size(tuple[int, ...]):
    """As torch.Size."""

    def numel(self) -> int:
        count = 1
        for length in self:
            count *= length
        return count


class Tensor:
    """Bytes in some memory, which others may see too."""

    def __init__(self, memory: bytearray, offset: int, size: int) -> None:
        self.memory, self.offset, self.size = memory, offset, size

    dtype = UINT8
    device = types.SimpleNamespace(type="cpu")

    @property
    def shape(self) -> Size:
        return Size((self.size,))

    nbytes = property(lambda self: self.size)

    @property
    def content(self) -> bytes:
        return bytes(self.memory[self.offset : self.offset + self.size])

    @content.setter
    def content(self, data: bytes) -> None:
        assert len(data) == self.size
        self.memory[self.offset : self.offset + self.size] = data

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return id(self.memory) + self.offset

    def is_floating_point(self) -> bool:
        return False

    def detach(self) -> Tensor:
        return self

    contiguous = detach

    def view(self, *shape: Any) -> Tensor:
        return self

    def copy_(self, other: Tensor, non_blocking: bool = False) -> None:
        self.content = other.content

    def zero_(self) -> None:
        self.content = bytes(self.size)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.size)
        return Tensor(self.memory, self.offset + start, max(0, stop - start))


def tensor_of(data: bytes) -> Tensor:
    return Tensor(bytearray(data), 0, len(data))


class Flags:
    """A small tensor of whole numbers, for collectives."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def tolist(self) -> list[int]:
        return self.numbers


def frombuffer(memory: Any, dtype: Any = UINT8, count: int = -1, offset: int = 0) -> Tensor:
    return Tensor(memory.memory, offset, len(memory.memory) - offset if count < 0 else count)


def save(value: Any, file: Any) -> None:
    """In two pieces, through the file's buffer, which is flushed at the end: as torch's."""
    data = pickle.dumps(value)
    file.write(data[:20])
    file.write(data[20:])
    file.flush()


def load(path: Any, weights_only: bool = True) -> Any:
    return pickle.loads(path.read_bytes())


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


class CheckpointException(BaseException):
    """As torch's: an error for each rank that had one."""

    def __init__(self, what: str, failures: dict[int, tuple[BaseException, Any]]) -> None:
        super().__init__(what, failures)
        self.failures = failures

    def __str__(self) -> str:
        return f"CheckpointException ranks:{self.failures.keys()}"


class FileSystem:
    """As torch.distributed.checkpoint.filesystem.FileSystem."""

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        with path.open(mode) as stream:
            yield stream


class FileSystemWriter:
    """As torch's, with one file a rank, synced."""

    def __init__(self, path: Path, sync_files: bool = True) -> None:
        self.path, self.sync_files = path, sync_files
        self.fs = FileSystem()

    def plan(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / ".metadata").exists()

    def write(self, rank: int, state: dict[str, Tensor]) -> dict[str, tuple[str, int, int]]:
        """This rank's shards; where each lies."""
        name, found = f"__{rank}_0.distcp", {}
        with self.fs.create_stream(self.path / name, "wb") as stream:
            for key, tensor in state.items():
                begin = stream.tell()
                save(tensor.content, stream)
                found[key] = (name, begin, stream.tell() - begin)
            if self.sync_files:
                OS.fsync(stream.fileno())
            stream.close()
        return found

    def finish(self, entries: dict[str, tuple[str, int, int]]) -> None:
        aside, path = self.path / ".metadata.tmp", self.path / ".metadata"
        with self.fs.create_stream(aside, "wb") as file:
            pickle.dump(entries, file)
            if self.sync_files:
                OS.fsync(file.fileno())
        if path.exists():
            path.unlink()
        aside.rename(path)


def _exchange(group: ProcessGroup | None, act: Callable[[], Any]) -> list[Any]:
    """What `act` gave on each rank. CheckpointException on all when one could not."""
    try:
        mine: Any = act()
    except Exception as error:
        mine = _Failed(error)
    found = [mine] if group is None else group.exchange(mine)
    _raise_failed(found)
    return found


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _raise_failed(found: list[Any]) -> None:
    failures = {rank: (one.error, None) for rank, one in enumerate(found) if isinstance(one, _Failed)}
    if failures:
        raise CheckpointException("", failures)


def dcp_save(state: Any, storage_writer: Any, process_group: Any = None, no_dist: bool = False) -> None:
    rank = process_group.rank if process_group else 0
    _exchange(process_group, storage_writer.plan)
    parts = _exchange(process_group, lambda: storage_writer.write(rank, flat(state)))
    whole = {key: place for part in parts for key, place in part.items()}
    _exchange(process_group, lambda: storage_writer.finish(whole) if rank == 0 else None)


def dcp_load(state: Any, storage_reader: Any, process_group: Any = None, no_dist: bool = False) -> None:
    def read() -> None:
        entries = storage_reader.read_metadata().state_dict_metadata
        for key, tensor in flat(state).items():
            if key not in entries:
                raise RuntimeError(f"Missing key in checkpoint state_dict: {key}.")
            name, offset, size = entries[key].place
            with (storage_reader.path / name).open("rb") as file:
                file.seek(offset)
                tensor.content = pickle.loads(file.read(size))

    _exchange(process_group, read)


def flat(state: Any, path: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        inner = f"{path}.{name}" if path else name
        found.update(flat(value, inner) if isinstance(value, dict) else {inner: value})
    return found


class Entry:
    """As TensorStorageMetadata, with where its bytes lie."""

    def __init__(self, place: tuple[str, int, int], size: list[int]) -> None:
        self.place, self.size = place, size


class Reader:
    """In the place of trainer.checkpoint.reader.PlainReader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_metadata(self) -> Any:
        with (self.path / ".metadata").open("rb") as file:
            entries = pickle.load(file)
        sizes = {key: [TENSOR_BYTES] for key in entries}
        return types.SimpleNamespace(state_dict_metadata={k: Entry(v, sizes[k]) for k, v in entries.items()})


TENSOR_BYTES = 24


# --- models -----------------------------------------------------------------------------------------------------------


class Module:
    """A model: this rank's tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def train(self) -> None:
        pass

    def modules(self) -> list[Any]:
        return []

    def parameters(self) -> list[Any]:
        return []


class Optimizer:
    """The state of a model's tensors beside them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def register_step_pre_hook(self, hook: Any) -> Any:
        return types.SimpleNamespace(remove=lambda: None)


def optimizer_state(model: Module, optimizer: Optimizer, options: Any) -> dict[str, Any]:
    state = {name: {"exp_avg": tensor} for name, tensor in optimizer.tensors.items()}
    return {"state": state, "param_groups": []}


class no_grad(contextlib.ContextDecorator):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def _module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    return made


def make_torch() -> dict[str, types.ModuleType]:
    """torch and those of its modules that the trainer's protocols import."""
    nothing = type("Nothing", (), {})
    dist = groups.make_distributed()
    dcp = _module(
        "checkpoint", save=dcp_save, load=dcp_load, FileSystemWriter=FileSystemWriter, FileSystemReader=Reader
    )
    state_dict = _module(
        "state_dict",
        StateDictOptions=lambda **_: None,
        get_model_state_dict=lambda model, options: dict(model.tensors),
        get_optimizer_state_dict=optimizer_state,
        set_model_state_dict=lambda *_, **__: None,
        set_optimizer_state_dict=lambda *_, **__: None,
    )
    parts = {
        "torch.distributed": dist,
        "torch.distributed.checkpoint": dcp,
        "torch.distributed.checkpoint.filesystem": _module("filesystem", FileSystem=FileSystem),
        "torch.distributed.checkpoint.api": _module("api", CheckpointException=CheckpointException),
        "torch.distributed.checkpoint.metadata": _module("metadata", TensorStorageMetadata=Entry),
        "torch.distributed.checkpoint.state_dict": state_dict,
        "torch.distributed.device_mesh": _module("device_mesh", DeviceMesh=nothing),
        "torch.distributed.tensor": _module("tensor", DTensor=nothing),
    }
    nn = _module("nn", Module=Module, Parameter=type("Parameter", (Tensor,), {}))
    torch = _module(
        "torch",
        Tensor=Tensor,
        Size=Size,
        dtype=dtype,
        uint8=UINT8,
        **BITS,
        nn=nn,
        device=lambda kind, index=0: types.SimpleNamespace(type=kind),
        distributed=dist,
        no_grad=no_grad,
        empty=lambda *shape, **_: tensor_of(b""),
        frombuffer=frombuffer,
        tensor=lambda numbers, dtype: Flags(numbers),
        save=save,
        load=load,
        set_num_threads=lambda count: None,
        get_rng_state=lambda: this().own.get("random", b""),
        set_rng_state=lambda state: this().own.__setitem__("random", state),
        cuda=_module("cuda", is_available=lambda: False),
        optim=_module("optim", Optimizer=Optimizer, AdamW=type("AdamW", (), {})),
    )
    dist.__dict__["checkpoint"] = dcp
    dcp.__dict__["state_dict"] = state_dict
    return cast("dict[str, types.ModuleType]", {"torch": torch, "torch.nn": nn, **parts})
