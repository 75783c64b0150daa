"""Micro-batches as graphs: what is recorded, which gradients are whose. A recorder stands for CUDA's graphs."""

from collections.abc import Callable

import pytest
import torch

from tests.support.tiny import packed_batch, tiny_decoder, tiny_shape
from trainer.batch import Batch, LossSum
from trainer.config.load import load_config
from trainer.errors import ConfigError
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.losses import sft_loss
from trainer.schema import Config, DataConfig, TrainConfig
from trainer.train.graphs import GraphedMicroBatches, decide_graphs


class Replays:
    """In the place of CudaCapture: what a graph does to memory. A replay writes into the tensors of the recording."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.recorded = 0

    def warm_up(self, function: Callable[[], LossSum]) -> None:
        function()

    def record(self, function: Callable[[], LossSum]) -> tuple[Callable[[], None], LossSum]:
        self.recorded += 1
        adds = self.parameters[0].grad is not None
        before = [p.grad.clone() if adds else None for p in self.parameters]
        static = function()
        grads = [p.grad for p in self.parameters]
        for grad, old in zip(grads, before, strict=True):
            grad.copy_(old if adds else torch.zeros_like(grad))  # a recording runs no kernel

        def replay() -> None:
            for p, grad in zip(self.parameters, grads, strict=True):
                p.grad = grad if adds else None
            loss = function()
            static.total.copy_(loss.total)
            static.count.copy_(loss.count)
            if not adds:
                for p, grad in zip(self.parameters, grads, strict=True):
                    grad.copy_(p.grad)

        return replay, static


def eager(module: torch.nn.Module, batches: list[Batch]) -> tuple[list[float], list[torch.Tensor]]:
    module.zero_grad()
    losses = [sft_loss(module, batch) for batch in batches]
    for loss in losses:
        loss.total.backward()
    return [loss.total.item() for loss in losses], [p.grad.clone() for p in module.parameters()]


def test_each_steps_gradients_are_those_of_its_own_micro_batches():
    module = tiny_decoder()
    steps = [
        [packed_batch([[4, 5], [9]], length=12, seed=3 * step + i) for i in range(count)]
        for step, count in enumerate((1, 3, 2))
    ]
    capture = Replays(module)
    graphed = GraphedMicroBatches(module, sft_loss, capture)
    for batches in steps:
        expected_losses, expected = eager(module, batches)
        module.zero_grad(set_to_none=True)
        losses = [graphed(batch, first=index == 0).total.item() for index, batch in enumerate(batches)]
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    assert capture.recorded == 2


SMALL = tiny_shape()
LARGE = DecoderShape("qwen2", 151936, 896, 4864, 24, 14, 2, 64)


def decide(shape: DecoderShape, config: Config, *, backend: str = "pytorch", compiled: bool = True) -> bool:
    return decide_graphs(config, shape, backend=backend, compiled=compiled)


def test_graphs_are_for_micro_batches_that_take_longer_to_launch_than_to_run():
    rows = {n: Config(data=DataConfig(seq_len=2048), train=TrainConfig(micro_batch_size=n)) for n in (1, 8)}
    assert decide(SMALL, rows[8])
    assert decide(LARGE, rows[1])
    assert not decide(LARGE, rows[8])
    assert not decide(SMALL, rows[8], compiled=False)
    assert not decide(SMALL, rows[8], backend="fsdp")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["target.device=cpu"], "target.device is cpu"),
        (["target.gpu_ranks=0,1"], "the backend is fsdp, whose collectives are in no graph here"),
        (["parallel.compile=false"], "parallel.compile is false"),
        (["data.packing=false"], "data.packing is false: rows are of different lengths"),
        (["lora.rank=2", "lora.dropout=0.1"], "lora.dropout is not 0"),
    ],
)
def test_graphs_asked_for_where_there_can_be_none_are_refused_with_the_reason(tmp_path, overrides, reason):
    path = tmp_path / "graphs.yaml"
    path.write_text("parallel: {cuda_graphs: true}\n")
    with pytest.raises(ConfigError, match=f"parallel.cuda_graphs is true, and {reason}"):
        load_config(path, overrides)
    assert load_config(path, []).parallel.cuda_graphs is True
