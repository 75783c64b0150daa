"""Which checkpoints of a run stay on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint.folders import remove, steps_in


def prune(folder: Path, keep_last: int, *, newest: int) -> list[Path]:
    """Delete the complete checkpoints that retention no longer wants, and return them. Rank 0 only."""
    steps = steps_in(folder)
    doomed = [steps[step] for step in to_delete(list(steps), keep_last, newest=newest)]
    for path in doomed:
        remove(path)
    return doomed


def to_delete(steps: Sequence[int], keep_last: int, *, newest: int) -> list[int]:
    """Which of the saved steps go when only the `keep_last` last ones up to `newest`, just saved, stay; 0 keeps those.

    Steps after it always go: the run went back behind them, and a resume would take them for its own.
    """
    own = sorted(step for step in steps if step <= newest)
    return (own[:-keep_last] if keep_last > 0 else []) + sorted(step for step in steps if step > newest)
