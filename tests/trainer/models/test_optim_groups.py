"""Groups with rates of their own, frozen parameters, rates that grow with the batch, 8-bit state."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.gradients import assert_same_grads, backward, full, micro_batches
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_decoder, tiny_shape
from trainer.config.load import config_from_dict, load_config
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.models.build import build_model
from trainer.models.hf import init_random, named_weights
from trainer.optim.build import build_optimizer, parameter_groups, render_groups
from trainer.optim.schedules import lr_multiplier, peak_learning_rate, render_lr_scaling
from trainer.parallel.choose import make_backend
from trainer.parallel.wrapping import plan_wrapping
from trainer.recipes import sft
from trainer.schema import Config, GroupConfig, ModelConfig, OptimConfig, TargetConfig, TrainConfig
from trainer.train.step import apply_update, divides_by_itself

SHAPE = tiny_shape()
FINITE, NOT_FINITE = torch.tensor(True), torch.tensor(False)


def filled(model: nn.Module) -> nn.Module:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.01 * (number + 1))
    return model


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_take_the_steps_of_torchs_own_groups():
    groups = [GroupConfig("*.mlp.*", lr_scale=10, weight_decay=0.0), GroupConfig("*embed*", lr_scale=0.5)]
    config = OptimConfig(learning_rate=1e-3, groups=groups, weight_decay=0.3)
    ours, theirs = (filled(tiny_decoder()) for _ in range(2))
    named = dict(theirs.named_parameters())
    mlp = [p for name, p in named.items() if ".mlp." in name]
    embedding = [p for name, p in named.items() if "embed" in name]
    norms = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if name.endswith("_proj.weight") and "self_attn" in name]
    expected = torch.optim.AdamW(
        [
            {"params": mlp, "lr": 0.5, "weight_decay": 0.0},
            {"params": embedding, "lr": 0.025, "weight_decay": 0.3},
            {"params": norms, "lr": 0.05, "weight_decay": 0.0},
            {"params": rest, "lr": 0.05, "weight_decay": 0.3},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    expected.step()
    apply_update(build_optimizer(ours, config), 0.05, FINITE)
    assert all(torch.equal(p, named[name]) for name, p in ours.named_parameters())


def test_first_group_that_matches_has_the_parameter():
    model = tiny_decoder()
    config = OptimConfig(
        learning_rate=1e-3, groups=[GroupConfig("*.0.mlp.*", lr_scale=2), GroupConfig("*.mlp.*", lr_scale=3)]
    )
    scales = {id(p): g["lr_scale"] for g in parameter_groups(model.named_parameters(), config) for p in g["params"]}
    assert scales[id(model.model.layers[0].mlp.up_proj.weight)] == 2
    assert scales[id(model.model.layers[1].mlp.up_proj.weight)] == 3
    assert scales[id(model.model.norm.weight)] == 1


def test_pattern_that_gets_nothing_is_refused():
    for groups, message in [
        ([GroupConfig("*.mpl.*")], r"optim.groups\[0\].pattern has '\*.mpl.\*', which matches nothing in this model"),
        (
            [GroupConfig("*"), GroupConfig("*.mlp.*")],
            r"optim.groups\[1\] has .* groups before it have all 6 it matches",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_optimizer(tiny_decoder(), OptimConfig(learning_rate=1e-3, groups=groups))


def test_groups_are_shown_in_the_plan():
    optimizer = build_optimizer(
        tiny_decoder(), OptimConfig(learning_rate=1e-3, groups=[GroupConfig("*embed*", lr_scale=0.1)])
    )
    assert render_groups(optimizer.param_groups)[0] == (
        "optimizer group *embed*: 1 tensor, 3,232 parameters, learning rate x 0.1, weight decay 0.01"
    )
    assert render_groups(build_optimizer(tiny_decoder(), OptimConfig(learning_rate=1e-3)).param_groups) == []


def test_groups_are_read_from_the_command_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optim:\n  groups:\n    - {pattern: '*.mlp.*', lr_scale: 2}\n")
    assert load_config(path).optim.groups == [GroupConfig("*.mlp.*", 2.0)]
    override = "optim.groups=[{pattern: 'lm_head.*', weight_decay: 0}]"
    assert load_config(path, [override]).optim.groups == [GroupConfig("lm_head.*", weight_decay=0.0)]


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"groups": [{"pattern": "*", "lr_scale": 0}]}, r"optim.groups\[0\].lr_scale is 0, must be more than 0"),
        ({"groups": [{"pattern": "*", "weight_decay": -1}]}, r"groups\[0\].weight_decay is -1, must be 0 or more"),
        ({"groups": [{"lr_scale": 1}]}, r"optim.groups\[0\].pattern is missing"),
        ({"lr_scaling": "sqrt"}, r"optim.lr_scaling is sqrt, but optim.base_batch_size is null"),
    ],
)
def test_wrong_setting_is_refused(optim, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict({"optim": optim})


# --- the batch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "peak"), [("none", 0.001), ("linear", 0.004), ("sqrt", 0.002)])
def test_learning_rate_grows_with_the_batch_by_the_rule_asked_for(rule, peak):
    config = OptimConfig(learning_rate=0.001, lr_scaling=rule, base_batch_size=16)
    assert peak_learning_rate(config, 64) == pytest.approx(peak)
    assert peak_learning_rate(config, 16) == 0.001


def test_scaling_is_shown_with_its_numbers():
    config = OptimConfig(learning_rate=0.001, lr_scaling="sqrt", base_batch_size=16)
    assert render_lr_scaling(config, 64) == [
        "learning rate 0.001 x sqrt(64 / 16) = 0.002: sqrt scaling, 64 rows a step, tuned for 16"
    ]
    assert render_lr_scaling(OptimConfig(), 64) == []


def test_minimum_scales_with_the_rate():
    config = OptimConfig(
        learning_rate=0.001, min_learning_rate=0.0001, lr_scaling="linear", base_batch_size=16, schedule="linear"
    )
    assert peak_learning_rate(config, 32) * lr_multiplier(config, 100)(100) == pytest.approx(0.0002)


# --- freezing ---------------------------------------------------------------------------------------------------------


def freezing(*patterns: str, backend: str = "pytorch") -> Config:
    return Config(
        target=TargetConfig(train_backend=backend),
        model=ModelConfig(freeze=list(patterns)),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(precision="fp32"),
    )


def grads_of_frozen(dist: Dist, backend: str) -> tuple[dict[str, Tensor], int]:
    """Gradients after two micro-batches, with the embedding (and tied head) and the first layer frozen."""
    cfg = freezing("model.embed_tokens.*", "model.layers.[0-0].*", backend=backend)
    spread = make_backend(cfg, dist)
    module = spread.prepare(build_model(cfg, SHAPE))
    init_random(module, 0)
    backward(spread, module, micro_batches(dist, 2))
    grads = {name: full(p.grad) for name, p in named_weights(module) if p.grad is not None}
    optimizer = build_optimizer(module, cfg.optim)
    apply_update(optimizer, 1e-3, FINITE)
    return grads, len(optimizer.state)


def ignored_and_frozen(dist: Dist) -> None:
    """A frozen module that is not sharded either: a step goes through."""
    cfg = freezing("model.norm.*", backend="fsdp")
    cfg = replace(cfg, parallel=replace(cfg.parallel, ignored_modules=["model.norm"]))
    spread = make_backend(cfg, dist)
    module = spread.prepare(build_model(cfg, SHAPE))
    init_random(module, 0)
    backward(spread, module, micro_batches(dist, 1))
    assert module.model.norm.weight.grad is None


def on_backends(dist: Dist) -> list[tuple[dict[str, Tensor], int]]:
    ignored_and_frozen(dist)
    return [grads_of_frozen(dist, backend) for backend in ("ddp", "fsdp")]


def test_frozen_parameters_get_no_gradient_and_the_others_the_same_on_every_backend():
    expected, states = grads_of_frozen(ALONE, "pytorch")
    assert states == len(expected) == 12  # layer 1 and the last norm
    assert not any("embed" in name or ".layers.0." in name for name in expected)
    for results in run_ranks(on_backends, 2):
        for grads, count in results:
            assert count == states
            assert_same_grads(grads, expected, 1e-6)


def test_pattern_that_freezes_nothing_is_refused_with_the_near_names():
    with pytest.raises(ConfigError, match=r"model.freeze has 'model.embed_token.weight'(.|\n)*embed_tokens.weight"):
        build_model(freezing("model.embed_token.weight"), SHAPE)


def test_head_that_is_the_embedding_is_named_as_such():
    with pytest.raises(ConfigError, match=r"did you mean model.embed_tokens.weight \(a tied head is the embedding\)"):
        build_model(freezing("lm_head.*"), SHAPE)


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match=r"model.freeze is \['\*'\], all 24 tensors of the model"):
        build_model(freezing("*"), SHAPE)


def test_trained_parameters_in_bf16_are_refused():
    with pytest.raises(ValueError, match=r"trained parameters must be stored in fp32, not as model.embed_tokens"):
        build_optimizer(tiny_decoder().to(torch.bfloat16), OptimConfig(learning_rate=1e-3))


# --- 8 bits -----------------------------------------------------------------------------------------------------------

EIGHT_BIT = OptimConfig(learning_rate=1e-3, optimizer="adamw8bit", weight_decay=0.1)


def quantised_model() -> nn.Module:
    """A matrix whose state is quantised, and a vector whose state is too small for it."""
    torch.manual_seed(0)
    return nn.Linear(128, 64)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, flags: list[Tensor], *, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for finite in flags:
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad if finite else grad.fill_(float("nan"))
        apply_update(optimizer, 1e-2, finite)


def stored(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that the optimizer keeps, as plain tensors."""
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return [part.clone() for t in tensors for part in ([t.codes, t.scale] if hasattr(t, "codes") else [t])]


def test_8_bit_steps_are_those_of_torchao():
    from torchao.optim import AdamW8bit

    ours, theirs = quantised_model(), quantised_model()
    expected = AdamW8bit(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        block_size=128,
    )
    with torch.compiler.set_stance("force_eager"):
        steps(theirs, expected, [FINITE] * 3)
    steps(ours, build_optimizer(ours, EIGHT_BIT), [FINITE] * 3)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_8_bit_state_takes_two_bytes_a_parameter():
    model = quantised_model()
    optimizer = build_optimizer(model, EIGHT_BIT)
    steps(model, optimizer, [FINITE])
    state = optimizer.state[model.weight]
    assert [state[key].codes.dtype for key in ("exp_avg", "exp_avg_sq")] == [torch.uint8] * 2
    assert {t.dtype for t in optimizer.state[model.bias].values()} == {torch.float32}


@pytest.mark.parametrize("first", [0, 2], ids=["at the first step", "later"])
def test_8_bit_step_that_is_not_finite_changes_no_bit(first):
    model = quantised_model()
    optimizer = build_optimizer(model, EIGHT_BIT)
    steps(model, optimizer, [FINITE] * first)
    weights, before = copy.deepcopy(model.state_dict()), stored(optimizer)
    steps(model, optimizer, [NOT_FINITE])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    after = stored(optimizer)
    assert all(not t.any() for t in after) if first == 0 else all(map(torch.equal, after, before))


def test_8_bit_step_divides_the_gradients_itself():
    models = [quantised_model() for _ in range(2)]
    for model, factor in zip(models, (1.0, 4.0), strict=True):
        optimizer = build_optimizer(model, EIGHT_BIT)
        assert divides_by_itself(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * factor
        apply_update(optimizer, 1e-2, FINITE, divisor=torch.tensor(factor))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_8_bit_without_torchao_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"adamw8bit, which needs torchao(.|\n)*pip install torchao"):
        build_optimizer(quantised_model(), EIGHT_BIT)


WIDE = tiny_shape(hidden_size=128, intermediate_size=256, head_dim=32)


def eight_bit_losses(dist: Dist) -> tuple[list[float], int]:
    """The loss of each of four steps of one rank's rows, and how many shards of the state are quantised."""
    cfg = Config(
        target=TargetConfig(train_backend="pytorch" if dist.world_size == 1 else "fsdp"),
        train=TrainConfig(precision="fp32"),
        optim=EIGHT_BIT,
    )
    spread = make_backend(cfg, dist)
    module = spread.prepare(build_model(cfg, WIDE))
    init_random(module, 0)
    optimizer = build_optimizer(module, cfg.optim)
    totals = []
    for _ in range(4):
        totals.append(backward(spread, module, micro_batches(dist, 1)))
        spread.scale_grads(torch.tensor(0.01))
        apply_update(optimizer, 1e-2, FINITE)
    states = [state["exp_avg"] for state in optimizer.state.values()]
    local = [state.to_local() if isinstance(state, DTensor) else state for state in states]
    return totals, sum(hasattr(state, "codes") for state in local)


# --- a run that is interrupted ----------------------------------------------------------------------------------------


def eight_bit_run(dist: Dist, run_dir: str, rows: str, stops: list[int | None]) -> list[dict]:
    """The records after starts that end at these steps; quantised state, and groups with rates of their own."""
    Path(run_dir).mkdir(exist_ok=True)
    for stop in stops:
        config = config_from_dict(
            {
                "target": {"device": "cpu", "train_backend": "pytorch" if dist.world_size == 1 else "fsdp"},
                "model": {"hidden_size": 128, "intermediate_size": 256, "num_layers": 1, "num_heads": 2},
                "data": {"train": [rows], "eval_fraction": 0, "seq_len": 64},
                "optim": {
                    "optimizer": "adamw8bit",
                    "warmup_steps": 1,
                    "groups": [{"pattern": "*.mlp.*", "lr_scale": 3.0, "weight_decay": 0.1}],
                },
                "train": {
                    "steps": 6,
                    "global_batch_size": 4,
                    "micro_batch_size": 2,
                    "precision": "fp32",
                    "stop_after_steps": stop,
                },
                "run": {"export": False},
            }
        )
        sft.run(config, Path(run_dir), dist)
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def on_two_ranks(dist: Dist, folder: str, rows: str) -> tuple[dict[str, list[float]], tuple[list[float], int]]:
    """The losses of an unbroken run, of a resumed one, and of one that began in one process; and of single steps."""
    starts = {"unbroken": [None], "resumed": [3, None], "alone": [None]}
    runs = {name: losses(eight_bit_run(dist, f"{folder}/{name}", rows, stops)) for name, stops in starts.items()}
    return runs, eight_bit_losses(dist)


@pytest.fixture(scope="module")
def eight_bit(tmp_path_factory) -> tuple[list[float], list[float], list]:
    """The losses of a run in one process, of it resumed, and what two ranks give."""
    folder = tmp_path_factory.mktemp("eight_bit")
    rows = folder / "rows.jsonl"
    pairs = [{"question": f"what is {n}?", "answer": "na " * (n % 9) + str(n)} for n in range(40)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    expected = losses(eight_bit_run(ALONE, str(folder / "expected"), str(rows), [None]))
    eight_bit_run(ALONE, str(folder / "alone"), str(rows), [3])
    shutil.copytree(folder / "alone", folder / "resumed_alone")
    resumed = losses(eight_bit_run(ALONE, str(folder / "resumed_alone"), str(rows), [None]))
    return expected, resumed, run_ranks(on_two_ranks, 2, str(folder), str(rows))


def test_8_bit_run_resumes_bit_for_bit_and_at_another_number_of_ranks(eight_bit):
    expected, resumed, ((two, _), _) = eight_bit
    assert resumed == expected
    assert two["resumed"] == two["unbroken"] == pytest.approx(expected, rel=1e-4)
    assert two["alone"] == pytest.approx(expected, rel=1e-4)


def test_8_bit_state_is_sharded_and_trains_as_on_one_process(eight_bit):
    expected, quantised = eight_bit_losses(ALONE)
    assert quantised == 14  # all matrices but the embedding, which is the head too
    totals, counts = zip(*(single for _, single in eight_bit[2]), strict=True)
    assert [sum(pair) for pair in zip(*totals, strict=True)] == pytest.approx(expected, rel=1e-3)
    assert counts == (14, 14)
    assert expected[3] < 0.7 * expected[0]


def test_plan_counts_8_bit_state():
    words, train = ("adamw", "adamw8bit"), TrainConfig(precision="bf16")
    configs = [Config(optim=OptimConfig(learning_rate=1e-3, optimizer=word), train=train) for word in words]
    plans = [plan_wrapping(build_model(config, WIDE), config, 1) for config in configs]
    states = [float(re.search(r"AdamW state ([\d.]+) MiB", "".join(plan.render()))[1]) for plan in plans]
    assert states[1] / states[0] == pytest.approx(2.0625 / 8, abs=0.05)
