"""Decides when a run saves, and handles saves that fail."""

from __future__ import annotations

import time
from typing import Any

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.resume import RECIPE
from trainer.checkpoint.retention import METRIC, Keep
from trainer.checkpoint.write import StageHook, ignore_stage
from trainer.config.train import saves_the_best
from trainer.saver.writer import AsyncSave, Writer
from trainer.schema import CHECKPOINTS_DIR
from trainer.train.run import Run
from trainer.train.values import PeakMemory

DEFAULT = AsyncSave()
WORTH_SAYING_S = 1.0
"""Seconds. Shorter waits for a save are not logged."""
PATIENCE_S = (10.0, 30.0)
"""Seconds of waiting for a save until the first note and between further ones: a hanging disk causes no error."""


class Saver:
    """Writes a run's checkpoints when due; in parallel with the training if `train.async_save` is set."""

    def __init__(
        self,
        run: Run,
        *,
        on_stage: StageHook = ignore_stage,
        beside: AsyncSave = DEFAULT,
        memory: PeakMemory | None = None,
        patience_s: tuple[float, float] = PATIENCE_S,
    ) -> None:
        """`memory`: the peak meter, which must not count the copies of saves."""
        self._run = run
        self._memory = memory or PeakMemory(run.dist.device)
        self._patience_s = patience_s
        train = run.config.train
        # the run waits for a save at the end in any case, so it needs no copy
        self._is_worth_it = train.async_save and 0 < train.save_every < run.data.train.total_steps
        self._writer = Writer(run.dist, beside=beside if self._is_worth_it else None, on_stage=on_stage)
        self.unsaved: CheckpointError | None = None
        """The error of the last save, if it failed."""
        self.keeps_best = saves_the_best(run.config)
        """Whether to save after each evaluation that is the best so far."""
        self._keep = Keep(train.keep_last, max(train.keep_best, int(self.keeps_best)), train.keep_every)

    def is_async(self) -> bool:
        """Whether training would continue during a save that began now; the same on every rank.

        Waits for the previous save: a saver may be lost with it, and the ranks notice this at different times.
        """
        if not self._is_worth_it:
            return False
        self._run.dist.progress.enter("saving")
        self._wait_for_earlier()
        return self._writer.is_beside

    def is_due(self, step: int) -> bool:
        return self._run.is_due(step, every=self._run.config.train.save_every)

    def prepare(self) -> None:
        """Before the first step, start the preparation of saves in parallel with the training, without waiting."""
        reason = self._writer.prepare(self._run.module, self._run.optimizer)
        if reason:
            self._run.log.note(f"note: saves stop the training, train.async_save has no effect: {reason}")

    def after_step(self) -> None:
        """Log the outcome of a save that has ended meanwhile. Once in a run, allocate the GPU memory that the first
        save would have to wait for."""
        if self._writer.has_ended():
            self._tell()
        self._writer.reserve(self._memory.left_out)

    def save(self, step: int, *, must_succeed: bool, then_export: bool = False) -> None:
        """Save. A failure during the run is only reported, because the training is more important than one save.

        Only one save runs at a time: this waits for the previous one. With `must_succeed` it also waits for this
        save's outcome, and raises CheckpointError. With `then_export` it does not raise, so that the export can
        follow: the error is then in `unsaved`, on every rank.
        """
        self._run.dist.progress.enter("saving")
        with self._memory.left_out():  # the copy uses memory that is free in any case
            if self._writer.saving_step != step:
                self._wait_for_earlier()
                self._start(step)
            if must_succeed:
                if self._writer.was_lost():
                    self._tell(goes_on="it is saved again")
                    self._start(step)
                self._tell(must_succeed=not then_export, goes_on="the model is exported all the same")

    def finish(self) -> None:
        """Wait for the save in progress, log its outcome, and close the writer."""
        self._run.dist.progress.enter("saving")
        self._tell()
        self._writer.close()

    def _start(self, step: int) -> None:
        run = self._run
        self._writer.start(
            run.run_dir / CHECKPOINTS_DIR, step, run.module, run.optimizer, self._info(step), keep=self._keep
        )

    def _info(self, step: int) -> dict[str, Any]:
        run = self._run
        info = {**run.extra, "data": run.data.train.state_dict(step)}
        if run.state is not None:
            info[RECIPE] = run.state.state_dict()
        info.pop(METRIC, None)
        if run.extra.get("eval_step") == step:
            info[METRIC] = run.extra.get("eval_loss_last")
        return info

    def _wait_for_earlier(self) -> None:
        earlier, began = self._writer.saving_step, time.perf_counter()
        self._tell()
        waited = time.perf_counter() - began
        if earlier is not None and waited > WORTH_SAYING_S:
            self._run.log.note(f"note: waited {waited:.1f} s for the save of step {earlier}: raise train.save_every")

    def _tell(self, *, must_succeed: bool = False, goes_on: str = "training goes on from memory") -> None:
        step, (patience_s, later_s) = self._writer.saving_step, self._patience_s
        while not self._writer.ends_within(patience_s):
            patience_s = later_s
            folder = self._run.run_dir / CHECKPOINTS_DIR
            self._run.log.note(f"note: still waiting for the save of step {step} into {folder}")
        try:
            written = self._writer.result()
        except CheckpointError as error:
            if must_succeed:
                raise
            self._run.log.note(f"warning: {error}; {goes_on}")
            self.unsaved = error
            return
        if written is not None:
            self.unsaved = None
            times = f"the training waited {written.blocked_s:.2f} s, written in {written.seconds:.2f} s"
            self._run.log.note(f"saved {written.path} ({times})")
            if written.note:
                self._run.log.note(f"warning: {written.note}")
