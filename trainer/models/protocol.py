"""The interface of a model: code outside `trainer.models` uses only this module. A recipe names the family; no other
folder needs one (`tests/house.txt`).

    config, checkpoint  --Family-->  Shape (data)  --build-->  Model (a module, without storage)

Names: a parameter's name is the key of Hugging Face's checkpoint, also in config, reports, adapters, checkpoints and
exports; a separate output head is the module `lm_head`, the embedding `model.embed_tokens`. Modules run in the order
of their registration. Products in the blocks that adapters or float8 may change are `trainer.models.layers.Linear`.

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
    """Everything that defines a model's parameters and its function, as a frozen value."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int:
        """Width of a block's input and output."""

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
        """The model on the current device (`torch.device("meta")`: without storage), products in `compute_dtype`."""

    def few_blocks(self, most: int) -> Shape:
        """The shape of a model to time: the same blocks, at most `most` of them, and a very small vocabulary."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON for a checkpoint; `Family.read_shape` reads it."""

    @property
    def hf_class(self) -> str | None:
        """transformers' class of the same model; None: there is none, so no export is possible."""

    def hf_config(self) -> PretrainedConfig:
        """transformers' config of the same model, if transformers has the model."""

    def hf_fields(self) -> dict[str, Any]:
        """The model's values in the config.json of an export."""


class Family(Protocol):
    """Provides the shapes of a model family."""

    def folder(self, config: Config, dist: Dist, *, weights: bool = True) -> Path | None:
        """The local folder of a model with a name, downloaded if needed; None for a model from the config's fields.

        Every rank must call this. Raises ModelError if the folder's model does not belong to this family.
        """

    def shape(self, config: Config, vocab_size: int, *, folder: Path | None) -> Shape:
        """The shape of `config.model`, with at least `vocab_size` ids. Raises ModelError if it is not supported."""

    def read_shape(self, values: Mapping[str, Any]) -> Shape:
        """The shape from the values of `Shape.to_dict`, also of an older version."""


@dataclass(frozen=True)
class Units:
    """The modules of a model that are sharded or compiled as one. Recomputation takes each block as one."""

    sharded: tuple[nn.Module, ...]
    """Modules that FSDP gathers in one collective each (wrap_policy=transformer)."""
    inseparable: tuple[nn.Module, ...]
    """Modules that never form such a group: parameters in them are used outside their module's forward."""
    compiled: tuple[nn.Module, ...]
    """Modules compiled as one graph each; modules of the same kind share it."""


class Model(nn.Module, ABC):
    """A model over rows of tokens; a class instead of a Protocol, because it is an `nn.Module`.

    Blocks are alike: a property of one holds for all, except its number. Their forwards take tensors and masks by
    position, so that they can be compiled and recomputed. Figures depend on what trains: request them after freezing.
    """

    shape: Shape
    compute_dtype: torch.dtype
    lora: LoraSpec | None = None
    """The adapters; set by `models.lora.attach`."""

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
        """Hidden states [B, T, D], or `head(hidden, head_weight [V, D])`, run here, where FSDP has the weight gathered.

        `packed=False`: every row is one document from position 0, padded only at its end.
        """

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """Blocks in forward order."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The [V, D] matrix from hidden states to logits, tied or separate."""

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
        """Hugging Face's names of its module classes, mapped to ours; the config may use both."""
        return {}

    def choose_kernels(self, device: torch.device) -> None:
        """Choose the fastest kernels for the device. Call it before the first forward."""

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the buffers again, after `to_empty` has left them undefined."""
