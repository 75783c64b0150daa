"""bench/train.py: what it makes of what was measured, and a short run of ours as it would be measured."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

sys.path.insert(0, str(REPO / "bench"))

import train_peers
from train_cases import CASES, Contender, contender_of, count_params, flops_per_token, hf_config, ours, work_of
from train_ours import build_command, build_environ, last_word, parse_run
from train_processes import MARK_ENV, end_marked, marked, new_mark
from train_report import (
    BEGIN,
    END,
    NO_TIME,
    add_row,
    judge,
    make_row,
    of_runs,
    put_between_marks,
    read_report,
    render,
    render_readme,
)

BENCH = str(REPO / "bench" / "train.py")


def row_of(who="ours", *, speed=1000, micro_batch=8, **options):
    label = options.pop("label", "")
    contender = Contender(who, "0.5b", 2048, micro_batch, 1, label, options=options)
    return make_row(contender, {"step_s": [2048 * micro_batch / speed], "peak_gib": 1.0})


def report_of(*rows, card="NVIDIA H100 80GB HBM3"):
    return {"meta": {"card": card}, "rows": list(rows)}


# --- shapes and cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["0.5b", "1.5b", "7b", "tiny"])
def test_parameters_are_those_of_transformers_model(model):
    import torch
    import transformers

    with torch.device("meta"):
        peers = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**hf_config(model)))
    head = peers.lm_head.weight.numel()
    total = sum(parameter.numel() for parameter in peers.parameters())  # a tied head once
    assert count_params(model) == total - (0 if peers.config.tie_word_embeddings else head)


def test_flops_of_a_7b_token_are_those_reckoned_by_hand():
    assert flops_per_token("7b", 4096) / 1e9 == pytest.approx(47.36, abs=0.005)


def test_every_row_of_a_case_has_a_key_of_its_own():
    for name, rows in CASES.items():
        keys = [row.key + row.cache for row in rows]
        assert len(set(keys)) == len(keys), name


def test_every_override_of_ours_is_a_key_of_the_config():
    from trainer.config.keys import known_keys

    named = {key for rows in CASES.values() for row in rows if row.who == "ours" for key in row.options}
    assert named - set(known_keys()) == set()


def test_options_that_change_the_work_are_named_and_others_are_not():
    assert work_of({"lora.rank": 16}) == work_of({"lora": 16, "ac": "none"}) == "LoRA"
    assert work_of({"parallel.sharding_strategy": "SHARD_GRAD_OP"}) == ""


def test_every_row_of_ours_is_a_config_that_the_trainer_accepts(tmp_path):
    from trainer.config.load import load_config

    (tmp_path / "config.yaml").write_text("run: {name: bench}\n")
    for row in (row for rows in CASES.values() for row in rows if row.who == "ours"):
        _, _, file, _, _, *words = build_command(row, tmp_path, device="cuda", gpu=0)
        assert load_config(file, words).data.packing == row.packed, row.key


# --- a run of ours ----------------------------------------------------------------------------------------------------


def test_command_holds_the_overrides_and_the_chosen_gpus(tmp_path):
    command = build_command(ours("7b", 4096, 2, gpus=2, lora__rank=16), tmp_path, device="cuda", gpu=2)
    assert command[1:3] == ["train.py", str(tmp_path / "config.yaml")]
    assert {"target.gpu_ranks=2,3", "lora.rank=16", "data.packing=false", "train.save_every=0"} <= set(command)


def test_named_cache_replaces_the_users_own(tmp_path):
    mine = {"TORCHINDUCTOR_CACHE_DIR": "/somewhere", "A": "1"}
    made = build_environ(ours("1.5b", 2048, 4, cache="start"), mine, tmp_path)
    assert made["TORCHFERRY_CACHE"] == str(tmp_path / "cache-start")
    assert made["A"] == "1" and "TORCHINDUCTOR_CACHE_DIR" not in made
    assert build_environ(ours("1.5b", 2048, 4), mine, tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"


def record(step, **values):
    numbers = {"step_s": 0.1, "tokens": 100, "mem_gib": 2.0, "data_wait_s": 0.0, "loss": 3.0, "mfu": 0.5, **values}
    return json.dumps({"step": step, **numbers}) + "\n"


def test_warm_up_and_evaluations_are_not_counted_and_a_half_line_is_not_read():
    records = record(1, step_s=9.0) + '{"step": 1, "eval_loss": 4.0}\n' + record(2) + record(3, tokens=60) + '{"st'
    run = parse_run(records, "first step after 12.5 s: 2.0 imports\n", warm=1, steps=2)
    assert (run["step_s"], run["tokens"], run["first_step_s"]) == ([0.1, 0.1], 80, 12.5)


def test_run_with_too_few_steps_tells_its_own_last_error():
    log = "loading\nError: out of GPU memory\nhint: lower it\n"
    assert parse_run(record(1), log, warm=1, steps=2) == {
        "failed": "ended after 1 of 3 steps: Error: out of GPU memory"
    }
    assert last_word("") == "no output"


def test_killing_a_run_ends_what_went_into_a_session_of_its_own():
    mark = new_mark()
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", child], env={**os.environ, MARK_ENV: mark})
    while len(marked(mark)) < 2:
        time.sleep(0.01)
    end_marked(mark)
    process.wait()
    assert marked(mark) == []


WAIT = "import time; time.sleep(1000)"


# --- peers ------------------------------------------------------------------------------------------------------------


def test_a_peer_that_dies_costs_its_own_row_only(tmp_path, monkeypatch):
    script = tmp_path / "fake.py"
    script.write_text(DIES_AT_TWO)
    monkeypatch.setitem(train_peers.SCRIPTS, "raw", str(script))
    rows = [contender_of("raw", "tiny", 64, size) for size in (1, 2, 3, 4)]
    found = list(train_peers.run_peers(rows, warm=1, steps=1, limit_s=HANG_S, log=tmp_path / "raw.log"))
    assert [row.get("mb", row.get("failed")) for row in found] == [1, "hung, died or out of time", "it told", 4]


DIES_AT_TWO = """
import json, os, sys
for setting in json.loads(sys.argv[1]):
    if setting["mb"] == 2:
        os._exit(1)
    if setting["mb"] == 3:
        print("RESULT", json.dumps({"failed": "it told"}), flush=True)
        os._exit(3)
    print("RESULT", json.dumps(setting), flush=True)
"""


def test_peers_get_no_process_when_the_time_is_over(tmp_path):
    rows = [contender_of("raw", "tiny", 64, 1)]
    found = list(train_peers.run_peers(rows, warm=1, steps=1, limit_s=-1, log=tmp_path / "raw.log"))
    assert found == [{"failed": NO_TIME}]


# --- rows and tables --------------------------------------------------------------------------------------------------


def test_row_has_the_median_and_the_tokens_of_one_gpu():
    contender = contender_of("titan", "7b", 4096, 2, gpus=4)
    row = make_row(contender, {"step_s": [0.8, 0.7, 0.9], "peak_gib": 40.0})
    assert (row["step_ms"], row["tok_s_gpu"]) == (800.0, 10240)
    assert row["mfu"] == pytest.approx(47.36e9 * 10240 / 989e12, abs=1e-4)


def test_packed_row_counts_the_tokens_that_were_there():
    contender = contender_of("trl", "0.5b", 2048, 8, packed=True)
    row = make_row(contender, {"step_s": [1.0], "peak_gib": 1.0, "tokens": 15000.0})
    assert (row["tok_s_gpu"], row["mfu"]) == (15000, None)


def test_table_puts_ours_by_a_peer_and_an_option_by_ours_without_it():
    float8 = row_of(speed=1500, label="float8", **{"train.float8": "on"})
    rows = [row_of(), row_of(speed=1200, micro_batch=16), float8, row_of("hf", speed=500)]
    lines = render(rows)
    assert lines[5].endswith("| ours is 2.00 x, ours at its best 2.40 x |")  # not 3 x: float8 is other work
    assert lines[4].endswith("| 1.50 x without |")


def test_failed_row_is_told_in_the_table():
    row = make_row(ours("0.5b", 2048, 8), {"failed": "Error: a | b"})
    assert render([row])[2] == "| Torchferry | 0.5b | 1 | 2048, full | 8 | Error: a / b | | | | | |"


def test_added_row_replaces_its_former_self_unless_there_was_no_time():
    first, second = row_of(speed=1000), row_of(speed=1100)
    assert add_row([first], second) == [second]
    assert add_row([first], {**second, "failed": NO_TIME}) == [first]


def test_short_table_has_the_best_of_each_and_only_works_of_several():
    rows = [row_of(), row_of(speed=1200, micro_batch=16), row_of("hf", speed=500), row_of(**{"train.float8": "on"})]
    thrice = [of_runs([row] * 3) for row in (*rows, row_of("trl", speed=400, micro_batch=4))]
    lines = render_readme([report_of(*thrice, row_of("titan", speed=900))])  # titan ran once: no figure
    assert len(lines) == 3 and "900" not in lines[2]
    # ours at HF's micro-batch; none has TRL's, so our best
    assert "| 1,200 (1,200–1,200) |" in lines[2] and "), 2.00 x |" in lines[2] and "), 3.00 x |" in lines[2]


def test_short_table_takes_a_work_from_the_last_report_that_has_it():
    old, new = (
        report_of(*(of_runs([row] * 3) for row in (row_of(speed=speed), row_of("hf", speed=500))))
        for speed in (1000, 1100)
    )
    assert "| 1,100 " in render_readme([old, new])[2] and render_readme([old, new]) == render_readme([new])


def test_row_of_several_runs_has_the_median_and_the_range_and_counts_those_that_failed():
    failed = make_row(ours("0.5b", 2048, 8), {"failed": "Error: x"})
    row = of_runs([row_of(speed=1000), failed, row_of(speed=1300), row_of(speed=1100)])
    assert (row["tok_s_gpu"], row["runs"], row["failed_runs"]) == (1100, [1000, 1300, 1100], 1)
    assert (row["step_ms"], row["step_ms_min"], row["step_ms_max"]) == (14894.5, 12603.1, 16384.0)
    assert "| 1,100 (1,000–1,300) |" in render([row])[2]
    assert of_runs([failed, failed]) == failed


REPORTS = sorted((REPO / "bench" / "results").glob("*.json"))


@pytest.mark.skipif(not REPORTS, reason="no report is committed")
def test_readme_has_the_short_table_of_the_committed_reports():
    text = (REPO / "README.md").read_text()
    assert put_between_marks(text, render_readme([read_report(path) for path in REPORTS])) == text


def test_text_between_the_marks_alone_is_replaced():
    text = f"a\n{BEGIN}\nold\n{END}\nb\n"
    assert put_between_marks(text, ["new"]) == f"a\n{BEGIN}\nnew\n{END}\nb\n"


# --- against a baseline -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("speed", "code"), [(951, 0), (949, 1), (2000, 0)])
def test_more_than_five_percent_slower_is_a_failure(speed, code):
    lines, found = judge(report_of(row_of(speed=speed)), report_of(row_of(speed=1000)))
    assert found == code and ("too slow" in lines[-1]) == bool(code)


def test_row_that_fails_now_is_slower_and_one_without_time_is_none():
    before, failed = report_of(row_of()), make_row(ours("0.5b", 2048, 8), {"failed": "Error: x"})
    assert judge(report_of(failed), before)[1] == 1
    assert judge(report_of({**failed, "failed": NO_TIME}), before)[1] == 2


def test_another_card_is_not_compared():
    lines, code = judge(report_of(row_of(), card="NVIDIA H200"), report_of(row_of()))
    assert code == 2 and "NVIDIA H200" in lines[0]


def test_a_slower_peer_is_nobodys_failure():
    assert judge(report_of(row_of(), row_of("hf", speed=1)), report_of(row_of(), row_of("hf")))[1] == 0


# --- the command ------------------------------------------------------------------------------------------------------


def run_bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BENCH, *words], cwd=REPO, capture_output=True, text=True, timeout=HANG_S)


def test_unknown_case_is_refused_with_those_there_are():
    done = run_bench("--case", "nope")
    assert done.returncode == 1 and "no case nope; there are 0.5b" in done.stderr


def test_plan_lists_rows_and_seconds_without_running_any():
    done = run_bench("--case", "7b-l14", "--peers", "none", "--plan")
    assert done.stdout.splitlines()[0] == "  40 s  ours 7b-l14 2x4x4096 fixed"


def test_tiny_run_of_ours_is_measured_and_compared_with_itself(tmp_path: Path):
    out = tmp_path / "report.json"
    words = ["--case", "tiny", "--only", "fixed", "--peers", "none", "--device", "cpu", "--warm", "1", "--steps", "2"]
    done = run_bench(*words, "--rounds", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    [row] = read_report(out)["rows"]
    assert row["key"] == "ours tiny 1x2x64 fixed"
    assert len(row["runs"]) == 2
    assert row["tok_s_gpu"] > 0 and row["first_step_s"] > 0
    assert judge(read_report(out), read_report(out))[1] == 0
    assert "first step after" in (tmp_path / "report.ours.log").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--peers", "foo,raw"], "no peer foo"),
        (["--only", "zzz"], "no row of --case tiny"),
        (["--case", "start", "--only", "started"], "fixed nothing compiled before has compiled: ask for both"),
        (["--steps", "0"], "no whole number from 1 on"),
        (["--gpu", "-1"], "no whole number from 0 on"),
        (["--baseline", "README.md"], "README.md is no report of bench/train.py"),
        (["--baseline", "missing.json"], "missing.json cannot be read: No such file"),
        (["--out", "missing/x.json"], "there is no folder missing"),
        (["--table", "missing.json"], "missing.json cannot be read: No such file"),
    ],
)
def test_mistake_in_the_options_is_told_in_a_line_before_anything_runs(options, said):
    command = [sys.executable, BENCH, "--case", "tiny", "--device", "cpu", *options]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode in (1, 2), said in done.stderr, "Traceback" in done.stderr) == (True, True, False)
