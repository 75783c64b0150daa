"""TensorBoard and Weights & Biases beside metrics.jsonl. If a tracker fails, its numbers are missing, and the run
continues."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import ConfigError
from trainer.schema import Config
from trainer.words import first_line

TENSORBOARD_DIR = "tensorboard"
WANDB_ID_FILE = "control/wandb_id"
"""The id of the W&B run, so that a resumed start continues it."""


class Tracker(Protocol):
    """Takes numbers and texts by step, and is closed once."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def check_trackers(config: Config) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for tracker in config.run.trackers:
        if find_spec(tracker) is None:
            raise ConfigError(
                f"run.trackers names {tracker}, which is not installed for this Python", hint=f"pip install {tracker}"
            )


def open_trackers(config: Config, run_dir: Path, *, keep_through: int, tell: Callable[[str], None]) -> list[Tracker]:
    """The config's trackers. A tracker that fails gives one warning to `tell`, and gets nothing more.

    `keep_through`: the step from which a resumed run continues; values logged after it are replaced.
    """
    opened: list[Tracker] = []
    for name in dict.fromkeys(config.run.trackers):
        try:
            tracker = OPENERS[name](config, run_dir, keep_through)
        except Exception as error:  # any error of the tracker
            tell(f"warning: {name} does not start ({first_line(error)}); training goes on without it")
            continue
        opened.append(Guarded(name, tracker, tell))
    return opened


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's numbers, by names that trackers use for grouping: `train/loss`, `eval/loss`."""
    group = "eval" if "eval_loss" in record else "train"
    return {
        f"{group}/{key.removeprefix('eval_')}": value
        for key, value in record.items()
        if key not in ("step", "steps") and isinstance(value, int | float)
    }


class Guarded:
    """A tracker that is dropped, with one warning, at its first failure."""

    def __init__(self, name: str, tracker: Tracker, tell: Callable[[str], None]) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker
        self._tell = tell

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.log(step, numbers))

    def text(self, step: int, name: str, text: str) -> None:
        self._try(lambda tracker: tracker.text(step, name, text))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, use: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            use(self._tracker)
        except Exception as error:  # any error of the tracker
            failed, self._tracker = self._tracker, None
            self._tell(f"warning: {self._name} failed ({first_line(error)}); training goes on without it")
            with suppress(Exception):
                failed.close()


class TensorBoard:
    """Event files in the run folder; a resumed run hides values that the earlier start wrote after its checkpoint."""

    def __init__(self, config: Config, run_dir: Path, keep_through: int) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        # a run that starts over hides all values of an earlier start, even its evaluation at step 0
        self._writer = writer(str(run_dir / TENSORBOARD_DIR), purge_step=keep_through + 1 if keep_through else 0)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, the same after a resume: it ignores steps that it already has."""

    def __init__(self, config: Config, run_dir: Path, keep_through: int) -> None:
        from trainer.config.load import config_to_dict

        self._run = import_module("wandb").init(
            project=config.run.tracker_project,
            name=config.run.name,
            id=_wandb_id(run_dir, anew=keep_through == 0),
            resume="allow",
            dir=str(run_dir),
            config=config_to_dict(config),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path, *, anew: bool) -> str:
    path = run_dir / WANDB_ID_FILE
    if anew or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text()


OPENERS: dict[str, Callable[[Config, Path, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}
