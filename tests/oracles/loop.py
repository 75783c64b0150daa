"""Gradients and weights of our runs, compared with a plain loop: transformers' model, torch's loss, clip and AdamW."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, get_cosine_schedule_with_warmup

from tests.oracles.measure import Oracle, largest_difference, worst
from tests.oracles.reference import save_hf
from tests.oracles.runs import SEQ_LEN, run_config, write_rows
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_shape
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.dist import Dist
from trainer.recipes import sft

ROWS, STEPS = 16, 5
LEARNING_RATE = 1e-3


def labelled(rows: str) -> list[tuple[Tensor, Tensor]]:
    """Token ids [1, T] of every row, and the same with -100 outside of the answer, by transformers alone."""
    tokenizer = build_bytes_tokenizer()
    examples = []
    for line in Path(rows).read_text().splitlines():
        pair = json.loads(line)
        turns = [{"role": "user", "content": pair["question"]}, {"role": "assistant", "content": pair["answer"]}]
        out = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = (torch.tensor([out[key][:SEQ_LEN]]) for key in ("input_ids", "assistant_masks"))
        examples.append((ids, ids.where(mask.bool(), -100)))
    return examples


def mean_loss(model: PreTrainedModel, examples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The cross entropy summed over all rows, divided once by the number of targets."""
    total, count = torch.zeros(()), 0
    for ids, labels in examples:
        total = total + F.cross_entropy(model(ids).logits[0, :-1], labels[0, 1:], reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    return total / count


def plain_weights(folder: Path, rows: str) -> dict[str, Tensor]:
    """The weights after five steps of the plain loop."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=False)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    for _ in range(STEPS):
        mean_loss(model, labelled(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_rank(dist: Dist, folder: str, rows: str, run_dir: str, micro_batch_size: int) -> None:
    config = run_config(
        rows,
        target={"train_backend": "auto"},
        model={"name": folder},
        optim={"learning_rate": LEARNING_RATE},
        train={"steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": micro_batch_size},
        run={"export": True},
    )
    Path(run_dir).mkdir(exist_ok=True)
    sft.run(config, Path(run_dir), dist)


def weights_difference(folder: Path, *, ranks: int, micro_batch_size: int) -> float:
    rows, model = write_rows(folder, ROWS), folder / "model"
    save_hf(tiny_shape(vocab_size=260), model)
    build_bytes_tokenizer().save_pretrained(model)
    run_ranks(train_rank, ranks, str(model), rows, str(folder / "run"), micro_batch_size)
    got = load_file(folder / "run" / "export" / "model.safetensors")
    return worst(largest_difference(got[name], weight) for name, weight in plain_weights(model, rows).items())


ORACLES = [
    Oracle(
        "weights after 5 steps",
        "plain loop: transformers, sum of F.cross_entropy / number of targets, torch AdamW",
        f"{ROWS} rows, {ranks} rank{'s' * (ranks > 1)}, micro-batches of {size}",
        1e-5,
        partial(weights_difference, ranks=ranks, micro_batch_size=size),
    )
    for ranks, size in ((1, 4), (2, 4), (4, 4))
]
