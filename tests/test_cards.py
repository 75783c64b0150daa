"""Tests that need more GPUs than there are say so instead of failing."""

from __future__ import annotations

import pytest

from tests.gpu.cards import gpus_needed, why_too_few


@pytest.mark.parametrize(
    ("needed", "present", "why"),
    [
        (1, 0, "needs 1 GPU, none here"),
        (2, 0, "needs 2 GPUs, none here"),
        (2, 1, "needs 2 GPUs, 1 here"),
        (1, 1, None),
        (2, 2, None),
        (2, 8, None),
    ],
)
def test_reason_names_what_is_needed_and_what_there_is(needed, present, why):
    assert why_too_few(needed, present) == why


def test_test_without_a_mark_needs_one(request):
    assert gpus_needed(request.node) == 1


@pytest.mark.gpus(2)
def test_mark_says_how_many_are_needed(request):
    assert gpus_needed(request.node) == 2
