"""A model's folder, and its weights from and to Hugging Face's files; the family reads the shape.

Tensors always have Hugging Face's names, also when DDP, FSDP, checkpointing or compile wrap the model.
Several threads draw or read weights, a few million values at a time: one thread draws 0.2e9 random values a second,
and copies from memory that is not pinned reach a few GB/s, so 1.5e9 parameters took ten seconds and more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.dist import Dist, on_rank0, rank0_first
from trainer.errors import ModelError
from trainer.files import expanded
from trainer.host_memory import cores_of_rank
from trainer.models.lora import is_adapter
from trainer.models.weight_files import MAX_HEADER_BYTES, StoredTensor, open_weights
from trainer.tensors import fsdp_modules, local_tensor, own_slices
from trainer.typed import InvalidData, read_json
from trainer.words import first_few, shortened

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
INIT_STD = 0.02
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BODY = "model."
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_checkpoint_wrapped_mod.")
TO_SAFETENSORS = (
    "a .bin file is a pickle, which may run code, and is never read; transformers makes safetensors of one that you "
    "trust: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
)
OTHER_WEIGHTS = {
    "pytorch_model.bin": TO_SAFETENSORS,
    "pytorch_model.bin.index.json": TO_SAFETENSORS,
    "adapter_config.json": "it holds an adapter: name its base as model.name and this folder as lora.adapter",
}
BLOCK = 1 << 22
"""Maximum number of values in a block, unless one row has more; 16 MiB of fp32. Random weights depend on it."""
MAX_THREADS = 16


@dataclass(frozen=True)
class WeightIndex:
    """The file of each tensor."""

    weight_map: dict[str, str]


def fetch_model(name: str, dist: Dist, *, check: Callable[[Path], object], weights: bool = True) -> Path:
    """The local folder of a model given by folder or Hugging Face name, downloaded if needed (rank 0 first).

    `check`: raises ModelError if the folder's config.json is of another kind of model. It is called before the weights
    are downloaded, and must run no code of the folder.
    """
    folder = expanded(name)
    if folder.is_dir():
        check(folder)
        return folder
    if folder.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"model.name={name}: there is no such folder")
    return rank0_first(dist, lambda: _download(name, check, weights))


def _download(name: str, check: Callable[[Path], object], weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    small = ["*.json", "*.jinja", "*.txt", "*.model"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=small))
        check(folder)
        return Path(snapshot_download(name, allow_patterns=[*small, "*.safetensors"])) if weights else folder
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"model.name={name} is no folder here and could not be fetched from Hugging Face: {reason};"
            " give a local folder, or check the name, the network and HF_TOKEN"
        ) from error


def named_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Hugging Face's name of every parameter, with the parameter as it is stored (a DTensor when sharded)."""
    for group in fsdp_modules(module):
        group.reshard()  # after an evaluation the root group is still gathered
    for name, parameter in module.named_parameters():
        yield name.removeprefix("module."), parameter


def base_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the model itself by name, without those of its adapters."""
    return {name: parameter for name, parameter in named_weights(module) if not is_adapter(name)}


def init_random(module: nn.Module, seed: int) -> None:
    """Fill the model with N(0, 0.02) matrices, norms of 1 and biases of 0: the same for any number of ranks."""
    for_each_block(base_weights(module), lambda block: _fill(block, seed))


def _fill(block: Block, seed: int) -> None:
    if len(block.shape) == 1:
        block.target.fill_(0.0 if block.name.endswith("bias") else 1.0)
        return
    word = f"{seed}/{block.name}" + (f"/{block.number}" if block.number else "")
    digest = hashlib.sha256(word.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    values = torch.empty(block.shape, device="cpu", pin_memory=block.target.is_cuda)
    block.take(values.normal_(std=INIT_STD, generator=generator)[block.own])


@torch.no_grad()
def load_pretrained(module: nn.Module, folder: Path | str, *, sender: Dist | None = None) -> None:
    """Fill the model from a folder's safetensors; each rank reads its share of each tensor, as fp32.

    With `sender` only rank 0 reads, and sends one whole tensor after the other: other hosts do not need the folder.
    Raises ModelError if the folder has no weights, its names or shapes are not exactly the model's, a value is not
    finite, or the head of a tied model is not equal to the embedding.
    """
    weights = base_weights(module)
    if sender is not None and sender.world_size > 1:
        _receive_pretrained(weights, Path(folder), sender)
        return
    stored = _open_for(Path(folder), weights)

    def read(block: Block) -> None:
        block.take(stored[block.name].read(block.rows, pinned=block.target.is_cuda))
        if not _is_finite(block.target):
            raise ModelError(f"{folder}: {block.name} has values that are not finite")

    for_each_block(weights, read)
    if HEAD in stored and HEAD not in weights:
        _check_tied(weights[EMBEDDING], stored[HEAD], Path(folder))


def _is_finite(values: Tensor) -> bool:
    """Whether all values are finite, in one pass and without a copy of their size."""
    low, high = torch.aminmax(values) if values.numel() else (values, values)
    return bool((low.isfinite() & high.isfinite()).all())


def _receive_pretrained(weights: Mapping[str, nn.Parameter], folder: Path, dist: Dist) -> None:
    """Every rank raises the same error or none: rank 0 sends its error, and all ranks check the values sent."""
    stored: dict[str, StoredTensor] = {}

    def open_files() -> None:
        stored.update(_open_for(folder, weights))
        if HEAD in stored and HEAD not in weights:
            _check_same(stored[HEAD].read(), stored[EMBEDDING].read(), folder)

    on_rank0(dist, open_files)
    for name, parameter in weights.items():
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=dist.device)

        def read(name: str = name, whole: Tensor = whole) -> None:
            whole.copy_(stored[name].read())

        on_rank0(dist, read)
        torch.distributed.broadcast(whole, src=0)
        if not whole.isfinite().all():
            raise ModelError(f"{folder}: {name} has values that are not finite")
        local_tensor(parameter).copy_(whole[own_slices(parameter)])


def _check_tied(embedding: nn.Parameter, stored_head: StoredTensor, folder: Path) -> None:
    """Raise ModelError if the stored head differs: transformers would untie it, and train a model other than the
    config's."""
    local = local_tensor(embedding)
    _check_same(stored_head.read(own_slices(embedding)).to(local), local, folder)


def _check_same(head: Tensor, embedding: Tensor, folder: Path) -> None:
    if not torch.equal(head, embedding):
        raise ModelError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, though config.json ties them;"
            " set tie_word_embeddings to false there, or remove the stale tensor"
        )


def _open_for(folder: Path, weights: Mapping[str, nn.Parameter]) -> dict[str, StoredTensor]:
    """The folder's tensors by the model's names: one for each of the weights, in its shape."""
    stored = _by_names(open_folder(folder), set(weights), folder)
    for name, parameter in weights.items():
        if stored[name].shape != tuple(parameter.shape):
            shapes = f"{shortened(list(stored[name].shape))}, the model needs {list(parameter.shape)}"
            raise ModelError(f"{folder}: {name} has shape {shapes}")
    return stored


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors in the folder's weight files, by name. Raises ModelError for a damaged file, and if there is none."""
    return {name: tensor for path in _weight_files(folder) for name, tensor in open_weights(path).items()}


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read: the single file if it exists, else those of the index."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    names = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    raise ModelError(
        f"{folder} has no weights: {SINGLE_FILE} or {INDEX_FILE} expected, found {first_few(names, 8) or 'nothing'};"
        " set model.init=random to start from its config alone",
        hint=next((advice for name, advice in OTHER_WEIGHTS.items() if name in names), ""),
    )


def _indexed(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index, WeightIndex, most=MAX_HEADER_BYTES).weight_map.values()))
    except OSError as error:
        raise ModelError(f"{index} cannot be read: {error.strerror}") from error
    except InvalidData as damage:
        raise ModelError(f"{index}: {damage}") from None
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ModelError(f"{index}: weight_map names {shortened(name)}, which is not in the folder")
    return names


def _by_names(found: Mapping[str, StoredTensor], expected: set[str], folder: Path) -> dict[str, StoredTensor]:
    """The tensors by the model's names, without prefixes of wrappers; they must match the expected names.

    Also allowed: old rotary buffers, and the head of a tied model, which is a copy of the embedding or replaces it.
    """
    stored: dict[str, StoredTensor] = {}
    for written, tensor in found.items():
        name = _plain_name(written, expected)
        if name in stored:
            raise ModelError(f"{folder}: {name} is stored twice, as {stored[name].name} and as {written}")
        stored[name] = tensor
    if HEAD in stored and HEAD not in expected and EMBEDDING in expected:
        stored.setdefault(EMBEDDING, stored[HEAD])
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    missing, unexpected = sorted(expected - set(stored)), sorted(set(stored) - expected - ignored - {HEAD})
    if missing or unexpected:
        raise ModelError(f"{folder}: the weights are not this model's. {render_names(missing, unexpected)}")
    return stored


def _plain_name(written: str, expected: set[str]) -> str:
    """The model's name of a tensor: without the name parts of DDP, FSDP, torch.compile, recomputation and PEFT, and
    with the prefix that a model without a head lacks."""
    if written in expected:
        return written
    name = written.removeprefix("module.").removeprefix("base_model.model.")
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return f"{BODY}{name}" if f"{BODY}{name}" in expected else name


def render_names(missing: list[str], unexpected: list[str]) -> str:
    """`Missing: a, b and 7 more. Unexpected: none.`"""
    return f"Missing: {first_few(missing, 5) or 'none'}. Unexpected: {first_few(unexpected, 5) or 'none'}."


@torch.no_grad()
def gather_full(module: nn.Module, dist: Dist) -> dict[str, Tensor] | None:
    """All weights as CPU fp32 tensors under Hugging Face's names on rank 0, None elsewhere. Every rank must call it.

    The device holds one whole tensor at a time.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_weights(module):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.is_main:
            tensors[name] = full.detach().to("cpu", torch.float32, copy=True)
    return tensors if dist.is_main else None


# --- weights in blocks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Some rows of a tensor, and this rank's part of them."""

    name: str
    number: int
    """The block's number in the tensor; the division into blocks is the same for any number of ranks."""
    shape: tuple[int, ...]
    """The shape of the whole block."""
    own: tuple[slice, ...]
    """This rank's part of the block."""
    rows: tuple[slice, ...]
    """The same part, as indices of the whole tensor."""
    target: Tensor
    """This rank's memory for its part."""

    def take(self, values: Tensor) -> None:
        """Copy values (on the CPU, of any dtype) into the target; a GPU converts them itself. The host does not wait
        for the GPU."""
        if self.target.is_cuda:
            pinned = values if values.is_pinned() else torch.empty_like(values, pin_memory=True).copy_(values)
            values = pinned.to(self.target.device, non_blocking=True)
        self.target.copy_(values)


def for_each_block(weights: Mapping[str, Tensor], work: Callable[[Block], None], *, threads: int | None = None) -> None:
    """Call `work` with each block of which this rank keeps a part, in several threads if the weights are large.

    Raises the error of the first failing block.
    """
    blocks = [block for name, parameter in weights.items() for block in blocks_of(name, parameter)]
    if threads is None:
        is_small = sum(block.target.numel() for block in blocks) <= BLOCK
        threads = 1 if is_small else min(MAX_THREADS, cores_of_rank())

    def run(block: Block) -> None:
        with torch.no_grad():  # the setting is per thread
            work(block)

    if threads == 1:
        for block in blocks:
            run(block)
        return
    device = blocks[0].target.device
    # a new thread's current device is the first one, and pinning memory would start a context there
    start = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
    with ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=start) as pool:
        for _ in pool.map(run, blocks):
            pass


def blocks_of(name: str, parameter: Tensor) -> Iterator[Block]:
    """The blocks of a tensor of which this rank keeps a part."""
    local, (rows, *others) = local_tensor(parameter).detach(), own_slices(parameter)
    num_rows, *rest = parameter.shape
    step = max(1, BLOCK // max(1, prod(rest)))
    for number, begin in enumerate(range(0, num_rows, step)):
        end = min(begin + step, num_rows)
        first, last = max(begin, rows.start), min(end, rows.stop)
        if first < last:
            yield Block(
                name,
                number,
                (end - begin, *rest),
                (slice(first - begin, last - begin), *others),
                (slice(first, last), *others),
                local[first - rows.start : last - rows.start],
            )
