"""A config to begin with, as a text: short, explained, and valid as it stands. yaml is imported where it is needed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

MODEL, DATA, TEXT = "Qwen/Qwen2.5-0.5B-Instruct", "my.jsonl", "builtin:stdlib-docs"
ROWS = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
CONVERSATIONS = f"# JSONL, JSON, CSV or Parquet; one example: {ROWS}"
TRAIN = "python train.py"
HEAD = "# {about}. {first}\n# Every key: {program} keys\n"

FINE_TUNE = (
    HEAD
    + """\
recipe: sft
run: {{name: {name}}}
model:
  name: {model}  # a Hugging Face name, or a folder with config.json and safetensors
data:
  {conversations}
  train: [{data}]
  eval_fraction: 0.05  # of the examples, held out for the evaluations
  seq_len: 1024  # tokens in a row; short conversations share a row, except with packing: false
{lora}optim:
  learning_rate: {rate}
train:
  steps: null
  epochs: 3
  micro_batch_size: 4  # rows a GPU takes at once: `--calibrate` finds the fastest
target:
  gpu_ranks: [auto:1]  # [auto:4]: the four freest; [0, 1]: these; on a machine without: device: cpu
"""
)
LORA = """\
lora:
  rank: 16  # of the adapters; `targets` names the modules, else all linear ones
"""
PRETRAIN = (
    HEAD
    + """\
recipe: pretrain
run: {{name: {name}}}
model:  # random weights; a name instead goes on from a pretrained model
{model}
data:
  # text files, folders of them, or a .tokens file, which `{program} tokenize` makes once for all runs
  train: [{data}]
  tokenizer: {tokenizer}
  seq_len: 512
train:
  steps: 200
  micro_batch_size: 8  # rows a GPU takes at once: `--calibrate` finds the fastest
target:
  gpu_ranks: [auto:1]  # [auto:4]: the four freest; [0, 1]: these; on a machine without: device: cpu
"""
)
SHAPE = """\
  family: qwen3
  hidden_size: 128
  intermediate_size: 384
  num_layers: 4
  num_heads: 4
  num_kv_heads: 2"""
KINDS = ("lora", "sft", "pretrain")


def look_at(program: str, file: str) -> str:
    typed = shlex.quote(" ".join(file.splitlines()))
    return f"{program} {typed} --inspect" if program == TRAIN else f"{program} inspect {typed}"


def render(
    kind: str,
    file: str,
    *,
    model: str | None = None,
    data: str | Sequence[str] | None = None,
    program: str = TRAIN,
    first: str = "",
) -> str:
    """The config of a kind, as a file of that name. `program`: what its comments name, as it was called; `first`: what
    its first line says of it, unless it is how to look at that file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).lstrip(".-")[:100] or kind  # what `run.name` may be
    said = {"first": first or f"Look at it first: {look_at(program, file)}", "program": program, "name": as_yaml(name)}
    sources = [data] if isinstance(data, str) else list(data or ())
    if kind == "pretrain":
        return PRETRAIN.format(
            **said,
            about="Pretraining on plain text",
            model=f"  name: {as_yaml(model)}" if model else SHAPE,
            data=_listed(sources or [TEXT]),
            tokenizer="auto  # the model's own" if model else "builtin:bytes  # or a Hugging Face name or folder",
        )
    return FINE_TUNE.format(
        **said,
        about="Fine-tuning with LoRA" if kind == "lora" else "Fine-tuning of the whole model",
        model=as_yaml(model or MODEL),
        data=_listed(sources or [DATA]),
        conversations=CONVERSATIONS,
        lora=LORA if kind == "lora" else "",
        rate="2.0e-4" if kind == "lora" else "1.0e-5",
    )


def _listed(sources: Sequence[str]) -> str:
    return ", ".join(map(as_yaml, sources))


def as_yaml(text: str) -> str:
    """A text as YAML takes it for one, also `1e3`, `yes` and `a: b`."""
    import yaml

    is_plain = all(c.isalnum() or c in "/._-" for c in text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)
