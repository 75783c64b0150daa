"""`train.py CONFIG --inspect`: what a run would do, on a machine that could not run it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.support.tiny import tiny_shape
from trainer.commands import cli
from trainer.config.load import config_from_dict
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.inspection.inspect_run import inspect_run
from trainer.inspection.samples import Label, Piece, Sample
from trainer.inspection.view import print_inspection, render_sample
from trainer.memory.estimate import MemoryEstimate
from trainer.models.families.decoder_shape import shape_to_hf_config

ROWS = [
    {"question": "a?", "answer": "b"},
    {"question": "long " * 30, "answer": "never seen"},
    {"question": "c?", "answer": "dd"},
]


def sections(folder: Path, rows: list[dict[str, str]], **changes: dict[str, Any]) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "target": {"device": "cuda", "gpu_ranks": [0, 1, 2, 3]},
        "data": {"train": [str(path)], "seq_len": 120, "eval_fraction": 0.0, "shuffle": False},
        "train": {"steps": 10, "micro_batch_size": 1},
        "optim": {"schedule": "constant", "learning_rate": 0.5, "warmup_steps": 5},
        "run": {"dir": str(folder / "runs")},
    }
    for name, section in changes.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def call(folder: Path, *options: str, rows: list[dict[str, str]] = ROWS, **changes: dict[str, Any]) -> Result:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(sections(folder, rows, **changes)))
    return CliRunner().invoke(cli.train_command, [str(config), "--inspect", *options])


def test_sample_shows_targets_in_marks_borders_between_documents_and_padding(tmp_path):
    shown = call(tmp_path).stdout
    assert (
        "<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\n[[dd<|im_end|>]]\n\n"
        "──── next document ────\n"
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n\n(71 padding)\n"
    ) in shown
    assert "sample 1: 2 document(s); tokens: 5 target, 44 context, 71 padding" in shown


def test_dropped_row_is_named_with_its_reason(tmp_path):
    shown = call(tmp_path).stdout
    assert "train: 2 of 3 conversations, 49 tokens (5 targets) in 1 rows, 59.2% padding" in shown
    assert f"1 dropped, no target token in the first 120 tokens: {tmp_path}/rows.jsonl:2" in shown


def test_unread_columns_are_told_to_people_and_in_json_alike(tmp_path):
    rows = [*ROWS, {"question": "e?", "answer": "f", "url": "x"}]
    shown = call(tmp_path, rows=rows).stdout
    assert f"note: columns that are not read: 'url' (1 rows); the first in {tmp_path}/rows.jsonl:4" in shown
    found = json.loads(call(tmp_path, "--json", "--samples", "0", rows=rows).stdout)["data"]["findings"]
    assert found == [{"kind": "column", "what": "'url'", "rows": 1, "first": f"{tmp_path}/rows.jsonl:4"}]


def test_plan_memory_and_schedule_are_of_the_configured_ranks_without_gpu_and_run_folder(tmp_path):
    result = call(tmp_path)
    assert result.exit_code == 0, result.output
    assert "parameters: 821,120 in all, 821,120 trained; float32\nfsdp SHARD_GRAD_OP, 4 rank(s): " in result.stdout
    told = re.search(r"memory of each rank, estimated: (\d+\.\d\d MiB) at the peak\n", result.stdout)
    assert told and re.search(rf"  at the peak +{told[1]}\n", result.stdout)
    assert "10 steps of 4 rows: 40.00 epochs, about 1,960 tokens" in result.stdout
    assert "learning rate 0 first, 0.5 at its peak, 0.5 last; 5 steps of warm-up" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "rows.jsonl"]


def test_json_holds_the_same(tmp_path):
    shown = json.loads(call(tmp_path, "--json", "--samples", "1").stdout)
    assert [piece["text"] for piece in shown["samples"][0]["pieces"] if piece["label"] == "target"] == [
        "dd<|im_end|>",
        "b<|im_end|>",
    ]
    assert shown["data"]["train"]["dropped"] == {
        "no target token in the first 120 tokens": [f"{tmp_path}/rows.jsonl:2"]
    }
    assert (shown["plan"]["ranks"], shown["plan"]["parameters"]) == (4, 821120)
    assert (
        shown["memory"]["total"] == MemoryEstimate(**{k: v for k, v in shown["memory"].items() if k != "total"}).total
    )
    assert shown["schedule"]["lr_last"] == 0.5


def test_plans_for_memory_are_told_for_a_card_of_the_given_size(tmp_path):
    model = {"hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16, "num_heads": 16, "num_kv_heads": 8}
    changes: dict[str, Any] = {"model": model, "train": {"micro_batch_size": 200}}
    shown = json.loads(call(tmp_path, "--json", "--samples", "0", "--card-gib", "24", **changes).stdout)
    plans = shown["memory_plans"]
    assert (plans["card"], [plan["fits"] for plan in plans["plans"]].index(True)) == (24 * 2**30, plans["chosen"])
    assert shown["memory"]["total"] == plans["plans"][plans["chosen"]]["needs"]
    assert "* activation_checkpointing=none, reshard_after_forward=false  " in call(tmp_path, "--card-gib", "80").stdout


def test_nothing_is_planned_where_memory_is_manual(tmp_path):
    shown = call(tmp_path, "--json", parallel={"memory": "manual"}).stdout
    assert json.loads(shown)["memory_plans"] is None


@pytest.mark.parametrize(
    ("float8", "size", "line"),
    [
        ("off", 64, None),
        ("on", 64, "float8: on (needs compute capability 8.9 and torchao)"),
        (
            "auto",
            64,
            "float8: decided on the GPU: on where a few blocks, timed at the start, are 1.05 x of bf16"
            " (needs compute capability 8.9 and torchao)",
        ),
        ("auto", 72, "float8: off (model.layers.0.mlp.gate_proj is 72 x 128, and float8 needs multiples of 16)"),
    ],
)
def test_float8_is_told_as_far_as_it_is_known_without_the_gpu(tmp_path, float8, size, line):
    changes = {"train": {"float8": float8}, "model": {"intermediate_size": size}, "data": {"seq_len": 128}}
    assert json.loads(call(tmp_path, "--json", **changes).stdout)["float8"] == line
    shown = [told for told in call(tmp_path, **changes).stdout.splitlines() if told.startswith("float8")]
    assert shown == ([line] if line else [])


def test_float8_that_the_model_cannot_have_is_refused_as_by_the_run(tmp_path):
    result = call(tmp_path, train={"float8": "on"}, model={"intermediate_size": 72}, data={"seq_len": 128})
    assert "train.float8 is on, and there is none: model.layers.0.mlp.gate_proj is 72" in str(result.exception)


@pytest.mark.parametrize(("option", "count"), [([], 3), (["--samples", "1"], 1), (["--samples", "0"], 0)])
def test_so_many_samples_are_shown(tmp_path, option, count):
    rows = [{"question": f"{n}?", "answer": "x" * 60} for n in range(8)]
    assert call(tmp_path, *option, rows=rows).stdout.count("\nsample ") == count


def test_stream_is_looked_at_without_reading_it_to_its_end(tmp_path):
    rows = [{"question": f"{n}?", "answer": "x" * 60} for n in range(20)]
    shown = call(tmp_path, rows=rows, data={"streaming": True, "stream_window": 4, "shuffle": True}).stdout
    assert "10 steps of 4 rows: an unknown part of a stream, about " in shown


def test_json_of_a_stream_of_several_windows_is_alone_on_standard_output(tmp_path):
    rows = [{"question": f"{n}?", "answer": "x" * (60 if n % 2 else 600)} for n in range(20)]
    data = {"streaming": True, "stream_window": 4, "overlong": "drop"}
    shown = json.loads(call(tmp_path, "--json", "--samples", "4", rows=rows, data=data).stdout)
    assert (len(shown["samples"]), shown["schedule"]["epochs"]) == (4, None)


def test_text_of_pretraining_is_tokenized_aside_and_all_but_first_tokens_are_targets(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    values = sections(tmp_path, [], data={"train": [str(tmp_path / "a.txt")]}) | {"recipe": "pretrain"}
    inspection = inspect_run(config_from_dict(values), samples=1)
    first, rest, padding = inspection.samples[0].pieces
    assert [(p.label, p.tokens, p.text) for p in (first, rest)] == [
        (Label.CONTEXT, 1, "h"),
        (Label.TARGET, 5, "ello<|im_end|>"),
    ]
    assert padding.label == Label.PADDING
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "rows.jsonl"]


def test_model_folder_needs_no_weights(tmp_path):
    folder = tmp_path / "model"
    build_bytes_tokenizer().save_pretrained(folder)
    shape_to_hf_config(tiny_shape(vocab_size=260)).save_pretrained(folder)
    shown = call(tmp_path, "--json", model={"name": str(folder)}).stdout
    assert json.loads(shown)["plan"]["parameters"] == tiny_shape(vocab_size=260).num_params


# --- on a terminal ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_colours_in_place_of_marks(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    print_inspection(inspect_run(config_from_dict(sections(tmp_path, ROWS)), samples=1), screen)
    assert "\x1b[1;32mb<|im_end|>" in screen.getvalue()
    assert "[[" not in screen.getvalue()


def test_text_of_the_data_does_not_drive_the_terminal():
    sample = Sample([Piece(Label.TARGET, 0, 4, "a\x1b[2Jb\r\x9bc\n")])
    assert render_sample(sample, coloured=True).plain == "a\\x1b[2Jb\\r\\x9bc\n"


def test_long_sample_is_cut_and_says_what_is_left():
    sample = Sample([Piece(Label.CONTEXT, 0, 1500, "a"), Piece(Label.TARGET, 0, 1600, "b")])
    assert render_sample(sample, coloured=False).plain == "a\n… 1,600 more tokens"


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_data_that_cannot_be_used_ends_with_2_and_one_paragraph(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(sections(tmp_path, [{"colour": "red"}])))
    with pytest.raises(SystemExit) as caught:
        cli.main([str(config), "--inspect"])
    told = capsys.readouterr().err
    assert (caught.value.code, told.count("Error: ")) == (2, 1)
    assert "colour" in told


def test_options_of_inspecting_alone_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["x.yaml", "--samples", "2"])
    told = "Error: --samples has a meaning only with --inspect\nhint: add --inspect\n"
    assert (caught.value.code, capsys.readouterr().err) == (2, told)


@pytest.mark.parametrize("gib", ["0", "-1", "nan", "inf", "1e9"])
def test_card_of_no_possible_size_is_refused_before_the_config_is_read(gib):
    result = CliRunner().invoke(cli.train_command, ["missing.yaml", "--inspect", "--card-gib", gib])
    assert (result.exit_code, "and must be above 0 and below 4096" in result.stderr) == (2, True)


def test_inspect_and_calibrate_together_are_refused():
    result = CliRunner().invoke(cli.train_command, ["missing.yaml", "--inspect", "--calibrate"])
    assert (result.exit_code, "ask one at a time" in result.stderr) == (2, True)


def test_schedule_of_a_billion_steps_is_told_at_once(tmp_path):
    config = config_from_dict(sections(tmp_path, ROWS, train={"steps": 10**9}, optim={"schedule": "cosine"}))
    schedule = inspect_run(config, samples=0).schedule
    assert (schedule.lr_first, schedule.lr_peak) == (0.0, 0.5)
    assert 0 <= schedule.lr_last < 1e-12


def test_key_beyond_the_epochs_is_told(tmp_path):
    train = {"steps": None, "epochs": 1.0, "profile_steps": [99]}
    assert "a step of train.profile_steps is 99, more than" in call(tmp_path, train=train).output
