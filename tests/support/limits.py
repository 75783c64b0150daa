"""Limits for what hangs. None of them measures a machine: each is far more than ten times what a test usually takes."""

from __future__ import annotations

HANG_S = 600.0
"""How long a test waits for what should come at once."""

FOREVER_S = 3600
"""What a test's process sleeps, and what it is given to save, where a test shows that nobody waits for so long."""
