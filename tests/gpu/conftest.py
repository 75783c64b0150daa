"""These tests need a GPU, or as many as their mark `gpus` says; with fewer they are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cards import gpus_needed, why_too_few


def pytest_runtest_setup(item: pytest.Item) -> None:
    why = why_too_few(gpus_needed(item), torch.cuda.device_count())
    if why:
        pytest.skip(why)
