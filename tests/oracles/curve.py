"""The losses and gradient norms of a run, compared with those of TRL's SFTTrainer."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.oracles.measure import Oracle, series_difference
from tests.oracles.reference import save_hf
from tests.oracles.runs import SEQ_LEN, records_of, run_config, write_rows
from tests.tiny import tiny_shape
from trainer.data.tokenizer import build_bytes_tokenizer

SHAPE = tiny_shape(vocab_size=260, hidden_size=128, intermediate_size=448, head_dim=32)
STEPS = 20


def trl_history(folder: Path, rows: str, *, accumulation: int) -> list[dict[str, Any]]:
    """What TRL logs of each step: it renders, tokenizes, masks, batches and trains by itself."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    data = load_dataset("json", data_files=rows, split="train", cache_dir=str(folder / "cache"))
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    data = data.map(
        lambda row: {"messages": [{**turn, "content": row[turn["content"]]} for turn in turns]},
        remove_columns=data.column_names,
    )
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=6 // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_length=SEQ_LEN,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = build_bytes_tokenizer()
    trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def histories(folder: Path, accumulation: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ours and TRL's, from the same weights, rows, order and settings."""
    rows = write_rows(folder)
    save_hf(SHAPE, folder / "model")
    build_bytes_tokenizer().save_pretrained(folder / "model")
    config = run_config(rows, model={"name": str(folder / "model")}, train={"micro_batch_size": 6 // accumulation})
    ours = [record for record in records_of(config, folder / "run") if "loss" in record]
    return ours, trl_history(folder, rows, accumulation=accumulation)


@cache
def _differences(accumulation: int) -> tuple[float, float]:
    """Of the losses, and of the gradient norms relative to them."""
    with TemporaryDirectory() as folder:
        ours, theirs = histories(Path(folder), accumulation)
    losses, norms = ([[record[key] for record in each] for each in (ours, theirs)] for key in ("loss", "grad_norm"))
    return series_difference(*losses), series_difference(*norms, relative=True)


def loss_difference(folder: Path, *, accumulation: int) -> float:
    return _differences(accumulation)[0]


def norm_difference(folder: Path, *, accumulation: int) -> float:
    return _differences(accumulation)[1]


def _inputs(accumulation: int) -> str:
    return f"0.5M parameters, 20 steps of 6 rows, {accumulation} micro-batch{'es' * (accumulation > 1)} a step"


ORACLES = [
    oracle
    for count in (1, 2)
    for oracle in (
        Oracle(
            "loss of each step", "TRL SFTTrainer", _inputs(count), 1e-4, partial(loss_difference, accumulation=count)
        ),
        Oracle(
            "gradient norm of each step, relative",
            "TRL SFTTrainer",
            _inputs(count),
            1e-3,
            partial(norm_difference, accumulation=count),
        ),
    )
]
