"""When a run saves, and what a save that fails means."""

from __future__ import annotations

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.retention import prune
from trainer.checkpoint.writing import save
from trainer.run import Run
from trainer.schema import CHECKPOINTS_DIR


class Saver:
    """Writes checkpoints of a run when they are due, and deletes those that retention no longer wants."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def is_due(self, step: int) -> bool:
        every = self._run.config.train.save_every
        return step == self._run.data.train.total_steps or (every > 0 and step % every == 0)

    def save(self, step: int, *, must_succeed: bool) -> None:
        """Write a checkpoint; one that fails on the way is only reported, for the training is worth more than it."""
        run, folder = self._run, self._run.run_dir / CHECKPOINTS_DIR
        run.dist.progress.enter("saving")
        extra = {**run.extra, "data": run.data.train.state_dict(step)}
        try:
            path = save(folder, step, run.module, run.optimizer, extra, run.dist)
        except CheckpointError as error:
            if must_succeed:
                raise
            run.log.note(f"warning: {error}; training goes on from memory")
            return
        run.log.note(f"saved {path}")
        if run.dist.is_main:
            prune(folder, run.config.train.keep_last, newest=step)
