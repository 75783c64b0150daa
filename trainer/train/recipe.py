"""What sets one training apart from another: this page. Steps, saves, stops, plans and exports are the same for all.

A recipe is a module of `trainer.recipes` with a function `recipe()`, which gives a value as below, and a function
`run(config, run_dir, dist)`, which reads as a table of contents. In the order of a run:

    family    which kind of model             -> Basis: tokenizer, shape, weights
    data      what a step's micro-batches are
    loss      of one micro-batch: a sum and its count; the loop divides, once a step, over all ranks
    evaluate  what held-out data say: a loss, and whatever else is told beside it
    state     what it remembers from step to step beside weights, optimizer and place in the data
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.batch import Batch
from trainer.checkpoint.states import ExtraState
from trainer.data.batches.micro_batches import Ranks
from trainer.data.loader import Data
from trainer.data.tokenize.tokenizer import load_tokenizer, quiet_transformers, settle_offline, vocab_size
from trainer.dist import Dist
from trainer.models.build import check_export, check_length
from trainer.models.protocol import Family, Shape
from trainer.schema import Config
from trainer.train.run import Evaluated, LossFn, Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Basis:
    """What is known before data are read and a model is made."""

    tokenizer: PreTrainedTokenizerFast
    shape: Shape
    folder: Path | None
    """With the weights of a model that has a name."""


class Recipe(Protocol):
    """Made anew for each run, so what it remembers is that run's own. Every rank calls each of these alike."""

    @property
    def family(self) -> Family: ...

    def hashes(self, basis: Basis) -> Mapping[str, str]:
        """What a checkpoint must have been made with, by what it is (`tokenizer`), beside shape and data."""

    def data(self, config: Config, ranks: Ranks, basis: Basis, *, run_dir: Path | None) -> Data:
        """What is trained and judged on. Its loader keeps its own place, also of rows that are made on the way.

        `run_dir`: where tokens may be kept; None: nowhere. An inspection calls this in one process, for many ranks.
        """

    def loss(self, config: Config) -> LossFn:
        """Of a model, as its backend wraps it, and a micro-batch. Every rank has equally many in a step, so it may
        gather from the other ranks."""

    def largest_batch(self, config: Config) -> Batch:
        """The micro-batch that takes most memory, for the probe and for calibration: no data are read for it."""

    def evaluate(self, run: Run, is_stop_requested: Callable[[], bool]) -> Evaluated | None:
        """The same on every rank; None where nothing is held out, or any rank was asked to stop meanwhile."""

    @property
    def state(self) -> ExtraState | None:
        """Goes into every checkpoint and comes back at a resume; None: there is none. Tensors belong to the model,
        which saves them in shards."""


def make_recipe(config: Config) -> Recipe:
    """Makes the recipe that `config.recipe` names."""
    recipe: Recipe = import_module(f"trainer.recipes.{config.recipe}").recipe()
    return recipe


def read_basis(recipe: Recipe, config: Config, dist: Dist, *, weights: bool = True) -> Basis:
    """Tokenizer and shape, the weights fetched where needed and not declined; every rank calls this.

    Raises ConfigError and ModelError where the model is not for this config.
    """
    settle_offline(config)
    folder = recipe.family.folder(config, dist, weights=weights)
    tokenizer = load_tokenizer(config)
    quiet_transformers()
    shape = recipe.family.shape(config, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    check_export(config, shape)
    return Basis(tokenizer, shape, folder)
