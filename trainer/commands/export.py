"""`train.py export`: its command line. Imports no torch; `trainer.export.checkpoint` does the work."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trainer.commands.help import CONTEXT
from trainer.commands.interruptible import interruptible
from trainer.console import write_json, write_line

HELP = """Write a run's checkpoint in Hugging Face format.

RUN is a run folder (runs/NAME-DATE-TIME, or results/ID after a pull with --checkpoint) or one of its checkpoints. The
new folder holds safetensors, configs, tokenizer and chat template; of a LoRA run it holds adapter/ in PEFT's format.

This process reads the checkpoint on the CPU, whatever number of ranks saved it. Before the folder gets its name,
transformers opens it, and its weights and logits are compared.

\b
Examples:
  python train.py export runs/big
  python train.py export runs/big --step 400 --dtype bf16 --out model/
  python train.py export runs/big --full-state all.pt   # for torch.load

Exit codes: 0 exported; 1 an error in this program; 2 nothing to export, or it cannot be read.
"""


@click.command(
    "export",
    cls=interruptible("interrupted; what was there is as it was"),
    help=HELP,
    context_settings=CONTEXT,
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", metavar="N|PATH", help="The checkpoint: its step or its folder [the newest complete one].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write [RUN/export_step_N].")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", help="Type of the weights [fp32].")
@click.option(
    "--full-state",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write only {model, optimizer, step, config}, with whole tensors, for torch.load; with --out, the folder too.",
)
@click.option(
    "--merge", is_flag=True, help="For a LoRA run: also write the model with the adapters added to its weights."
)
@click.option("--tokenizer", metavar="NAME", help="Use this tokenizer, not the run's, whose folder may not be here.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def export(
    run: Path,
    step: str | None,
    out: Path | None,
    dtype: str,
    full_state: Path | None,
    merge: bool,
    tokenizer: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    from trainer.export import checkpoint

    def tell(line: str) -> None:
        write_line(sys.stderr, line)

    source = checkpoint.find_source(run, step)
    written: dict[str, object] = {"checkpoint": str(source.path), "step": source.step}
    lines = []
    if full_state is not None:
        written |= {"full_state": str(checkpoint.write_full_state(source, full_state, tell=tell))}
        lines.append(f"full state of step {source.step}: {written['full_state']}")
    if full_state is None or out is not None:
        folder = checkpoint.export_folder(source, out or source.run_dir / f"export_{source.path.name}")
        written |= {"export": str(folder), "dtype": dtype}
        lines += checkpoint.export_checkpoint(
            source, folder, dtype=dtype, merged=merge, tokenizer_name=tokenizer, tell=tell
        )
    if as_json:
        write_json(written)
    else:
        write_line(sys.stdout, "\n".join(lines))
