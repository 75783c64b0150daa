"""How many GPUs a test needs, and whether there are as many."""

from __future__ import annotations

import pytest


def gpus_needed(item: pytest.Item) -> int:
    """By the test's mark `gpus`, or that of its file; one without."""
    mark = item.get_closest_marker("gpus")
    return int(mark.args[0]) if mark else 1


def why_too_few(needed: int, present: int) -> str | None:
    """Why a test that needs so many GPUs is skipped; None where it runs."""
    if present >= needed:
        return None
    return f"needs {needed} GPU{'s' if needed > 1 else ''}, {present or 'none'} here"
