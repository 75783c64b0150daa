"""Text from a trained model: transformers' generation, over an export, a checkpoint, or an adapter and its base."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from trainer.data.tokenize.prompt import encode_prompt
from trainer.data.tokenize.tokenizer import load_tokenizer, quiet_transformers, settle_offline
from trainer.errors import ModelError
from trainer.export.checkpoint import Source, load_trained
from trainer.export.generation import generation_of
from trainer.export.model import without_map
from trainer.export.which import Meant, base_of
from trainer.host_memory import available_bytes
from trainer.models.adapter_files import PREFIX, WEIGHTS_FILE, read_spec
from trainer.models.generation import ids_of, read_generation
from trainer.models.hf import named_weights, open_folder
from trainer.models.lora import PAIR, lora_of, merge
from trainer.models.weight_files import open_weights
from trainer.schema import Config, DataConfig, ModelConfig
from trainer.tensors import DTYPES
from trainer.words import first_line, render_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Tell = Callable[[str], None]
Show = Callable[[str], None]
MEMORY_HINT = "--device cpu, --dtype bf16 or a smaller --max-tokens need less"


@dataclass(frozen=True)
class How:
    """Settings for the generation from a prompt."""

    max_tokens: int = 200
    temperature: float = 0.0
    """0: always the most probable token, so the text is always the same."""
    top_p: float = 1.0
    seed: int = 0
    chat: bool | None = None
    """None: yes if the tokenizer has a template."""
    system: str | None = None


@dataclass(frozen=True)
class Said:
    """A generated answer."""

    prompt: str
    text: str
    tokens: int
    ended: bool
    """Whether the model's end token ended it before `max_tokens`."""
    seconds: float


@dataclass(frozen=True)
class Speaker:
    """A model that is ready to generate from prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    ends: tuple[int, ...]
    about: str
    """The origin of the model."""

    def is_chat(self, how: How) -> bool:
        """Whether prompts are the user's turns. Raises ModelError for a conversation without a template."""
        has_template = bool(self.tokenizer.chat_template)
        if how.chat and not has_template:
            raise ModelError("the tokenizer has no chat template", hint="--no-chat goes on from the text itself")
        if how.system is not None and (how.chat is False or not has_template):
            raise ModelError("--system belongs to a conversation, and there is none", hint="leave it out")
        return has_template if how.chat is None else how.chat

    def say(self, prompt: str, how: How, *, show: Show | None = None) -> Said:
        """The model's answer. `show` gets the text during generation. Raises ModelError if memory is not sufficient."""
        ids = encode_prompt(self.tokenizer, prompt, chat=self.is_chat(how), system=how.system)
        room = (getattr(self.model.config, "max_position_embeddings", None) or len(ids) + how.max_tokens) - len(ids)
        if room < 1:
            most = len(ids) + room
            raise ModelError(f"the prompt is {len(ids)} tokens, and the model has {most} positions: shorten it")
        began = time.monotonic()
        with telling_memory():
            new = self._generate(ids, how, min(how.max_tokens, room), show)
        ended = bool(new) and new[-1] in self.ends
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        return Said(prompt, text, len(new), ended, time.monotonic() - began)

    def _generate(self, ids: list[int], how: How, most: int, show: Show | None) -> list[int]:
        from transformers import GenerationConfig

        sampling: dict[str, Any] = {"temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
        # the folder's values are ignored: a penalty in them would change which token is most probable
        self.model.generation_config = GenerationConfig(
            do_sample=how.temperature > 0,
            max_new_tokens=most,
            eos_token_id=list(self.ends) or None,
            pad_token_id=next((i for i in (self.tokenizer.pad_token_id, *self.ends) if i is not None), 0),
            **(sampling if how.temperature > 0 else {}),
        )
        torch.manual_seed(how.seed)
        tokens = torch.tensor([ids], device=self.model.device)
        streamer = None if show is None else _streamer(self.tokenizer, show)
        generate = cast("Any", self.model).generate
        with torch.inference_mode():
            out = generate(tokens, attention_mask=torch.ones_like(tokens), streamer=streamer)
        new: list[int] = out[0, len(ids) :].tolist()
        return new


def _streamer(tokenizer: PreTrainedTokenizerFast, show: Show) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_speaker(
    meant: Meant,
    *,
    adapter: Path | None = None,
    base: str | None = None,
    tokenizer_name: str | None = None,
    device: torch.device,
    dtype: str | None = None,
    tell: Tell,
) -> Speaker:
    """The model in memory. `adapter`: added to its weights; `base`: replaces the base that an adapter names.

    Raises ModelError and DataError if something cannot be loaded.
    """
    quiet_transformers()
    logging.getLogger("transformers.generation").setLevel(logging.ERROR)
    with telling_memory():
        if meant.checkpoint is not None:
            speaker = _of_checkpoint(meant.checkpoint, tokenizer_name, dtype=dtype, tell=tell)
        else:
            speaker = _of_files(meant, base, tokenizer_name, device=device, dtype=dtype, tell=tell)
        if adapter is not None:
            add_adapter(speaker.model, adapter)
        cast("nn.Module", speaker.model).to(device)
    speaker.model.eval()
    return speaker


def _of_checkpoint(source: Source, tokenizer_name: str | None, *, dtype: str | None, tell: Tell) -> Speaker:
    """The model of a checkpoint, the same as from its export, without writing one."""
    import transformers

    if source.shape.hf_class is None:
        raise ModelError(f"{source.path} is of a kind of model that transformers does not have")
    name = source.config.data.tokenizer if tokenizer_name is None else tokenizer_name
    tokenizer = load_tokenizer(_config(source.config.model.name, name, source.config))
    tell(f"reading {source.path}")
    ours = load_trained(source)
    tensors = {key: parameter.detach() for key, parameter in named_weights(ours)}
    spec = lora_of(ours)
    whole = tensors if spec is None else merge(tensors, spec)
    kind = getattr(transformers, source.shape.hf_class)
    kept = DTYPES[dtype or "fp32"]
    config = source.shape.hf_config()
    model = kind.from_pretrained(None, config=config, state_dict=whole, dtype=kept, trust_remote_code=False)
    said = generation_of(source.config, tokenizer, source.shape.vocab_size, tell=tell)
    return Speaker(model, tokenizer, tuple(ids_of(said.get("eos_token_id"))), f"{source.path}")


def _of_files(
    meant: Meant, base: str | None, tokenizer_name: str | None, *, device: torch.device, dtype: str | None, tell: Tell
) -> Speaker:
    name = base_of(meant.adapter, base) if meant.adapter is not None else str(meant.model)
    own = meant.adapter is not None and (meant.adapter / "tokenizer_config.json").is_file()
    said = tokenizer_name or (str(meant.adapter) if own else name)
    settle_offline(Config(model=ModelConfig(name=name)))
    tokenizer = load_tokenizer(_config(name, said))
    about = f"{meant.adapter} over {name}" if meant.adapter is not None else name
    tell(f"reading {about}")
    model = _read_model(name, device=device, dtype=dtype)
    told = read_generation(meant.adapter) if meant.adapter is not None else {}
    ends = ids_of(told.get("eos_token_id") or cast("Any", model).generation_config.eos_token_id)
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if meant.adapter is not None:
        add_adapter(model, meant.adapter)
    return Speaker(model, tokenizer, tuple(ends), about)


def _config(model: str | None, tokenizer: str, config: Config | None = None) -> Config:
    template = None if config is None else config.data.chat_template
    return Config(model=ModelConfig(name=model), data=DataConfig(tokenizer=tokenizer, chat_template=template))


def _read_model(name: str, *, device: torch.device, dtype: str | None) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, PreTrainedModel

    folder = Path(name)
    if folder.is_dir():
        _check_room(folder, device, dtype)
    options = {"dtype": "auto" if dtype is None else DTYPES[dtype], **without_map(PreTrainedModel)}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, trust_remote_code=False, use_safetensors=True, **options
        )
    except (OSError, ValueError, SafetensorError) as error:
        if folder.is_dir():
            open_folder(folder)  # raises for a damaged file, and names it
        hint = "" if folder.is_dir() else "give a local folder, or check the name, the network and HF_TOKEN"
        raise ModelError(f"{name} does not load in transformers: {first_line(error)}", hint=hint) from error
    return model


def _check_room(folder: Path, device: torch.device, dtype: str | None) -> None:
    """Raise ModelError if the weights do not fit into free memory, before they are loaded."""
    stored = open_folder(folder).values()
    sizes = [(torch.Size(one.shape).numel(), 4 if isinstance(one.dtype, str) else one.dtype.itemsize) for one in stored]
    size = sum(count * (DTYPES[dtype].itemsize if dtype else width) for count, width in sizes)
    room = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if room is not None and size > room:
        what = f"{folder} has {render_bytes(size)} of weights, and {render_bytes(room)} are free"
        raise ModelError(f"{what} on this {'machine' if device.type == 'cpu' else 'GPU'}", hint=MEMORY_HINT)


@torch.no_grad()
def add_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add an adapter in PEFT's format to the weights. Raises ModelError for an adapter of another model."""
    module = cast("nn.Module", model)
    names = [n for n, child in module.named_modules() if isinstance(child, nn.Linear) and n != "lm_head"]
    spec = read_spec(folder, names)
    stored = open_weights(folder / WEIGHTS_FILE)
    for name in spec.targets:
        weight = cast("nn.Linear", module.get_submodule(name)).weight
        missing = [child for child in PAIR if f"{PREFIX}{name}.{child}.weight" not in stored]
        if missing:
            raise ModelError(f"{folder / WEIGHTS_FILE} has no {name}.{missing[0]}")
        down, up = (stored[f"{PREFIX}{name}.{child}.weight"].read().float() for child in PAIR)
        if (up.shape[0], down.shape[-1]) != tuple(weight.shape) or up.shape[-1] != down.shape[0]:
            sizes = f"{list(up.shape)} and {list(down.shape)}, over weights of {list(weight.shape)}"
            raise ModelError(f"{folder} is an adapter of another model: {name} has {sizes}")
        weight.copy_(weight.float() + spec.scaling * (up @ down).to(weight.device))


@contextlib.contextmanager
def telling_memory() -> Iterator[None]:
    """Turn an out-of-memory error into a ModelError with a hint about settings that need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of GPU memory: {first_line(error)}", hint=MEMORY_HINT) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise ModelError(f"out of memory: {first_line(error) or 'none is left'}", hint=MEMORY_HINT) from None
