"""Runs forward and backward of a micro-batch as one CUDA graph.

For small models, if the host takes longer to launch a step's kernels than the GPU to run them: a replay is one launch.
Shapes and the addresses of gradients and losses are fixed, so rows must be packed, and the model in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.batch import Batch, LossSum
from trainer.config.batch import BatchRules
from trainer.config.parallel import why_no_graphs
from trainer.models.protocol import Shape
from trainer.schema import Config

LAUNCH_S_PER_LAYER = 2e-3
"""Host time of a compiled block, forward and backward (H200 machine, torch 2.11: 24 blocks in about 50 ms)."""
LIKELY_FLOPS = 5e14
"""Operations per second that a step of a small model reaches on the fastest GPUs."""

ForwardBackward = Callable[[], LossSum]


class Capture(Protocol):
    """A device's functions to run a pass once, and to record it for replays."""

    def warm_up(self, function: ForwardBackward) -> None: ...

    def record(self, function: ForwardBackward) -> tuple[Callable[[], None], LossSum]:
        """Call the function without running its kernels. Returns a function that runs them, and the result."""


class CudaCapture:
    """CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: ForwardBackward) -> None:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            function()
        current.wait_stream(side)

    def record(self, function: ForwardBackward) -> tuple[Callable[[], None], LossSum]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that prepares batches may pin memory meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@dataclass(frozen=True)
class Recorded:
    """A recorded graph, and the loss that it writes."""

    replay: Callable[[], None]
    loss: LossSum


class GraphedMicroBatches:
    """Replaces a loss function and its backward pass, for micro-batches of one shape.

    A step's first micro-batch writes the gradients, each further one adds to them.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[[nn.Module, Batch], LossSum], capture: Capture) -> None:
        self._module, self._loss_fn, self._capture = module, loss_fn, capture
        self._batch: Batch | None = None
        self._writing: Recorded | None = None
        self._adding: Recorded | None = None
        self._grads: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, batch: Batch, *, first: bool) -> LossSum:
        """The loss, without gradient; the gradients are in `.grad`, valid until the next step's first micro-batch."""
        batch = replace(batch, targets=None)  # the number of targets differs between batches
        if self._batch is None:
            self._record_writing(batch)
        assert self._batch is not None
        _copy(batch, self._batch)
        if not first and self._adding is None:
            self._give_grads()
            self._adding = Recorded(*self._capture.record(self._forward_backward))
        recorded = self._writing if first else self._adding
        assert recorded is not None
        recorded.replay()
        self._give_grads()
        return recorded.loss

    def _record_writing(self, batch: Batch) -> None:
        self._batch = batch.map(Tensor.clone)
        for _ in range(2):  # compiles; the second adds to the gradients of the first
            self._capture.warm_up(self._forward_backward)
        self._module.zero_grad(set_to_none=True)
        self._writing = Recorded(*self._capture.record(self._forward_backward))
        self._grads = [(p, p.grad) for p in self._module.parameters() if p.grad is not None]

    def _forward_backward(self) -> LossSum:
        assert self._batch is not None
        loss = self._loss_fn(self._module, self._batch)
        loss.total.backward()
        terms = {name: term.detach() for name, term in loss.terms.items()}
        return LossSum(loss.total.detach(), loss.count, terms)

    def _give_grads(self) -> None:
        for parameter, grad in self._grads:
            parameter.grad = grad


def _copy(source: Batch, target: Batch) -> None:
    for name in ("input_ids", "labels", "positions", "doc_ids"):
        getattr(target, name).copy_(getattr(source, name))


def decide_graphs(config: Config, shape: Shape, *, backend: str, compiled: bool) -> bool:
    """Whether to use graphs: as `parallel.cuda_graphs` sets it; if it is null, by the size of the micro-batches.

    `compiled`: whether blocks are compiled, on a GPU; if not, the run continues without graphs.
    """
    if not compiled or why_no_graphs(config, backend):
        return False
    if config.parallel.cuda_graphs is not None:
        return config.parallel.cuda_graphs
    tokens = BatchRules.of(config).tokens
    return 6 * shape.num_params * tokens / LIKELY_FLOPS < LAUNCH_S_PER_LAYER * shape.num_layers
