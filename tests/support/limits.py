"""Limits for what hangs. None of them measures a machine: each is far more than ten times what a test usually takes.

On a machine that is busy with other things `TORCHFERRY_TEST_PATIENCE=5` makes each of them five times as long.
"""

from __future__ import annotations

import os

PATIENCE_NAME = "TORCHFERRY_TEST_PATIENCE"
PATIENCE = float(os.environ.get(PATIENCE_NAME, "1"))

HANG_S = 600.0 * PATIENCE
"""How long a test waits for what should come at once."""

TEST_S, SOAK_TEST_S = 1800.0 * PATIENCE, 7200.0 * PATIENCE
"""What one test may take with its fixtures; a mark `timeout` says otherwise, and is as patient."""

SUITE_S = 5400.0 * PATIENCE
"""What all tests may take together, but for the soaks."""

FOREVER_S = int(3600 * PATIENCE)
"""What a test's process sleeps, and what it is given to save, where a test shows that nobody waits for so long."""


def patient(seconds: int) -> int:
    """A condition of a test, in seconds, that a busy machine must be given more time for."""
    return max(1, round(seconds * PATIENCE))
