"""The losses and gradient norms of a run, compared with those of TRL's SFTTrainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.oracles.measure import Oracle, series_difference
from tests.oracles.reference import save_hf
from tests.oracles.runs import SEQ_LEN, records_of, run_config, write_rows
from tests.support.tiny import tiny_shape
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.token_writer import TokenWriter
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer, vocabulary_hash

if TYPE_CHECKING:
    from datasets import Dataset

Record = dict[str, Any]
Histories = Callable[[Path, int], tuple[list[Record], list[Record]]]

SHAPE = tiny_shape(vocab_size=260, hidden_size=128, intermediate_size=448, head_dim=32)
STEPS = 20


def trl_history(folder: Path, data: Dataset, *, accumulation: int, assistant_only: bool) -> list[Record]:
    """What TRL logs of each step: it renders, tokenizes, masks, batches and trains by itself."""
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

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
        assistant_only_loss=assistant_only,
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
    trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=build_bytes_tokenizer())
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def tuned(folder: Path, accumulation: int) -> tuple[list[Record], list[Record]]:
    """Ours and TRL's on conversations, from the same weights, rows, order and settings."""
    from datasets import Dataset

    rows = write_rows(folder)
    pairs = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    roles = {"user": "question", "assistant": "answer"}
    turns = [[{"role": role, "content": pair[key]} for role, key in roles.items()] for pair in pairs]
    ours = our_history(folder, rows, "sft", accumulation)
    data = Dataset.from_dict({"messages": turns})
    return ours, trl_history(folder, data, accumulation=accumulation, assistant_only=True)


def pretrained(folder: Path, accumulation: int) -> tuple[list[Record], list[Record]]:
    """The same on a token file, of which TRL gets the tokens."""
    from datasets import Dataset

    random = np.random.RandomState(0)
    documents = [random.zipf(1.3, size=length) % 250 for length in random.randint(2, SEQ_LEN, size=60)]
    tokenizer = vocabulary_hash(build_bytes_tokenizer())
    with TokenWriter(folder / "a.tokens", vocab_size=260, tokenizer=tokenizer, has_targets=False) as file:
        for number, ids in enumerate(documents):
            file.add(Encoded(f"{number}", ids.astype(np.int32), np.ones(len(ids), dtype=bool)))
    ours = our_history(folder, str(folder / "a.tokens"), "pretrain", accumulation)
    data = Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents]})
    return ours, trl_history(folder, data, accumulation=accumulation, assistant_only=False)


def our_history(folder: Path, source: str, recipe: str, accumulation: int) -> list[Record]:
    save_hf(SHAPE, folder / "model")
    build_bytes_tokenizer().save_pretrained(folder / "model")
    train = {"micro_batch_size": 6 // accumulation}
    config = run_config(source, recipe=recipe, model={"name": str(folder / "model")}, train=train)
    return [record for record in records_of(config, folder / "run") if "loss" in record]


@cache
def _differences(histories: Histories, accumulation: int) -> tuple[float, float]:
    """Of the losses, and of the gradient norms relative to them."""
    with TemporaryDirectory() as folder:
        ours, theirs = histories(Path(folder), accumulation)
    losses, norms = ([[record[key] for record in each] for each in (ours, theirs)] for key in ("loss", "grad_norm"))
    return series_difference(*losses), series_difference(*norms, relative=True)


def loss_difference(folder: Path, *, histories: Histories, accumulation: int) -> float:
    return _differences(histories, accumulation)[0]


def norm_difference(folder: Path, *, histories: Histories, accumulation: int) -> float:
    return _differences(histories, accumulation)[1]


def _oracles(histories: Histories, accumulation: int, *, name: str = "") -> list[Oracle]:
    inputs = f"0.5M parameters, 20 steps of 6 rows, {accumulation} micro-batch{'es' * (accumulation > 1)} a step"
    both = {"histories": histories, "accumulation": accumulation}
    loss, norm = partial(loss_difference, **both), partial(norm_difference, **both)
    return [
        Oracle(f"loss of each step{name}", "TRL SFTTrainer", inputs, 1e-4, loss),
        Oracle(f"gradient norm of each step{name}, relative", "TRL SFTTrainer", inputs, 1e-3, norm),
    ]


ORACLES = [*_oracles(tuned, 1), *_oracles(tuned, 2), *_oracles(pretrained, 1, name=" of pretraining")]
