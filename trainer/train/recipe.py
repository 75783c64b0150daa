"""The interface of a recipe: all that differs between kinds of training. Steps, saves, stops, plans and exports are the
same for all.

A recipe is a module of `trainer.recipes` with a function `recipe()`, which returns a `Recipe`, and a function
`run(config, run_dir, dist)`, which lists the parts of a run. In the order of a run:

    family    the kind of model               -> Basis: tokenizer, shape, weights
    data      the micro-batches of each step
    loss      of one micro-batch: a sum and its count; the loop divides once per step, over all ranks
    evaluate  the loss on held-out data, and further metrics
    state     what it keeps between steps in addition to weights, optimizer and position in the data
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
    """What is known before data is read and a model is built."""

    tokenizer: PreTrainedTokenizerFast
    shape: Shape
    folder: Path | None
    """The folder with the weights, if the model has a name."""


class Recipe(Protocol):
    """Each run has a new instance, so its state belongs to this run only. Every rank makes the same calls."""

    @property
    def family(self) -> Family: ...

    def hashes(self, basis: Basis) -> Mapping[str, str]:
        """Hashes by name (e.g. `tokenizer`) that a checkpoint must share with the run, besides shape and data."""

    def data(self, config: Config, ranks: Ranks, basis: Basis, *, run_dir: Path | None) -> Data:
        """The data for training and evaluation. Its loader keeps its position, also for rows created during the run.

        `run_dir`: where tokens may be stored; None: nowhere. An inspection calls this in one process for many ranks.
        """

    def loss(self, config: Config) -> LossFn:
        """The loss function of a wrapped model and a micro-batch. It may gather from the other ranks, because every
        rank has the same number of micro-batches in a step."""

    def largest_batch(self, config: Config) -> Batch:
        """The micro-batch that needs the most memory, for the probe and for calibration. It is made without data."""

    def evaluate(self, run: Run, is_stop_requested: Callable[[], bool]) -> Evaluated | None:
        """The same result on every rank; None without held-out data, or if any rank was asked to stop meanwhile."""

    @property
    def state(self) -> ExtraState | None:
        """State that is saved in every checkpoint and restored at a resume; None: there is none. Tensors belong in the
        model, which saves them in shards."""


def make_recipe(config: Config) -> Recipe:
    """Makes the recipe that `config.recipe` names."""
    recipe: Recipe = import_module(f"trainer.recipes.{config.recipe}").recipe()
    return recipe


def read_basis(recipe: Recipe, config: Config, dist: Dist, *, weights: bool = True) -> Basis:
    """The tokenizer, the shape and the folder of weights, which are downloaded if needed and if `weights` is set. Every
    rank must call this.

    Raises ConfigError or ModelError if the model does not fit this config.
    """
    settle_offline(config)
    folder = recipe.family.folder(config, dist, weights=weights)
    tokenizer = load_tokenizer(config)
    quiet_transformers()
    shape = recipe.family.shape(config, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    check_export(config, shape)
    return Basis(tokenizer, shape, folder)
