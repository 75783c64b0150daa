"""What everything beside `trainer.models` may know of a model: this page. A recipe names the family; no other folder
needs one (`tests/house.txt`).

    config, checkpoint  --Family-->  Shape (data)  --build-->  Model (a module, without storage)

Names: a parameter's name is the key of Hugging Face's checkpoint, and so is what config, reports, adapters,
checkpoints and exports say; a separate output head is the module `lm_head`, the embedding
`model.embed_tokens`. What is registered first runs first. Products in the blocks that adapters or float8 may
take hold of are `trainer.models.layers.Linear`.

Shapes: B rows, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from trainer.dist import Dist
from trainer.models.figures import BlockMemory, Flops, Micro, OuterMemory
from trainer.schema import Config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.models.lora import LoraSpec


class Shape(Protocol):
    """Everything that decides a model's parameters and its function, as a frozen value."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int:
        """Width of what a block takes and gives."""

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest row that the model takes, in tokens."""

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied matrix counted once."""

    def build(self, compute_dtype: torch.dtype = torch.float32) -> Model:
        """The model on the present device (`torch.device("meta")`: without storage), its products in that dtype."""

    def few_blocks(self, most: int) -> Shape:
        """The same blocks, so many at most, with hardly a vocabulary: to be timed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON for a checkpoint, from which the family reads it back."""

    @property
    def hf_class(self) -> str | None:
        """transformers' class of the same model; None: it has none, and there is no export."""

    def hf_config(self) -> PretrainedConfig:
        """transformers' config of the same model, where it has one."""

    def hf_fields(self) -> dict[str, Any]:
        """What the config.json of an export says of the model."""


class Family(Protocol):
    """The source of the shapes of a model family."""

    def folder(self, config: Config, dist: Dist, *, weights: bool = True) -> Path | None:
        """The local folder of a model with a name, fetched where needed; None for one of the config's fields.

        Every rank calls this. Raises ModelError for a folder that is of no model of this family.
        """

    def shape(self, config: Config, vocab_size: int, *, folder: Path | None) -> Shape:
        """What `config.model` describes, with at least so many ids. Raises ModelError for what is not computed here."""

    def read_shape(self, values: Mapping[str, Any]) -> Shape:
        """From `Shape.to_dict`, also that of an older version."""


@dataclass(frozen=True)
class Units:
    """The modules of a model that are taken as one; blocks are computed again as one each."""

    sharded: tuple[nn.Module, ...]
    """FSDP gathers each in one collective (wrap_policy=transformer)."""
    inseparable: tuple[nn.Module, ...]
    """None of these is ever such a group: parameters in them are used outside their module's forward."""
    compiled: tuple[nn.Module, ...]
    """Compiled as one graph each, those of a kind sharing it."""


class Model(nn.Module, ABC):
    """A model over rows of tokens; a class and no Protocol, for it is an `nn.Module` first of all.

    Blocks are alike: their number apart, what is said of one holds for all. Their forwards take tensors, and masks, by
    position, so that they can be compiled and computed again. Figures follow what trains: ask them after freezing.
    """

    shape: Shape
    compute_dtype: torch.dtype
    lora: LoraSpec | None = None
    """Set by `models.lora.attach`."""

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        doc_ids: Tensor,
        *,
        packed: bool = True,
        head: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """Hidden states [B, T, D], or `head(hidden, head_weight [V, D])`, run here, where FSDP holds it gathered.

        `packed=False`: every row is one document from position 0, padded at its end at most.
        """

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """Blocks in forward order."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The [V, D] matrix from hidden states to logits, tied or its own."""

    @abstractmethod
    def units(self) -> Units: ...

    @abstractmethod
    def flops(self) -> Flops:
        """Floating-point operations to train on one token."""

    @abstractmethod
    def block_memory(self, block: nn.Module, micro: Micro) -> BlockMemory: ...

    @abstractmethod
    def outer_memory(self, micro: Micro) -> OuterMemory: ...

    def hf_classes(self) -> dict[str, str]:
        """Hugging Face's names of the classes of its modules, and ours: both may be written in the config."""
        return {}

    def choose_kernels(self, device: torch.device) -> None:
        """Before the first forward: take what is fastest there."""

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the buffers again, after `to_empty` has left them undefined."""
