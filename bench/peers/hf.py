"""What users of the Hugging Face stack run: transformers' Trainer or TRL's SFTTrainer, over accelerate's FSDP2.

python hf.py '[{"engine": "hf", "model": "0.5b", "seq": 2048, "mb": 8, "ac": "none", "liger": false}, …]'
engine: hf, trl. ac: none, fsdp (accelerate's activation checkpointing), gc (gradient_checkpointing=True). pack (trl):
wrapped, bfd. lora (trl): rank of PEFT adapters over a frozen bf16 model. Liger patches classes for good: a process of
its own.
"""

import tempfile

import torch
import torch.distributed as dist
from common import DOC_TOKENS, SHAPES, StepClock, init_dist, is_tiny, qwen2_config, report, run_settings, world

DEFAULTS = {
    "engine": "hf",
    "model": "7b",
    "seq": 4096,
    "mb": 1,
    "ac": "fsdp",
    "liger": False,
    "warm": 4,
    "steps": 8,
    "pack": "wrapped",
    "fsdp": True,
    "lora": 0,
}


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seq, vocab):
        g = torch.Generator().manual_seed(7)
        self.x = torch.randint(3, vocab, (n, seq), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


def run_one(c, dev):
    import transformers
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Qwen2ForCausalLM

    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch._dynamo.reset()
    s = SHAPES[c["model"]]
    torch.manual_seed(3)
    with torch.device(dev):
        model = Qwen2ForCausalLM(qwen2_config(c))
    model.to(dtype=torch.bfloat16 if c["lora"] else torch.float32)
    model.train()
    clock = StepClock()

    class Marks(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kw):
            clock.mark()

        def on_step_end(self, args, state, control, **kw):
            clock.mark()

    n_steps = c["warm"] + c["steps"]
    rows = n_steps * c["mb"] * world()
    args = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": n_steps,
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
        "remove_unused_columns": False,
        "use_cpu": dev.type == "cpu",
    }
    if c["fsdp"]:
        args.update(
            fsdp=True,
            fsdp_config={
                "version": 2,
                "reshard_after_forward": True,
                "activation_checkpointing": c["ac"] == "fsdp",
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
            },
        )
    peft_config = None
    if c["lora"]:
        from peft import LoraConfig

        peft_config = LoraConfig(r=c["lora"], lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if c["engine"] == "hf":
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**args),
            train_dataset=Rows(rows, c["seq"], s["vocab"]),
            data_collator=transformers.default_data_collator,
            callbacks=[Marks()],
        )
    else:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from trl import SFTConfig, SFTTrainer

        tok = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
            bos_token="<bos>",
        )
        data = Rows(rows + 2 * world(), c["seq"], s["vocab"]).x
        if c["pack"] == "bfd":  # documents, packed best-fit
            low, high = (4, 32) if is_tiny(c) else DOC_TOKENS
            g = torch.Generator().manual_seed(11)
            flat, docs, at = data.flatten(), [], 0
            while at < flat.numel():
                n = int(torch.randint(low, high + 1, (1,), generator=g))
                docs.append(flat[at : at + n].tolist())
                at += n
        else:
            docs = data.tolist()
        args.pop("remove_unused_columns")
        trainer = SFTTrainer(
            model=model,
            processing_class=tok,
            peft_config=peft_config,
            callbacks=[Marks()],
            train_dataset=Dataset.from_dict({"input_ids": docs}),
            args=SFTConfig(**args, max_length=c["seq"], packing=True, packing_strategy=c["pack"]),
        )
    out = trainer.train()
    report(clock, c["warm"], out.training_loss)
    trainer.optimizer = trainer.model = trainer.model_wrapped = None
    trainer.accelerator.free_memory()


def main():
    dev = init_dist()
    run_settings(lambda c: run_one(dict(DEFAULTS, **c), dev))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
