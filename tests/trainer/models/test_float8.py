"""Products in float8, emulated on the CPU: torchao's own values, what stays in bf16, and when they are taken."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from deployer.plan.prepare import python_spec
from tests.support.gradients import backward, full, micro_batches
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, packed_batch, tiny_shape
from trainer.config.load import config_from_dict
from trainer.config.rules import config_notes
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder import Decoder
from trainer.models.float8 import odd_size, use_float8
from trainer.models.hf import init_random, named_weights
from trainer.models.layers import Linear
from trainer.models.losses import sft_loss
from trainer.parallel.choose import make_backend
from trainer.parallel.float8_choice import decide_float8, float8_gain, seconds_of
from trainer.schema import Config, DataConfig, LoraConfig, ParallelConfig, TargetConfig, TrainConfig

BF16 = TrainConfig(precision="bf16")
ON_CPU = TargetConfig(train_backend="pytorch", device="cpu")
SHAPE = tiny_shape(hidden_size=64, intermediate_size=96, head_dim=16, family="qwen2")
BATCH = packed_batch([[20, 12], [30]], length=32)
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GRADIENT_ERROR = 0.2
"""Of a gradient's norm: e4m3 has three bits after the leading one, e5m2 two."""


def model_of(config: Config | None = None, *, float8: bool = True) -> Decoder:
    config = config or Config(train=BF16)
    decoder = build_model(config, SHAPE).to_empty(device="cpu")
    decoder.reset_buffers(torch.device("cpu"))
    fill_weights(config, decoder, None)
    if float8:
        use_float8(decoder, emulate=True)
    return decoder


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_product_and_its_gradients_are_those_of_torchaos_module():
    torch.manual_seed(0)
    ours, x = model_of().blocks[0].self_attn.q_proj.bfloat16(), torch.randn(2, 16, 64, dtype=torch.bfloat16)
    theirs = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    theirs[0].load_state_dict(ours.state_dict())
    convert_to_float8_training(theirs, config=Float8LinearConfig(emulate=True))
    found = []
    for module in (ours, theirs[0]):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        found.append([out, leaf.grad, module.weight.grad, module.bias.grad])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][0], F.linear(x, ours.weight, ours.bias))


def test_loss_and_gradients_are_within_the_error_of_float8():
    reference, lowered = model_of(float8=False), model_of()
    losses = []
    for model in (reference, lowered):
        loss = sft_loss(model, BATCH).total
        loss.backward()
        losses.append(loss.item())
    assert 0 < abs(losses[1] / losses[0] - 1) < 2e-3
    expected = dict(named_weights(reference))
    assert max(error(p.grad, expected[name].grad) for name, p in named_weights(lowered)) < GRADIENT_ERROR


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)], ids=["whole", "lora"])
def test_float8_is_in_the_seven_projections_alone_and_changes_no_name(lora):
    decoder = build_model(Config(lora=lora, train=BF16), tiny_shape(tie_embeddings=False))
    names = [name for name, _ in decoder.named_parameters()]
    use_float8(decoder, emulate=True)
    linears = {name: child for name, child in decoder.named_modules() if isinstance(child, Linear)}
    lowered = [name for name, child in linears.items() if child.product is not F.linear]
    assert sorted(name.split(".")[-1] for name in lowered) == sorted(SEVEN * 2)
    assert "lm_head" in linears and names == [name for name, _ in decoder.named_parameters()]


def test_adapters_learn_beside_frozen_products_in_float8():
    config = Config(lora=LoraConfig(rank=4), train=BF16)
    grads = []
    for float8 in (False, True):
        model = model_of(config, float8=float8)
        sft_loss(model, BATCH).total.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    trained = [name for name in grads[0] if "lora_B" in name]  # the other half has a gradient of zero at first
    assert len(trained) == 14
    assert max(error(grads[1][name], grads[0][name]) for name in trained) < GRADIENT_ERROR


def test_block_in_float8_is_one_graph():
    decoder = model_of()
    eager = decoder(BATCH.input_ids, BATCH.positions, BATCH.doc_ids)
    for block in decoder.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    compiled = decoder(BATCH.input_ids, BATCH.positions, BATCH.doc_ids)
    assert error(compiled, eager) < 0.05  # queries, keys and values share a scale there


def spread_grads(dist: Dist, backend: str) -> dict[str, torch.Tensor]:
    config = Config(target=TargetConfig(train_backend=backend), train=BF16)
    spread, decoder = make_backend(config, dist), build_model(config, SHAPE)
    use_float8(decoder, emulate=True)
    module = spread.prepare(decoder)
    init_random(module, 0)
    backward(spread, module, micro_batches(dist, 1))
    return {name: full(p.grad) for name, p in named_weights(module)}


def on_two_ranks(dist: Dist) -> list[dict[str, torch.Tensor]]:
    return [spread_grads(dist, backend) for backend in ("ddp", "fsdp")]


def test_float8_gradients_on_ddp_and_fsdp_are_those_of_one_process():
    expected = spread_grads(ALONE, "pytorch")
    for grads in run_ranks(on_two_ranks, 2)[0]:
        assert grads.keys() == expected.keys()
        assert max(error(grads[name].float(), grad) for name, grad in expected.items()) < GRADIENT_ERROR


# --- whether they are taken -------------------------------------------------------------------------------------------


def measured(gain: float):
    return decide_float8("auto", why_not=None, gain=lambda: gain)


def test_float8_is_taken_where_it_is_measured_to_pay():
    assert measured(1.18) == (True, "float8: 1.18 x of bf16 over a few blocks: on")
    assert measured(0.93) == (False, "float8: 0.93 x of bf16 over a few blocks: off")
    assert decide_float8("on", why_not=None, gain=pytest.fail) == (True, "float8: on")


def gain_with(dist: Dist, failure: Exception | None) -> float:
    def arrange(blocks: Decoder) -> None:
        if any(child.product is not F.linear for child in blocks.modules() if isinstance(child, Linear)):
            use_float8(blocks, emulate=True)  # no CPU multiplies in float8
            if failure:
                raise failure

    config = Config(train=replace(BF16, micro_batch_size=1), data=DataConfig(seq_len=16))
    return float8_gain(build_model(config, SHAPE), config, dist, arrange=arrange, gathered=True)


def where_one_ranks_compiler_fails(dist: Dist) -> float:
    return gain_with(dist, TorchDynamoException("no compiler") if dist.rank else None)


def test_gain_is_that_of_the_rank_that_gains_least_and_none_where_the_compiler_fails():
    assert gain_with(ALONE, None) > 0
    assert run_ranks(where_one_ranks_compiler_fails, 2) == [0.0, 0.0]


def test_failure_that_is_not_the_compilers_is_not_taken_for_a_slow_float8():
    with pytest.raises(ValueError, match="a fault of the model"):
        gain_with(ALONE, ValueError("a fault of the model"))


def test_float8_that_cannot_be_is_an_error_when_asked_for_and_a_line_otherwise():
    assert decide_float8("auto", why_not="not on a GPU", gain=pytest.fail) == (False, "float8: off (not on a GPU)")
    with pytest.raises(ConfigError, match=r"train\.float8 is on, and there is none: not on a GPU"):
        decide_float8("on", why_not="not on a GPU", gain=pytest.fail)


def test_backend_says_why_it_stays_with_bf16():
    config = Config(train=replace(BF16, float8="auto"), target=ON_CPU)
    backend = make_backend(config, ALONE)
    module = backend.prepare(build_model(config, SHAPE))
    assert "float8: off (target.device is cpu)" in backend.describe()
    assert module.blocks[0].mlp.up_proj.product is F.linear


def test_a_model_that_is_no_longer_compiled_goes_back_to_bf16():
    config = Config(train=replace(BF16, float8="auto"), target=ON_CPU)
    backend = make_backend(config, ALONE)
    module = backend.prepare(build_model(config, SHAPE))
    use_float8(module, emulate=True)
    backend.rearrange(config)
    assert "float8: off (blocks are not compiled)" in backend.describe()
    assert module.blocks[0].mlp.up_proj.product is F.linear


def test_backend_refuses_float8_on_a_device_without():
    config = Config(train=replace(BF16, float8="on"), parallel=ParallelConfig(compile=True))
    with pytest.raises(ConfigError, match=r"train\.float8 is on, and there is none: not on a GPU"):
        make_backend(config, ALONE).prepare(build_model(config, SHAPE))


def test_size_that_float8_cannot_multiply_is_named():
    assert odd_size(Decoder(SHAPE)) is None
    odd = odd_size(Decoder(tiny_shape(intermediate_size=40)))
    assert odd == "model.layers.0.mlp.gate_proj is 40 x 32, and float8 needs multiples of 16"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"precision": "fp32"}}, "train.float8 is on, but train.precision is fp32"),
        ({"target": {"device": "cpu"}}, "train.float8 is on, but target.device is cpu"),
        ({"parallel": {"compile": False}}, "train.float8 is on, but parallel.compile is false"),
        ({"data": {"packing": False}}, "train.float8 is on, but data.packing is false"),
        ({"data": {"seq_len": 250}, "train": {"micro_batch_size": 3}}, "is 750, not a multiple of 16"),
    ],
)
def test_setting_that_float8_cannot_have_is_refused(sections, message):
    train = {"float8": "on", **sections.get("train", {})}
    with pytest.raises(ConfigError, match=message):
        config_from_dict({**sections, "train": train})
    assert config_from_dict({**sections, "train": {**train, "float8": "auto"}}).train.float8 == "auto"


def test_auto_that_the_config_rules_out_is_told():
    train = TrainConfig(float8="auto")
    on_cpu = Config(train=train, target=TargetConfig(device="cpu"))
    told = config_notes(on_cpu, backend="pytorch", deployed=False)
    assert "train.float8: no effect, target.device is cpu" in told
    assert config_notes(Config(train=train), backend="pytorch", deployed=False) == []


def test_float8_needs_torchao_in_the_jobs_environment(tmp_path):
    assert (
        "torchao>=0.14"
        in python_spec(Config(train=TrainConfig(float8="auto")), None, project=tmp_path, files={}).requires
    )


def test_few_blocks_like_the_models_are_timed_without_drawing_from_the_generator_of_training():
    seen: list[Decoder] = []
    decoder = build_model(Config(lora=LoraConfig(rank=4), train=BF16), SHAPE)
    state = torch.get_rng_state()
    timed = partial(seconds_of, decoder, rows=2, seq_len=16, device=torch.device("cpu"), stored=torch.bfloat16)
    assert timed(seen.append) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert (len(seen[0].blocks), seen[0].shape.hidden_size) == (2, 64)
    assert {(p.dtype, p.requires_grad) for p in seen[0].blocks.parameters()} == {(torch.bfloat16, False)}
