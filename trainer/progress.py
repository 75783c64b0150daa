"""The phase that a rank is in: set by the training code, read by the watchdog's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["starting", "data", "forward", "backward", "optimizer", "evaluation", "saving", "exporting", "done"]

SLOW_PHASES = frozenset({"starting", "saving", "exporting"})
"""Phases whose duration depends on a disk, a download or the data set, not on a step."""

WORDS: dict[Phase, str] = {
    "starting": "while data and model are prepared",
    "data": "waiting for the data of step {step}",
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "optimizer": "in the update of step {step}",
    "evaluation": "in the evaluation after step {step}",
    "saving": "saving after step {step}",
    "exporting": "exporting after step {step}",
    "done": "at its end",
}


@dataclass
class Progress:
    """The phase a rank is in. All ranks enter the same phases in the same order, so `count` compares them."""

    step: int = 0
    phase: Phase = "starting"
    count: int = 0

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Note that this phase, or its next part, begins. `step` counts from 1."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.count += 1


def render_place(phase: Phase, step: int) -> str:
    """`in the forward pass of step 5`."""
    return WORDS[phase].format(step=step)
