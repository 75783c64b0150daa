"""Adapters: PEFT's files both ways, one gradient on any number of ranks, a frozen base that stays as it is."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.gradients import assert_same_grads, backward, full, micro_batches
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_shape
from tests.support.trainings import losses
from trainer.config.load import config_from_dict, config_notes, config_to_dict, local_data_paths
from trainer.dist import Dist
from trainer.errors import ConfigError, ModelError
from trainer.export.adapter import plain_adapted, verify_adapter, write_adapter
from trainer.export.model import sequence_logits
from trainer.models.adapter_files import adapter_weights, lora_spec
from trainer.models.build import base_fingerprint, build_model, fill_weights
from trainer.models.families.decoder import Decoder
from trainer.models.figures import Flops
from trainer.models.hf import base_weights, gather_full
from trainer.models.lora import LoraSpec, choose_targets, linear_names, lora_of, render_lora, split_adapter
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.recipes import sft
from trainer.schema import Config, LoraConfig, ModelConfig, OptimConfig, ParallelConfig, TargetConfig, TrainConfig
from trainer.tensors import local_tensor

SHAPE = tiny_shape()
NAMES = linear_names(Decoder(SHAPE))


def config(
    backend: str = "pytorch", *, precision: str = "fp32", parallel: ParallelConfig | None = None, **lora
) -> Config:
    return Config(
        parallel=parallel or ParallelConfig(),
        target=TargetConfig(train_backend=backend, device="cpu"),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(precision=precision),
        lora=LoraConfig(**{"rank": 4, "alpha": 8, **lora}),
    )


def prepared(dist: Dist, cfg: Config):
    backend = make_backend(cfg, dist)
    module = backend.prepare(build_model(cfg, SHAPE))
    fill_weights(cfg, module, None)
    with torch.no_grad():
        for name, parameter in adapter_weights(module).items():
            if "lora_B" in name:  # zero at first, and then A has no gradient
                local_tensor(parameter).fill_(0.01)
    return backend, module


# --- targets ----------------------------------------------------------------------------------------------------------


def test_targets_are_found_by_end_by_pattern_and_all():
    assert choose_targets(["q_proj", "model.layers.1.mlp.*"], NAMES) == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
    )
    assert choose_targets(["all-linear"], NAMES) == tuple(NAMES)
    assert len(NAMES) == 14


def test_target_that_means_nothing_is_refused_with_the_near_names():
    with pytest.raises(ConfigError, match=r"'qproj', which matches nothing(.|\n)*did you mean q_proj"):
        choose_targets(["qproj"], NAMES)


# --- one gradient -----------------------------------------------------------------------------------------------------


def adapter_grads(dist: Dist, backend: str, precision: str, **lora) -> tuple[dict[str, Tensor], set, set, set]:
    """The gradients of two micro-batches, and the dtypes of gradients, frozen parameters and optimizer state."""
    cfg = config(backend, precision=precision, **lora)
    spread, module = prepared(dist, cfg)
    backward(spread, module, micro_batches(dist, 2))
    assert all(parameter.grad is None for parameter in base_weights(module).values())
    grads = {name: full(parameter.grad) for name, parameter in adapter_weights(module).items()}
    optimizer = build_optimizer(module, cfg.optim)
    optimizer.step()
    states = {t.dtype for state in optimizer.state.values() for t in state.values()}
    assert len(optimizer.state) == len(grads) == 28
    bases = {parameter.dtype for parameter in base_weights(module).values()}
    return grads, {grad.dtype for grad in grads.values()}, bases, states


PARALLEL = {
    "recomputed": ParallelConfig(activation_checkpointing="full"),
    "offloaded": ParallelConfig(cpu_offload=True),
    "by size": ParallelConfig(wrap_policy="size", min_num_params=1000),
}


def first_adapters(dist: Dist, backend: str) -> dict[str, Tensor]:
    spread = make_backend(config(backend), dist)
    module = spread.prepare(build_model(config(backend), SHAPE))
    fill_weights(config(backend), module, None)
    return {name: full(parameter.detach()) for name, parameter in adapter_weights(module).items()}


def all_backends(dist: Dist) -> tuple[dict, dict[str, Tensor]]:
    """The results of every backend, and the first adapters."""
    cases = [(backend, precision) for backend in ("ddp", "fsdp") for precision in ("fp32", "bf16")]
    results = {case: adapter_grads(dist, *case) for case in cases}
    for name, parallel in PARALLEL.items():
        results["fsdp", name] = adapter_grads(dist, "fsdp", "fp32", parallel=parallel)
    results["fsdp", "over bf16"] = adapter_grads(dist, "fsdp", "fp32", base_dtype="bf16")
    return results, first_adapters(dist, "fsdp")


@pytest.fixture(scope="module")
def on_ranks() -> dict[int, list]:
    """What `all_backends` gives on each of 1 and 2 ranks."""
    return {world_size: run_ranks(all_backends, world_size) for world_size in (1, 2)}


def test_adapter_gradients_are_the_same_on_any_backend_and_number_of_ranks(on_ranks):
    expected = {precision: adapter_grads(ALONE, "pytorch", precision) for precision in ("fp32", "bf16")}
    expected |= dict.fromkeys(PARALLEL, expected["fp32"])
    expected["over bf16"] = adapter_grads(ALONE, "pytorch", "fp32", base_dtype="bf16")
    for results, _ in (*on_ranks[1], *on_ranks[2]):
        for (_, precision), (grads, *dtypes) in results.items():
            base = torch.bfloat16 if "bf16" in precision else torch.float32
            assert dtypes == [{torch.float32}, {base}, {torch.float32}]
            # in bf16 the order of the sums shows in the products' last bits
            assert_same_grads(grads, expected[precision][0], 3e-2 if precision == "bf16" else 1e-6)


def test_first_adapters_are_those_of_the_seed_on_any_number_of_ranks(on_ranks):
    alone = first_adapters(ALONE, "pytorch")
    for _, sharded in on_ranks[2]:
        assert all(torch.equal(sharded[name], tensor) for name, tensor in alone.items())
    down = alone["model.layers.0.mlp.down_proj.lora_A.weight"]
    assert 0.9 / 48**0.5 < down.abs().max() < 1 / 48**0.5
    assert not any(tensor.any() for name, tensor in alone.items() if "lora_B" in name)


@pytest.mark.parametrize(("precision", "base_dtype"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_base_dtype_is_the_storage_of_the_frozen_model(precision, base_dtype):
    decoder = build_model(config(precision=precision, base_dtype=base_dtype), SHAPE)
    stored = {parameter.dtype for parameter in base_weights(decoder).values()}
    assert stored == {{"fp32": torch.float32, "bf16": torch.bfloat16}[base_dtype]}


def test_adapters_are_shown_in_the_plan():
    decoder = build_model(config(targets=["q_proj"], rslora=True), SHAPE)
    expected = "rslora: rank 4, alpha 8, so scaled by 4, dropout 0, beside 2 linear modules"
    assert render_lora(decoder) == [expected]
    assert render_lora(Decoder(SHAPE)) == []


def test_frozen_parameters_count_two_products_of_three():
    cfg = config(rank=1, targets=["q_proj"])
    frozen, adapters = SHAPE.num_params, 2 * (32 + 32)
    attention = 12 * 2 * 4 * 8  # layers, heads, head_dim
    head = 4 * SHAPE.vocab_size * SHAPE.hidden_size
    flops = build_model(cfg, SHAPE).flops()
    assert flops == Flops(4 * frozen + 6 * adapters, head, attention)


def test_dropout_acts_in_training_only():
    batch = micro_batches(ALONE, 1)[0]
    _, module = prepared(ALONE, config(dropout=0.5))
    call = lambda: module(batch.input_ids, batch.positions, batch.doc_ids)  # noqa: E731
    assert not torch.equal(call(), call())
    module.eval()
    assert torch.equal(call(), call())


# --- what an adapter brings -------------------------------------------------------------------------------------------


def peft_adapter(folder: Path, **fields) -> Path:
    """A folder as PEFT itself writes it, over a random model of our shape."""
    from tests.oracles.reference import hf_model

    settings = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **fields})
    peft.get_peft_model(hf_model(SHAPE), settings).save_pretrained(folder)
    return folder


def test_what_the_adapter_says_is_taken_from_it(tmp_path):
    folder = peft_adapter(tmp_path / "a", use_rslora=True, lora_dropout=0.25)
    spec = lora_spec(LoraConfig(adapter=str(folder)), NAMES)
    assert (spec.rank, spec.alpha, spec.dropout, spec.rslora, spec.scaling) == (4, 8, 0.25, True, 4)
    assert spec.targets == choose_targets(["q_proj", "v_proj"], NAMES)
    assert lora_spec(LoraConfig(adapter=str(folder), dropout=0.5), NAMES) == replace(spec, dropout=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 8}, "lora.rank is 8, and .* was made with 4"),
        ({"alpha": 16}, "lora.alpha is 16, and .* was made with 8.0"),
        ({"rslora": True}, "lora.rslora is True, and .* was made with False"),
        ({"targets": ["q_proj"]}, "lora.targets means q_proj, and .* has q_proj, v_proj"),
    ],
)
def test_setting_that_contradicts_the_adapter_is_refused(tmp_path, fields, message):
    folder = peft_adapter(tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        lora_spec(LoraConfig(adapter=str(folder), **fields), NAMES)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias=all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"lora_bias": True}, "lora_bias=True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, fields, named):
    folder = peft_adapter(tmp_path / "a")
    written = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(written | fields))
    with pytest.raises(ModelError) as caught:
        lora_spec(LoraConfig(adapter=str(folder)), NAMES)
    assert f"{named}" in str(caught.value) and "is not supported" in str(caught.value)


def test_folder_that_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"is no PEFT adapter: adapter_config.json cannot be read"):
        lora_spec(LoraConfig(adapter=str(tmp_path)), NAMES)


def test_adapter_of_a_deeper_model_is_refused(tmp_path):
    folder = peft_adapter(tmp_path / "a")
    with pytest.raises(ModelError, match=r"has adapters for model.layers.1.self_attn.q_proj, .*; this model"):
        lora_spec(LoraConfig(adapter=str(folder)), [name for name in NAMES if ".1." not in name])


# --- what is written --------------------------------------------------------------------------------------------------


def written(folder: Path) -> tuple[dict[str, Tensor], LoraSpec]:
    """The tensors of an adapted model, and a folder with its adapters."""
    _, module = prepared(ALONE, config())
    tensors, spec = gather_full(module, ALONE), lora_of(module)
    write_adapter(folder, split_adapter(tensors)[1], spec=spec, shape=SHAPE, base_name=None)
    return tensors, spec


@pytest.fixture(params=[True, False], ids=["with PEFT", "without PEFT"])
def reader(request, monkeypatch):
    if not request.param:
        monkeypatch.setitem(sys.modules, "peft", None)


def test_written_adapter_is_read_back(tmp_path, reader):
    tensors, spec = written(tmp_path / "a")
    (predicted,) = verify_adapter(tmp_path / "a", tensors, spec=spec, shape=SHAPE, rows=[[1, 2, 3]])
    assert predicted == sequence_logits(plain_adapted(SHAPE, tensors, spec), [1, 2, 3]).argmax(dim=-1).tolist()


def test_adapter_that_is_not_what_was_written_is_refused(tmp_path, reader):
    tensors, spec = written(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    stored = load_file(file)
    stored["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"][0, 0] += 1
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is not what was written.*Changed: .*layers.0.mlp.up_proj.lora_B.weight"):
        verify_adapter(tmp_path / "a", tensors, spec=spec, shape=SHAPE, rows=[[1, 2, 3]])


def test_adapter_with_values_that_are_not_finite_is_not_written(tmp_path):
    tensors, spec = written(tmp_path / "a")
    pairs = split_adapter(tensors)[1]
    next(iter(pairs.values()))[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"not exported: .*lora_A.weight has values that are not finite"):
        write_adapter(tmp_path / "b", pairs, spec=spec, shape=SHAPE, base_name=None)
    assert not (tmp_path / "b").exists()


# --- the config -------------------------------------------------------------------------------------------------------


def test_lora_keys_without_lora_are_said_to_have_no_effect():
    cfg = Config(lora=LoraConfig(alpha=32, merge_export=True))
    notes = config_notes(cfg, backend="pytorch", deployed=True)
    assert "lora.alpha, lora.merge_export: no effect, neither lora.rank nor lora.adapter is set" in notes


def test_adapter_folder_is_shipped_like_a_model():
    assert local_data_paths(Config(lora=LoraConfig(adapter="./adapter"))) == ["./adapter"]


def test_freeze_beside_lora_is_refused():
    cfg = Config(lora=LoraConfig(rank=4), model=ModelConfig(freeze=["*norm*"]))
    with pytest.raises(ConfigError, match=r"model.freeze is \['\*norm\*'\], but lora freezes the whole model"):
        config_from_dict(config_to_dict(cfg))


# --- a whole run ------------------------------------------------------------------------------------------------------


def write_base(folder: Path) -> str:
    from tests.oracles.reference import hf_model
    from trainer.data.tokenize.tokenizer import build_bytes_tokenizer

    hf_model(tiny_shape(vocab_size=260)).save_pretrained(folder)
    build_bytes_tokenizer().save_pretrained(folder)
    return str(folder)


def lora_run(dist: Dist, base: str, run_dir: str, rows: str, changes: dict) -> list[dict]:
    """The records of a run of four steps."""
    sections = {
        "target": {"device": "cpu", "train_backend": "pytorch" if dist.world_size == 1 else "fsdp"},
        "model": {"name": base},
        "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]},
        "data": {"train": [rows], "eval_fraction": 0.2, "seq_len": 96},
        "optim": {"learning_rate": 1e-2, "warmup_steps": 1},
        "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "precision": "fp32"},
    }
    for section, values in changes.items():
        sections[section] = {**sections[section], **values}
    Path(run_dir).mkdir(exist_ok=True)
    sft.run(config_from_dict(sections), Path(run_dir), dist)
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return write_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def whole_run(base, rows, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    lora_run(ALONE, base, str(run), rows, {"lora": {"merge_export": True}})
    return run


def test_run_exports_an_adapter_that_peft_loads_and_a_merged_model(whole_run, base):
    outcome = json.loads((whole_run / "outcome.json").read_text())
    assert (outcome["export"], outcome["adapter"]) == ("export", "export/adapter")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(model, whole_run / "export/adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(whole_run / "export").eval()
    ids = torch.tensor(outcome["compared"]["rows"][:1])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)
    assert adapted.peft_config["default"].base_model_name_or_path == base


def test_merged_model_of_an_earlier_end_does_not_stay_beside_newer_adapters(whole_run, base, rows, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run")
    lora_run(ALONE, base, str(tmp_path / "run"), rows, {"lora": {"merge_export": False}})
    left = {path.name for path in (tmp_path / "run" / "export").iterdir()}
    assert "adapter" in left and not left & {"config.json", "model.safetensors"}


def test_run_says_which_adapters_it_trains(base, rows, tmp_path, capsys):
    lora_run(ALONE, base, str(tmp_path / "run"), rows, {"train": {"stop_after_steps": 1, "eval_every": 0}})
    assert "lora: rank 4, alpha 16, so scaled by 4, dropout 0, beside 4 linear modules" in "".join(capsys.readouterr())


def test_run_changes_the_adapters_only(whole_run, base):
    trained = load_file(whole_run / "export/adapter/adapter_model.safetensors")
    assert len(trained) == 8
    assert all(tensor.any() for tensor in trained.values())
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (base, whole_run / "export"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.{p}.weight" for i in (0, 1) for p in ("q_proj", "v_proj")}


def test_next_run_goes_on_from_an_exported_adapter(whole_run, base, rows, tmp_path):
    lora = {"rank": None, "targets": [], "adapter": str(whole_run / "export/adapter")}
    records = lora_run(ALONE, base, str(tmp_path / "run"), rows, {"lora": lora, "train": {"eval_every": 0}})
    before = json.loads((whole_run / "outcome.json").read_text())["eval_loss_last"]
    assert next(r["eval_loss"] for r in records if "eval_loss" in r) == pytest.approx(before, abs=1e-6)


def test_learning_rate_of_a_run_is_scaled_by_its_batch(whole_run, base, rows, tmp_path):
    optim = {"lr_scaling": "linear", "base_batch_size": 2}
    records = lora_run(ALONE, base, str(tmp_path / "run"), rows, {"optim": optim})
    expected = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    rates, before = ([r["lr"] for r in each if "lr" in r] for each in (records, expected))
    assert len(rates) == 4 and rates == pytest.approx([2 * rate for rate in before])


def test_two_ranks_take_the_same_steps(whole_run, base, rows, tmp_path):
    expected = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    got = run_ranks(lora_run, 2, base, str(tmp_path / "run"), rows, {})[0]
    assert losses(got) == pytest.approx(losses(expected), abs=1e-5)
    assert json.loads((tmp_path / "run/outcome.json").read_text())["export"] is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora": {"rank": 8}}, r"lora.rank 4 -> 8"),
        ({"lora": {"targets": ["q_proj"]}}, r"trained 8 tensors \(\w{8}\) -> 4 tensors"),
        ({"lora": {"rank": None, "targets": []}}, r"lora.rank 4 -> none, .*trained 8 tensors \(\w{8}\) -> none"),
        ({"model": {"init": "random"}}, r"base sha256 \w{16} -> random by seed 0"),
    ],
)
def test_resume_of_something_else_is_refused_with_both_values(whole_run, base, rows, tmp_path, changes, told):
    checkpoint = str(whole_run / "checkpoints" / "step_000004")
    with pytest.raises(ModelError, match=told):
        lora_run(ALONE, base, str(tmp_path / "run"), rows, {"train": {"resume": checkpoint}, **changes})


def test_base_is_known_by_its_weights_wherever_it_is(base, tmp_path):
    cfg = Config(model=ModelConfig(name=base))
    copied = shutil.copytree(base, tmp_path / "copy")
    assert base_fingerprint(cfg, Path(base)) == base_fingerprint(cfg, copied)
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert base_fingerprint(cfg, Path(base)) != base_fingerprint(cfg, copied)


def test_resumed_run_ends_with_the_same_adapters(whole_run, base, rows, tmp_path):
    lora_run(ALONE, base, str(tmp_path / "run"), rows, {"train": {"stop_after_steps": 2}})
    lora_run(ALONE, base, str(tmp_path / "run"), rows, {})
    files = [run / "export/adapter/adapter_model.safetensors" for run in (whole_run, tmp_path / "run")]
    expected, got = map(load_file, files)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def unbroken_and_resumed(dist: Dist, base: str, folder: str, rows: str) -> list[list[float]]:
    """The losses of a run with dropout, and of one that stopped after two steps and went on."""
    lora = {"dropout": 0.5}
    found = [lora_run(dist, base, f"{folder}/whole", rows, {"lora": lora})]
    lora_run(dist, base, f"{folder}/parts", rows, {"lora": lora, "train": {"stop_after_steps": 2}})
    torch.rand(7)
    found.append(lora_run(dist, base, f"{folder}/parts", rows, {"lora": lora}))
    return [losses(records) for records in found]


@pytest.mark.parametrize("world_size", [1, 2])
def test_dropout_after_a_resume_is_that_of_the_unbroken_run_on_every_rank(base, rows, tmp_path, whole_run, world_size):
    whole, resumed = run_ranks(unbroken_and_resumed, world_size, base, str(tmp_path), rows)[0]
    assert resumed == whole
    without = losses([json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()])
    assert max(abs(a - b) for a, b in zip(whole, without, strict=True)) > 1e-4


def adapter_of_a_wrapped_module(dist: Dist, folder: str) -> None:
    parallel = ParallelConfig(activation_checkpointing="full", compile=True)
    _, module = prepared(dist, config("fsdp" if dist.world_size > 1 else "pytorch", parallel=parallel))
    tensors = gather_full(module, dist)
    if tensors is not None:
        write_adapter(Path(folder), split_adapter(tensors)[1], spec=lora_of(module), shape=SHAPE, base_name=None)


@pytest.mark.parametrize("world_size", [1, 2])
def test_adapter_of_a_compiled_recomputed_sharded_model_has_the_names_of_pefts_own(tmp_path, world_size):
    run_ranks(adapter_of_a_wrapped_module, world_size, str(tmp_path / "ours"))
    theirs = peft_adapter(tmp_path / "theirs", target_modules="all-linear")
    ours, expected = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "ours", theirs))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in expected.items()}
    assert all(tensor.any() for tensor in ours.values())
