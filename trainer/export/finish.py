"""The end of a run: the verified export, outcome.json, and a last line."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.agree import settle
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import step_name
from trainer.checkpoint.load import load_model, verify
from trainer.checkpoint.retention import best_in
from trainer.dist import Dist, on_keepers, on_rank0
from trainer.export.adapter import export_adapter
from trainer.export.generation import generation_of
from trainer.export.model import Rows, export_tensors, random_rows, rows_of
from trainer.models.hf import gather_full
from trainer.models.lora import lora_of, merge
from trainer.models.protocol import Shape
from trainer.run_folder import write_outcome
from trainer.schema import ADAPTER_DIR, CHECKPOINTS_DIR, EXPORT_DIR
from trainer.train.run import Result, Run


def finish(run: Run, result: Result, *, shape: Shape, tokenizer: Any) -> int:
    """Export the model if the run is complete, write outcome.json, and return the exit code.

    If the last state could not be saved, raises that error after the export.
    """
    outcome = {
        "state": "stopped" if result.stopped else "succeeded",
        "steps": result.step,
        "eval_loss_first": result.eval_loss_first,
        "eval_loss_last": result.eval_loss_last,
        "eval_loss_best": result.eval_loss_best,
        "eval_step_best": result.eval_step_best,
        "reason": result.reason,
        "export": None,
        "adapter": None,
        "compared": None,
        "exported_step": None,
        "start_s": run.dist.startup.report.to_dict() if run.dist.startup.report else None,
    }
    run.dist.progress.enter("exporting")
    if run.config.run.export and not result.stopped:
        outcome["exported_step"] = take_weights(run, result)
        outcome |= export(
            run.run_dir / EXPORT_DIR,
            run.module,
            shape=shape,
            tokenizer=tokenizer,
            base_name=run.config.model.name,
            merged=run.config.lora.merge_export,
            rows=rows_to_compare(run, result.step, shape) if run.dist.is_main else [],
            dist=run.dist,
            generation=on_rank0(
                run.dist, lambda: generation_of(run.config, tokenizer, shape.vocab_size, tell=run.log.note)
            ),
        )
        for line in render_export(run.run_dir, outcome):
            run.log.note(line)
    if result.unsaved is not None:  # the same on every rank, and reported earlier; the export is worth its space
        raise result.unsaved
    on_keepers(run.dist, lambda: write_outcome(run.run_dir, outcome_here(outcome, run.dist)))
    for line in render_outcome(outcome, run.data.train.total_steps):
        run.log.note(line)
    run.log.close()
    return 0


def outcome_here(outcome: Mapping[str, Any], dist: Dist) -> dict[str, Any]:
    """The content of outcome.json on this rank's storage: an export is only where rank 0 has written it."""
    if dist.is_main or dist.storages is None:
        return dict(outcome)
    return {**outcome, "export": None, "adapter": None, "compared": None, "written_on": dist.storages.names[0]}


def whole_steps(folder: Path, dist: Dist) -> list[int] | None:
    """The steps of the checkpoints that all storages hold together; None if there is one storage."""
    if dist.storages is None:
        return None
    return [step for step, _ in settle(folder, dist.storages, dist.rank, dist.control_group).whole]


def take_weights(run: Run, result: Result) -> int:
    """Fill the model with the weights to export, and return their step; every rank must call this.

    The model already holds the last step's weights. They stay if the best checkpoint is missing or damaged. Raises
    CheckpointError if that checkpoint changes while it is read.
    """
    source, last = run.config.run.export_from, result.step
    if source == "last" or (source == "auto" and result.reason is None):
        return last
    folder = run.run_dir / CHECKPOINTS_DIR
    common = whole_steps(folder, run.dist)
    best = on_rank0(run.dist, lambda: best_in(folder, newest=last, among=common))
    if best is None:
        run.log.note("warning: no checkpoint has a held-out loss: the weights of the last step are exported")
        return last
    step, loss = best
    lowest = result.eval_loss_best
    if result.eval_step_best and lowest is not None and loss > lowest:
        told = f"the checkpoint of step {result.eval_step_best} with the lowest held-out loss, {lowest:.4f}"
        run.log.note(f"warning: {told}, is not there any more: the best of the others, step {step}, is exported")
    if step == last:
        return last
    path = folder / step_name(step)
    try:
        whole = verify(path, run.dist)
    except CheckpointError as error:
        run.log.note(f"warning: {error}; the weights of the last step are exported")
        return last
    run.log.note(f"the weights of {path.name} are exported, whose held-out loss, {loss:.4f}, was the lowest")
    load_model(path, run.module, run.dist, verified=whole)
    return step


def export(
    folder: Path,
    module: torch.nn.Module,
    *,
    shape: Shape,
    tokenizer: Any,
    base_name: str | None,
    merged: bool,
    rows: Rows,
    dist: Dist,
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the trained model into `folder`, or its adapters below it, reopen and compare; every rank must call this.

    Adapters go to FOLDER/adapter in PEFT's format (fp32, of the model `base_name`); the merged model is written only
    with `merged`. `rows`: on rank 0, the tokens of the comparison. Returns the outcome's entries `export`, `adapter`
    and `compared`: these rows and the prediction of the trainer's model after each token, to compare with the
    predictions of another library from the export. `generation`: the content of generation_config.json.
    """
    spec = lora_of(module)
    tensors = gather_full(module, dist)
    written: dict[str, Any] = {"export": None, "adapter": None}
    if spec is None or merged:
        whole = tensors if spec is None or tensors is None else merge(tensors, spec)
        predicted = export_tensors(
            folder,
            whole,
            shape=shape,
            tokenizer=tokenizer,
            rows=rows,
            dist=dist,
            dtype=dtype,
            generation=generation,
        )
        written["export"] = folder.name
    if spec is not None:
        predicted = on_rank0(
            dist,
            lambda: export_adapter(
                folder / ADAPTER_DIR,
                tensors or {},
                spec=spec,
                shape=shape,
                base_name=base_name,
                tokenizer=tokenizer,
                rows=rows,
                generation=generation,
            ),
        )
        if not merged:
            on_rank0(dist, lambda: remove_model(folder))
        written["adapter"] = f"{folder.name}/{ADAPTER_DIR}"
    return {**written, "compared": {"rows": rows, "predicted": predicted}}


def rows_to_compare(run: Run, step: int, shape: Shape) -> list[list[int]]:
    """Rows of the run's data: held out, else of the last step; random ones if this start has not trained."""
    rows = rows_of(run.data.eval.batches())
    if not rows and step > run.start_step:
        rows = rows_of(run.data.train.step_batches(step - 1))
    return rows or random_rows(shape.vocab_size)


def remove_model(folder: Path) -> None:
    """Delete a whole model that an earlier export left beside adapter/: its weights do not match these adapters."""
    for pattern in ("model*.safetensors*", "config.json", "generation_config.json"):
        for path in folder.glob(pattern):
            path.unlink()


def render_export(run_dir: Path, written: dict[str, Any]) -> list[str]:
    """A line for each written folder below `run_dir`."""
    lines = []
    if written["export"]:
        lines.append(f"exported to {run_dir / written['export']}: reopened with transformers, same weights and logits")
    if written["adapter"]:
        reader = "PEFT" if find_spec("peft") else "the trainer's own reader (PEFT is not installed)"
        lines.append(
            f"adapter exported to {run_dir / written['adapter']}: reopened with {reader}, same tensors and logits"
        )
    return lines


def render_outcome(outcome: dict[str, Any], total_steps: int) -> list[str]:
    """`succeeded after 200 of 200 steps, held-out loss 5.561 -> 2.213 (-60 %)`; a warning if it did not fall."""
    text = f"{outcome['state']} after {outcome['steps']} of {total_steps} steps"
    if outcome["reason"]:
        text += f" ({outcome['reason']})"
    first, last, best = outcome["eval_loss_first"], outcome["eval_loss_last"], outcome["eval_loss_best"]
    if first is None or last is None:
        return [text]
    best_step, exported = outcome["eval_step_best"], outcome["exported_step"]
    text += f", held-out loss {first:.4f} -> {last:.4f}" + (f" ({(last - first) / first:+.0%})" if first else "")
    if best_step and best < last:
        text += f", lowest {best:.4f} after step {best_step}"
    if exported not in (None, outcome["steps"]):
        text += f"; exported: step {exported}"
    if last < first or (exported is not None and exported == best_step):
        return [text]
    return [f"warning: the held-out loss is no lower than before the first step, {first:.4f}", text]
