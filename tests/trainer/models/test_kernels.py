"""Triton's kernels against plain torch, in Triton's interpreter: the same code that a GPU runs, on CPU tensors."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.ferry import REPO
from trainer.kernels.support import uses_triton, why_no_triton


@pytest.fixture(scope="module")
def found():
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.trainer.models.kernel_check"]
    done = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux alone")


@needs_triton
def test_the_kernels_losses_and_gradients_are_those_of_torch(found):
    assert len(found["cases"]) == 6
    for name, case in found["cases"].items():
        tolerance = 1e-6 if "float32" in name else 2**-8  # half a unit in the last place of bf16 at 1.0
        assert case["loss to twin"] <= 1e-5
        assert case["loss to torch"] <= 1e-5
        assert case["gradient to twin"] <= tolerance
        assert case["gradient to torch"] <= tolerance


@needs_triton
def test_an_ignored_position_gets_a_gradient_of_zeros_from_the_kernel(found):
    assert {case["ignored"] for case in found["cases"].values()} == {0.0}


@needs_triton
def test_a_logit_that_is_not_finite_shows_in_the_kernels_loss(found):
    assert found["nan stays"] is True


@needs_triton
def test_scaling_multiplies_and_leaves_what_is_scaled_by_one(found):
    assert (found["scaled"], found["left"]) == (True, True)


@needs_triton
def test_the_8_bit_step_of_the_kernel_is_that_of_torchao(found):
    case = found["adamw8bit"]
    assert case["wrong codes"] == 0
    assert case["codes"] <= 1  # a unit in the last place decides a tie
    assert case["other codes"] < 1e-3
    assert case["scales"] < 1e-6
    assert case["parameters"] < 1e-6 < 1e-3 < case["moved"]


@needs_triton
def test_the_8_bit_step_of_the_kernel_divides_gradients_and_changes_no_bit_when_it_is_skipped(found):
    assert (found["adamw8bit"]["divided"], found["adamw8bit"]["skipped"]) == (True, True)


@needs_triton
def test_every_kernel_is_made_for_ampere_hopper_and_blackwell_without_spilling_registers(tmp_path):
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.trainer.models.kernel_build", "80", "90", "100"]
    done = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert {name: list(built) for name, built in made.items()} == {
        name: ["80", "90", "100"] for name in ("softmax_gradient", "scale", "adamw8bit")
    }
    for built in made.values():
        assert all(taken["REG"] > 0 and taken["STACK"] == taken["LOCAL"] == 0 for taken in built.values())


def test_tensors_on_the_cpu_go_through_plain_torch():
    assert not uses_triton(torch.zeros(1))
    assert why_no_triton(torch.device("cpu")) == "not on a GPU"
