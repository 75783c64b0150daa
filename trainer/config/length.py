"""What the length of a run, once it is known, makes of the keys that count in steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.schema import Config, OptimConfig

WARMUP_STEPS, LEAST_PARTS = 10, 5


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """The steps of warm-up: as given, else 10, and never more than a fifth of the run."""
    return min(WARMUP_STEPS, total_steps // LEAST_PARTS) if optim.warmup_steps is None else optim.warmup_steps


def length_notes(config: Config, total_steps: int) -> list[str]:
    """A line for each key that reaches beyond the run; where train.steps gives its length, most are errors already."""
    return [
        f"{key} is {value}, more than the run's {total_steps}: {what}"
        for key, value, what in _beyond(config, total_steps)
    ]


def _beyond(config: Config, total_steps: int) -> Iterator[tuple[str, int, str]]:
    optim, train = config.optim, config.train
    warmup = warmup_steps(optim, total_steps)
    if warmup > total_steps:
        yield "optim.warmup_steps", warmup, "the learning rate never peaks"
    elif optim.decay_steps is not None and warmup + optim.decay_steps > total_steps:
        both = warmup + optim.decay_steps
        yield "optim.warmup_steps + decay_steps", both, "the decay does not reach its end"
    for key in ("profile_steps", "memory_snapshot_steps"):
        late = [step for step in getattr(train, key) if step > total_steps]
        if late:
            yield f"a step of train.{key}", late[0], "nothing is written of it"
    if train.stop_after_steps is not None and train.stop_after_steps > total_steps:
        yield "train.stop_after_steps", train.stop_after_steps, "it ends before"
