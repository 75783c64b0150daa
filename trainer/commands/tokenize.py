"""`train.py tokenize`: its command line. Imports no torch; `trainer.data.tokenize.plain_text` does the work."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trainer.commands.help import CONTEXT
from trainer.commands.interruptible import interruptible
from trainer.console import write_json, write_line

HELP = """Write text as a token file for pretraining.

SOURCE is a .txt or .md file, or a folder of them: one document each. A .jsonl, .json or .parquet file or a Hugging Face
data set gives one document for each row, from its column `text`. builtin:stdlib-docs is also a source.

The documents of all sources go into one file in order, each followed by the tokenizer's end-of-text token. Text that
looks like a special token stays text. Train on the file with recipe=pretrain data.train=corpus.tokens.

\b
Examples:
  python train.py tokenize notes/ -t Qwen/Qwen3-0.6B -o corpus.tokens
  python train.py tokenize builtin:stdlib-docs -t builtin:bytes -o docs.tokens

Exit codes: 0 written; 1 an error in this program; 2 a source or the tokenizer cannot be used.
"""


@click.command(
    "tokenize",
    cls=interruptible("interrupted; no token file was written"),
    help=HELP,
    context_settings=CONTEXT,
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--tokenizer", "-t", required=True, metavar="NAME", help="A Hugging Face name, a folder, or builtin:bytes."
)
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The token file.")
@click.option("--split", default="train", help="Split of a Hugging Face data set [train].")
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    default=0,
    help="Processes that tokenize; 0: threads of this one [0].",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def tokenize(
    sources: tuple[str, ...], tokenizer: str, out: Path, split: str, workers: int, as_json: bool, debug: bool
) -> None:
    from tqdm import tqdm

    from trainer.config.data import TOKEN_SUFFIX
    from trainer.data.tokenize.plain_text import read_all_texts, write_token_file
    from trainer.data.tokenize.tokenizer import load_tokenizer
    from trainer.schema import Config, DataConfig

    if out.suffix != TOKEN_SUFFIX:
        raise click.BadParameter(
            f"{out} must end with {TOKEN_SUFFIX}: a run knows a token file by that", param_hint="--out"
        )
    loaded = load_tokenizer(Config(data=DataConfig(train=list(sources), tokenizer=tokenizer)))
    texts = read_all_texts(sources, split=split)
    with tqdm(unit="tok", unit_scale=True, disable=None) as bar:  # on stderr, and only on a terminal

        def tell(documents: int, tokens: int) -> None:
            bar.set_postfix_str(f"{documents:,} documents", refresh=False)
            bar.update(tokens - bar.n)

        meta = {"sources": list(sources), "tokenizer": tokenizer, "eos_token": loaded.eos_token}
        report = write_token_file(out, texts, loaded, workers=workers, meta=meta, tell=tell)
    if as_json:
        write_json(report.to_dict())
    else:
        write_line(sys.stdout, "\n".join(report.render()))
