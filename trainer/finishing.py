"""The end of a run: the verified export, outcome.json, and a last line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from trainer.dist import Dist, on_rank0
from trainer.models import hf
from trainer.models.decoder import DecoderShape
from trainer.run import Result, Run
from trainer.schema import EXPORT_DIR, OUTCOME_FILE

GREEDY_QUESTION = "What does os.path.join do?"


def finish(run: Run, result: Result, *, shape: DecoderShape, tokenizer: Any) -> int:
    """Export the model where the run is complete, write outcome.json, and return the exit code."""
    outcome = {
        "state": "stopped" if result.stopped else "succeeded",
        "steps": result.step,
        "eval_loss_first": result.eval_loss_first,
        "eval_loss_last": result.eval_loss_last,
        "export": None,
        "greedy": None,
    }
    run.dist.progress.enter("exporting")
    if run.config.run.export and not result.stopped:
        outcome |= export(run.run_dir / EXPORT_DIR, shape, run.module, tokenizer, run.dist)
        run.log.note(f"exported to {run.run_dir / EXPORT_DIR}: reopened with transformers, same weights and logits")
    on_rank0(run.dist, lambda: write_outcome(run.run_dir, outcome))
    run.log.note(render_outcome(outcome, run.data.train.total_steps))
    run.log.close()
    return 0


def export(folder: Path, shape: DecoderShape, module: torch.nn.Module, tokenizer: Any, dist: Dist) -> dict[str, Any]:
    """Write the model in Hugging Face format, reopened and compared; every rank calls this.

    Returns the outcome's entries `export` and `greedy`: what the trainer's own model says to a fixed question, for
    anyone to compare with what another library makes of the export.
    """
    prompt_ids = greedy_prompt(tokenizer)
    tokens = hf.export_model(folder, module, shape=shape, tokenizer=tokenizer, prompt_ids=prompt_ids, dist=dist)
    return {"export": folder.name, "greedy": {"prompt_ids": prompt_ids, "tokens": tokens}}


def greedy_prompt(tokenizer: Any) -> list[int]:
    """The token ids of one fixed question, up to where the assistant begins."""
    turns = [{"role": "user", "content": GREEDY_QUESTION}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Write outcome.json in one piece; it is the last file of a run."""
    aside = run_dir / f".tmp_{OUTCOME_FILE}"
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in outcome.items()]
    aside.write_text("{\n " + ",\n ".join(lines) + "\n}\n")  # a list of token ids on one line
    aside.replace(run_dir / OUTCOME_FILE)


def render_outcome(outcome: dict[str, Any], total_steps: int) -> str:
    """`succeeded after 200 of 200 steps, held-out loss 5.561 -> 2.213 (-60 %)`."""
    text = f"{outcome['state']} after {outcome['steps']} of {total_steps} steps"
    first, last = outcome["eval_loss_first"], outcome["eval_loss_last"]
    if first is None or last is None:
        return text
    return f"{text}, held-out loss {first:.4f} -> {last:.4f} ({(last - first) / first:+.0%})"
