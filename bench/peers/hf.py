"""The usual trainers of the Hugging Face stack: transformers' Trainer or TRL's SFTTrainer, over accelerate's FSDP2.

python hf.py '[{"engine": "hf", "model": "0.5b", "seq": 2048, "mb": 8, "ac": "none", "liger": false}, …]'
engine: hf, trl. ac: none, fsdp (accelerate's activation checkpointing), gc (gradient_checkpointing=True). pack (trl):
wrapped, bfd. lora (trl): rank of PEFT adapters over a frozen bf16 model. Liger patches classes
permanently, so it needs a separate process.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from common import SHAPES, Settings, StepClock, doc_tokens, hf_config, init_dist, report, run_settings, world

DEFAULTS: Settings = {
    "engine": "hf", "model": "7b", "seq": 4096, "mb": 1, "ac": "fsdp", "liger": False, "warm": 4, "steps": 8,
    "pack": "wrapped", "fsdp": True, "lora": 0,
}  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows in which every position is a label."""

    def __init__(self, count: int, c: Settings) -> None:
        source = torch.Generator().manual_seed(7)
        self.ids = torch.randint(3, SHAPES[c["model"]]["vocab"], (count, c["seq"]), generator=source)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[number], "labels": self.ids[number]}


class Marks(transformers.TrainerCallback):
    """Marks the steps' ends on the clock."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.mark()


def build_model(c: Settings, device: torch.device) -> transformers.PreTrainedModel:
    """The model in fp32, or frozen in bf16 for adapters; with torch's own attention."""
    config = transformers.Qwen2Config(**hf_config(c["model"]), use_cache=False)
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    with torch.device(device):
        model: transformers.PreTrainedModel = transformers.Qwen2ForCausalLM(config)
    dtype = torch.bfloat16 if c["lora"] else torch.float32
    model.to(dtype=dtype)  # type: ignore[call-arg]  # transformers wraps torch's method and loses its binding
    trained: transformers.PreTrainedModel = model.train()
    return trained


def build_args(c: Settings, device: torch.device) -> dict[str, Any]:
    """Arguments for TrainingArguments and SFTConfig."""
    args = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": c["warm"] + c["steps"],
        "per_device_train_batch_size": c["mb"],
        "bf16": True,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-5,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_liger_kernel": c["liger"],
        "gradient_checkpointing": c["ac"] == "gc",
        "dataloader_drop_last": True,
        "use_cpu": device.type == "cpu",
    }
    sharding = {
        "version": 2,
        "reshard_after_forward": True,
        "activation_checkpointing": c["ac"] == "fsdp",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    }
    return {**args, "fsdp": True, "fsdp_config": sharding} if c["fsdp"] else args


def build_trainer(c: Settings, device: torch.device, clock: StepClock) -> Any:
    rows = Rows((c["warm"] + c["steps"]) * c["mb"] * world(), c)
    args = build_args(c, device)
    return transformers.Trainer(
        model=build_model(c, device),
        args=transformers.TrainingArguments(**args, remove_unused_columns=False),
        train_dataset=rows,
        data_collator=transformers.default_data_collator,
        callbacks=[Marks(clock)],
    )


def build_sft_trainer(c: Settings, device: torch.device, clock: StepClock) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Rows((c["warm"] + c["steps"]) * c["mb"] * world() + 2 * world(), c)
    docs = cut_documents(rows.ids, c) if c["pack"] == "bfd" else rows.ids.tolist()
    args = SFTConfig(**build_args(c, device), max_length=c["seq"], packing=True, packing_strategy=c["pack"])
    return SFTTrainer(
        model=build_model(c, device),
        processing_class=build_tokenizer(),
        peft_config=build_adapters(c),
        callbacks=[Marks(clock)],
        train_dataset=Dataset.from_dict({"input_ids": docs}),
        args=args,
    )


def cut_documents(ids: torch.Tensor, c: Settings) -> list[list[int]]:
    (low, high), source = doc_tokens(c["model"]), torch.Generator().manual_seed(11)
    flat, docs, at = ids.flatten(), [], 0
    while at < flat.numel():
        size = int(torch.randint(low, high + 1, (1,), generator=source))
        docs.append(flat[at : at + size].tolist())
        at += size
    return docs


def build_tokenizer() -> Any:
    """A tokenizer, which SFTTrainer needs for its special tokens; the rows already consist of tokens."""
    from tokenizers import Tokenizer, models

    words = models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def build_adapters(c: Settings) -> Any:
    if not c["lora"]:
        return None
    from peft import LoraConfig

    return LoraConfig(r=c["lora"], lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def tokens_per_step(trainer: Any, c: Settings) -> float | None:
    """Tokens per step of all ranks, from packed rows, which are not quite full."""
    if c["pack"] != "bfd":
        return None
    sizes = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    rows: int = c["mb"] * world()
    return sum(sizes) / len(sizes) * rows


def run_one(c: Settings, device: torch.device) -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch._dynamo.reset()
    clock = StepClock()
    trainer = (build_trainer if c["engine"] == "hf" else build_sft_trainer)(c, device, clock)
    out = trainer.train()
    report(clock, c["warm"], loss=out.training_loss, tokens=tokens_per_step(trainer, c))
    trainer.optimizer = trainer.model = trainer.model_wrapped = None
    trainer.accelerator.free_memory()


def main() -> None:
    device = init_dist()
    run_settings(lambda c: run_one({**DEFAULTS, **c}, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
