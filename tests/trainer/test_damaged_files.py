"""Every file that the trainer reads again, damaged in every way: one line that names the file, or the run as it was.

In process and seeded: a short round in `make test`, the long one in `make soak`.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.support.configs import config_of
from tests.support.tiny import ALONE, tiny_shape
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import render_marker
from trainer.commands.cli import train_command
from trainer.commands.export import export
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.errors import UserError
from trainer.export.adapter import write_adapter
from trainer.export.model import write_export
from trainer.failures.diagnose import FAILURE_FILE, has_failed
from trainer.memory.fitting import read_failed
from trainer.metrics.log import MetricsLog
from trainer.models.build import build_model, fill_weights
from trainer.models.hf import init_random
from trainer.models.lora import LoraSpec, attach, linear_names, split_adapter
from trainer.recipes import sft
from trainer.schema import Config
from trainer.start import torchrun
from trainer.train.build import build_run
from trainer.train.recipe import read_basis

SHAPE = tiny_shape(vocab_size=260)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, 1.5, -0.5, 1e300, float("nan"), float("inf"), 2**31, 2**40, 2**63, 10**5000),
    *("", "4", "auto", "x" * 5000, "\x1b[2J", "\ud800", "../../etc/passwd", "a\0b"),
    *([], [1], ["a"], [[]], {}, {"a": 1}, {"": []}, [None] * 100),
)
MAX_LINE = 1000


class Case(NamedTuple):
    """A file, and what reads it. `act` raises what it tells; what it returns is compared with what it was."""

    file: Path
    act: Callable[[], object]
    same: bool = False
    """Whether a file that is taken can only say what it said."""


# --- damages ----------------------------------------------------------------------------------------------------------


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 8))):
        spoilt[rng.randrange(min(len(data), 4096))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def grown(data: bytes, rng: Random) -> bytes:
    return data + rng.choice((b"\0", b"}", b"x" * 1000, data))


def random_bytes(data: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.choice((1, 64, len(data))))


def other(data: bytes, rng: Random) -> bytes:
    whole = (b"", b"null", b"5", b'"x"', b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"1" * 5000)
    return rng.choice((*whole, b" " * 1_000_000, b"{}" * 10_000_000))


def changed(data: bytes, rng: Random) -> bytes:
    """One value of it is of another type, size or depth; or it is gone."""
    head, body, tail = parted(data)
    try:
        tree = json.loads(body)
    except ValueError:
        return flipped(data, rng)
    places = list(places_in(tree))
    if not places:
        return other(data, rng)
    at, key = rng.choice(places)
    if rng.random() < 0.2:
        del at[key]
    else:
        at[key] = deep() if rng.random() < 0.1 else rng.choice(VALUES)
    try:
        written = json.dumps(tree).encode("utf-8", "surrogatepass")
    except ValueError:
        written = body
    return head(len(written)) + written + tail


def parted(data: bytes) -> tuple[Callable[[int], bytes], bytes, bytes]:
    """What stands before the JSON (of its length), the JSON, and what comes after it: safetensors have both."""
    length = int.from_bytes(data[:8], "little")
    if data[:1] != b"{" and 0 < length < len(data):
        return lambda size: size.to_bytes(8, "little"), data[8 : 8 + length], data[8 + length :]
    return lambda size: b"", data, b""


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting:
        at = waiting.pop()
        for key in at if isinstance(at, dict) else range(min(len(at), 5)):
            yield at, key
            if isinstance(at[key], (dict, list)) and at[key]:
                waiting.append(at[key])


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


DAMAGES = (cut, flipped, grown, random_bytes, other, *[changed] * 10)


# --- what is there to be damaged --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, one in shards, an adapter, rows, and a run of them that was saved, all of this trainer."""
    folder = tmp_path_factory.mktemp("damaged")
    model = SHAPE.build()
    init_random(model, 0)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    write_export(folder / "model", SHAPE, tensors=tensors, tokenizer=build_bytes_tokenizer())
    shutil.copytree(folder / "model", folder / "shards")
    (folder / "shards" / "model.safetensors").unlink()
    save_file(tensors, folder / "shards" / "a.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = LoraSpec(4, 8.0, 0.0, False, tuple(linear_names(model)[:3]))
    attach(model, spec)
    pairs = {name: torch.zeros_like(p) for name, p in split_adapter(dict(model.named_parameters()))[1].items()}
    write_adapter(folder / "adapter", pairs, spec=spec, shape=SHAPE, base_name=None)
    rows = [{"question": f"{number}?", "answer": "na " * (number % 5 + 1)} for number in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft.run(config(folder), folder / "run", ALONE) == 0
    (folder / "run" / "control").mkdir(exist_ok=True)
    (folder / "run" / FAILURE_FILE).write_text(json.dumps({"start": "x", "rank": 1, "message": "gone"}))
    (folder / "run" / "memory_plan.json").write_text(json.dumps({"setting": {"model": {}}, "failed": ["full"]}))
    return folder


def config(folder: Path, model: str = "model", **lora: Any) -> Config:
    (folder / "run").mkdir(exist_ok=True)
    return config_of(
        model={"name": str(folder / model)},
        lora=lora,
        data={"train": [str(folder / "rows.jsonl")], "seq_len": 64, "eval_fraction": 0.2},
        optim={"learning_rate": 1e-3, "warmup_steps": 0},
        train={"steps": 2, "micro_batch_size": 2, "save_every": 1},
        run={"export": False},
    )


def begin(folder: Path, model: str = "model", **lora: Any) -> object:
    """A start up to its first step."""
    wanted = config(folder, model, **lora)
    recipe = sft.recipe()
    basis = read_basis(recipe, wanted, ALONE)
    module = build_model(wanted, basis.shape)
    module.to_empty(device="cpu")
    fill_weights(wanted, module, basis.folder)
    data = recipe.data(wanted, ALONE, basis, run_dir=None)
    data.train.step_batches(0)
    data.close()
    return None


def go_on(folder: Path) -> object:
    """A resume: the steps that each of its checkpoints would go on from."""
    wanted, recipe = config(folder), sft.recipe()
    basis = read_basis(recipe, wanted, ALONE)
    data = recipe.data(wanted, ALONE, basis, run_dir=folder / "run")
    try:
        run = build_run(recipe, wanted, folder / "run", ALONE, basis=basis, data=data)
        run.log.close()
        return run.start_step
    finally:
        data.close()


def by_command(command: Any, *args: object) -> object:
    """A command in this process, with what it tells as the error that it was."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    if result.exit_code:
        assert result.exit_code == 2, result.output
        raise UserError(result.stderr.strip().removeprefix("Error: "))
    return None


def inspect(folder: Path) -> object:
    lines = [f"model.name={folder / 'model'}", f"data.train=[{folder / 'rows.jsonl'}]", "data.seq_len=64"]
    return by_command(train_command, folder / "c.yaml", "--inspect", *lines)


def cases(folder: Path) -> list[Case]:
    (folder / "c.yaml").write_text("target: {device: cpu}\n")
    run, step = folder / "run", folder / "run" / "checkpoints" / "step_000002"
    tokens = run / "tokens"

    def sealed() -> object:
        """As if a save had written what is there: its values must do, or be told."""
        with suppress(OSError):
            (step / "COMPLETE").write_bytes(render_marker((step / "state.json").read_bytes()))
        return go_on(folder)

    def log() -> object:
        MetricsLog(run / "metrics.jsonl", total_steps=9, keep_through=1).close()

    def notes() -> object:
        torchrun._read(run / "outcome.json")
        return has_failed(run), read_failed(run, config(folder), 1), torchrun._read(run / FAILURE_FILE) and None

    small = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
    return [
        *(Case(folder / "model" / name, lambda: begin(folder)) for name in small),
        Case(folder / "model" / "model.safetensors", lambda: begin(folder)),
        Case(folder / "shards" / "model.safetensors.index.json", lambda: begin(folder, "shards")),
        Case(folder / "model" / "config.json", lambda: inspect(folder)),
        Case(folder / "adapter" / "adapter_config.json", lambda: begin(folder, adapter=str(folder / "adapter"))),
        Case(folder / "adapter" / "adapter_model.safetensors", lambda: begin(folder, adapter=str(folder / "adapter"))),
        *(Case(step / name, lambda: go_on(folder), same=True) for name in ("COMPLETE", "state.json", ".metadata")),
        *(Case(step / name, lambda: go_on(folder), same=True) for name in ("random_0.pt", "__0_0.distcp")),
        Case(step / "state.json", sealed),
        Case(step / "state.json", lambda: by_command(export, run, "--step", 2, "--out", folder / "out")),
        *(Case(tokens / name, lambda: go_on(folder), same=True) for name in ("rows.tokens", "rows.npz")),
        Case(run / "metrics.jsonl", log),
        *(Case(run / name, notes) for name in ("outcome.json", FAILURE_FILE, "memory_plan.json")),
    ]


# --- the rounds -------------------------------------------------------------------------------------------------------


def check_told(error: BaseException, case: Case, told: Counter[str]) -> None:
    assert isinstance(error, (UserError, CheckpointError)), f"{type(error).__name__} is told with a trace"
    text = str(error).removeprefix("Error: ")
    lines = [line for line in text.splitlines() if not line.startswith(("  in ", "hint: "))]
    assert len(lines) == 1 and len(lines[0]) <= MAX_LINE, text
    assert text.isprintable() or text.replace("\n", "").isprintable()
    named = (case.file.name, str(case.file.parent), f"{case.file.parent.name}/,", "chat template")
    assert any(name in text for name in named), text
    told["told"] += 1


def put_back(run: Path, place: Path) -> None:
    shutil.rmtree(place / "run")
    shutil.copytree(run, place / "run")


def play(place: Path, seed: int, rounds: int) -> Counter[str]:
    """Each case `rounds` times, each time from a whole folder."""
    rng, told = Random(seed), Counter[str]()
    run = shutil.copytree(place / "run", place / f"whole_{seed}")
    for case in cases(place):
        put_back(run, place)
        whole = case.file.read_bytes()
        expected = case.act() if case.same else None
        for number in range(rounds):
            damage = rng.choice(DAMAGES)
            spoilt = None if rng.random() < 0.03 else damage(whole, rng)
            put_back(run, place)
            case.file.unlink()
            if spoilt is not None:
                case.file.write_bytes(spoilt)
            try:
                found = case.act()
                assert not case.same or found in (expected, 1), f"{found} is not {expected}"
                told["as it was"] += 1
            except BaseException as error:
                try:
                    check_told(error, case, told)
                except AssertionError as wrong:
                    where = f"seed {seed}, {case.file.name}, {number}, {damage.__name__}: {spoilt and spoilt[:3000]!r}"
                    raise AssertionError(f"{wrong}\n{where}") from error
            case.file.parent.mkdir(parents=True, exist_ok=True)
            case.file.write_bytes(whole)
    return told


def test_damaged_file_is_told_in_a_line_or_changes_nothing(place: Path) -> None:
    told = play(place, seed=20, rounds=8)
    assert told["told"] > 60 and told["as it was"] > 60, told


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6))
def test_damaged_file_is_told_in_a_line_or_changes_nothing_at_length(place: Path, seed: int) -> None:
    play(place, seed=seed, rounds=120)
