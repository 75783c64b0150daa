"""Generates the model's continuations of `run.sample_prompts` at each evaluation, by greedy decoding.

Every rank continues all prompts, so that a sharded model can be gathered; rank 0 writes its results. A token costs one
forward over all prompts, without the compiled code, because that is for other shapes. No random numbers are drawn, and
the training's state does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.tokenize.ends import end_of_turn
from trainer.data.tokenize.prompt import encode_prompt
from trainer.dist import FlagBoard
from trainer.errors import ConfigError
from trainer.metrics.samples import SamplesLog
from trainer.models.protocol import Shape
from trainer.parallel.blocks import eagerly
from trainer.schema import SAMPLES_FILE, Config
from trainer.train.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MULTIPLE = 64
"""Row lengths are a multiple of this, because kernels, especially of float8, need such sizes."""
Ask = Callable[[], bool]


class Prompts:
    """A run's prompts as tokens, and the decoding of their continuations."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast, shape: Shape) -> None:
        """Raises ConfigError or DataError for a prompt that the model cannot continue."""
        self.texts, self._tokenizer = config.run.sample_prompts, tokenizer
        chat, system = config.recipe == "sft", config.data.system_prompt
        self.ids = [
            encode_prompt(tokenizer, text, chat=chat, system=system, where=f"run.sample_prompts[{index}]")
            for index, text in enumerate(self.texts)
        ]
        longest = max(map(len, self.ids))
        room = shape.max_position_embeddings - longest
        if room < 1:
            most = f"more than the model's {shape.max_position_embeddings} positions leave room for"
            raise ConfigError(f"run.sample_prompts holds a text of {longest} tokens, {most}", hint="shorten it")
        self.most_new = min(config.run.sample_tokens, room)
        ends = (tokenizer.eos_token_id, end_of_turn(tokenizer) if chat else None)
        self.ends = frozenset(end for end in ends if end is not None)

    def read(self, new: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
        """Each prompt with the text of its new tokens."""
        said = (str(self._tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in new)
        return list(zip(self.texts, said, strict=True))


def read_prompts(config: Config, tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Prompts | None:
    """None if the config has no prompts."""
    return Prompts(config, tokenizer, shape) if config.run.sample_prompts else None


def sampler(run: Run, prompts: Prompts) -> Callable[[int, Ask], None]:
    """A function that continues the prompts after a step and writes the results. Every rank must call it."""
    path = run.run_dir / SAMPLES_FILE
    log = SamplesLog(path, run.log, keep_through=run.start_step) if run.dist.is_main else None

    def sample(step: int, is_stop_requested: Ask) -> None:
        began = time.perf_counter()
        new = likeliest(run, prompts, is_stop_requested)
        if new is not None and log is not None:
            log.write(step, prompts.read(new), seconds=time.perf_counter() - began)

    return sample


@torch.no_grad()
def likeliest(run: Run, prompts: Prompts, is_stop_requested: Ask) -> list[list[int]] | None:
    """The most probable tokens after each prompt, up to an end token; None if a rank was asked to stop meanwhile."""
    device, count = run.dist.device, len(prompts.ids)
    sizes = [len(ids) for ids in prompts.ids]
    length = -(-(max(sizes) + prompts.most_new) // MULTIPLE) * MULTIPLE
    rows = [ids + [0] * (length - len(ids)) for ids in prompts.ids]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    positions = torch.arange(length, device=device).repeat(count, 1)
    documents = torch.zeros_like(tokens)
    new: list[list[int]] = [[] for _ in sizes]
    flags, stopping, left = FlagBoard(run.dist, width=2), 0, 1
    run.module.eval()
    with eagerly(run.module):
        for _ in range(prompts.most_new):
            run.dist.progress.enter("evaluation")
            at = torch.tensor([size - 1 for size in sizes], device=device)
            head = partial(_likeliest_at, at=at)
            said: list[int] = run.module(tokens, positions, documents, packed=False, head=head).tolist()
            for row, token in enumerate(said):
                if not new[row] or new[row][-1] not in prompts.ends:
                    new[row].append(token)
                    tokens[row, sizes[row]] = token
                    sizes[row] += 1
            # rounding may differ between ranks, so they may end at different tokens: all continue while one does
            open_rows = any(ids[-1] not in prompts.ends for ids in new)
            flags.post([int(is_stop_requested()), int(open_rows)])
            stopping, left = flags.read(keep=0)
            if stopping or not left:
                break
    run.module.train()
    return None if stopping else new


def _likeliest_at(hidden: Tensor, weight: Tensor, *, at: Tensor) -> Tensor:
    """For each row of `hidden` [B, T, D], the most probable next token after its position `at` [B]."""
    last = hidden[torch.arange(len(at), device=at.device), at]
    return F.linear(last, weight.to(last.dtype)).float().argmax(dim=-1)
