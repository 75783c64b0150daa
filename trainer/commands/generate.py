"""`train.py generate`: its command line. Imports no torch; `trainer.export.generate` does the work."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.commands.help import CONTEXT
from trainer.commands.interruptible import interruptible
from trainer.console import printable, shown, write_json, write_line
from trainer.errors import UserError

if TYPE_CHECKING:
    import torch

HELP = """Generate text with a trained model.

MODEL is a run folder (its export, else its newest complete checkpoint), pulled results (results/ID or the ID), an
export, an adapter, or any Hugging Face folder or name. An adapter finds its base model by itself.

PROMPT is the user's turn if the tokenizer has a chat template, else plain text to continue; `-` reads it from stdin.
Without --temperature decoding is greedy, so the answer is always the same; with it, tokens are sampled.

\b
Examples:
  python train.py generate runs/big "What is a monad?"
  python train.py generate runs/big --step 400 "A monad is" --temperature 0.7

Exit codes: 0 generated; 1 an error in this program; 2 no such model, or it cannot be read.
"""


class PromptError(UserError):
    """There is no prompt."""


@click.command(
    "generate",
    cls=interruptible("interrupted"),
    help=HELP,
    context_settings=CONTEXT,
)
@click.argument("model")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--max-tokens", type=click.IntRange(1, 100_000), default=200, metavar="N", help="Tokens to generate at most [200]."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.0,
    metavar="T",
    help="Temperature of sampling; 0: greedy decoding [0].",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    metavar="P",
    help="With --temperature: sample from the most probable tokens that add up to P [1].",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, metavar="N", help="Seed for --temperature [0].")
@click.option("--chat/--no-chat", default=None, help="Take the prompt as the user's turn [if there is a template].")
@click.option("--system", metavar="TEXT", help="System message before the user's turn.")
@click.option("--step", metavar="N|PATH", help="For a run: the checkpoint, by step or folder.")
@click.option("--adapter", type=click.Path(path_type=Path, file_okay=False), help="LoRA adapter to put over MODEL.")
@click.option("--base", metavar="DIR", help="Base model of the adapter, if it is not where the run had it.")
@click.option("--tokenizer", metavar="NAME", help="Use this tokenizer, not the model's.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Device to run on [auto].")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Type of the weights [as stored].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool | None,
    system: str | None,
    step: str | None,
    adapter: Path | None,
    base: str | None,
    tokenizer: str | None,
    device: str,
    dtype: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    from trainer.export import generate as work
    from trainer.export.which import find_model

    texts = _read_prompts(prompts)
    meant = find_model(model, step)
    if base is not None and meant.adapter is None:
        raise PromptError("--base is the model that an adapter is of, and MODEL is no adapter", hint="leave it out")
    how = work.How(max_tokens, temperature, top_p, seed, chat, system)
    speaker = work.load_speaker(
        meant,
        adapter=adapter,
        base=base,
        tokenizer_name=tokenizer,
        device=_device(device),
        dtype=dtype,
        tell=lambda line: write_line(sys.stderr, line),
    )
    live = sys.stdout.isatty() and not as_json
    write_line(sys.stderr, f"sampling up to {max_tokens} tokens on {speaker.model.device}")
    said = []
    for text in texts:
        if len(texts) > 1 and not as_json:
            write_line(sys.stdout, f"> {shown(text)}")
        one = speaker.say(text, how, show=_show if live else None)
        said.append(one)
        if not as_json:
            write_line(sys.stdout, "" if live else one.text)
    if as_json:
        write_json({"model": speaker.about, "samples": [asdict(one) for one in said]})
    elif live:
        tokens, seconds = sum(one.tokens for one in said), sum(one.seconds for one in said)
        write_line(
            sys.stderr, f"{tokens} tokens in {seconds:.1f} s" + ("" if said[-1].ended else "; --max-tokens ended it")
        )


def _read_prompts(prompts: tuple[str, ...]) -> list[str]:
    if not prompts and sys.stdin.isatty():
        raise PromptError("there is no prompt", hint='give a text: generate MODEL "What is a monad?"; - reads one')
    texts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in prompts or ("-",)]
    if not all(text.strip() for text in texts):
        raise PromptError("a prompt is empty", hint="write what the model is to go on from")
    return texts


def _device(wanted: str) -> torch.device:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise PromptError("--device is cuda, and torch sees no GPU here", hint="--device cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
