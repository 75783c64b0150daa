"""The main job, once, over a real sshd: two FSDP ranks on the CPU, and what is home afterwards."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.ferry import REPO, Ferry
from tests.support.sshd import ALIAS, start_sshd


@dataclass
class Done:
    results: Path
    process: subprocess.CompletedProcess[bytes]

    def outcome(self) -> dict:
        return json.loads((self.results / "outcome.json").read_text())

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.results / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("main")
    project = folder / "project"
    project.mkdir()  # has no trainer of its own: the client's travels
    with start_sshd(folder) as server:
        ferry = Ferry(project, folder / "state", folder / "root", ALIAS)
        ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
        words = ("target.device=cpu", "target.gpu_ranks=[0,1]", "--python", sys.executable)
        done = ferry.run(str(REPO / "configs" / "02_debug_sft_fsdp.py"), *words, *ferry.where())
        assert done.returncode == 0, done.stderr.decode()
        (results,) = (project / "results").iterdir()
        yield Done(results, done)


def test_held_out_loss_at_least_a_fifth_below_the_first(main_job):
    held_out = [row["eval_loss"] for row in main_job.metrics() if "eval_loss" in row]
    assert held_out[-1] <= 0.8 * held_out[0]


def test_metrics_hold_every_step_with_the_promised_keys(main_job):
    steps = [row for row in main_job.metrics() if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    promised = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s_per_gpu", "mfu", "step_s", "data_wait_s"}
    assert promised | {"mem_gib", "epoch"} <= set(steps[0])


def test_outcome_says_where_the_start_went_torchrun_included(main_job):
    started = main_job.outcome()["start_s"]
    assert {"launcher", "imports", "ranks", "data", "model", "first step"} <= started.keys()
    assert started["launcher"] > 0


def test_export_in_transformers_predicts_what_the_trainer_did_on_rows_of_the_runs_data(main_job):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(main_job.results / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(main_job.results / "export")
    compared = main_job.outcome()["compared"]
    assert [len(row) for row in compared["rows"]] == [64, 64]
    for row, predicted in zip(compared["rows"], compared["predicted"], strict=True):
        assert tokenizer.decode(row).startswith("<|im_start|>user")
        with torch.no_grad():
            assert model(torch.tensor([row])).logits[0].argmax(dim=-1).tolist() == predicted
    assert tokenizer.chat_template


def test_results_are_home_and_the_log_was_on_the_screen(main_job):
    names = {path.name for path in main_job.results.iterdir()}
    assert {"metrics.jsonl", "config.yaml", "job.json", "outcome.json", "status.json", "logs", "export"} <= names
    log = (main_job.results / "logs" / "attempt_1" / "rank_0.log").read_bytes().splitlines()
    shown = [line.removeprefix(b"[0] ") for line in main_job.process.stdout.splitlines() if line.startswith(b"[0] ")]
    assert shown == log
