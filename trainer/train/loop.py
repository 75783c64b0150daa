"""The training loop: steps, and between them evaluation, saving and stopping; the same for all recipes and backends."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainer.checkpoint.write import StageHook, ignore_stage
from trainer.dist import FlagBoard
from trainer.failures.diagnose import has_failed
from trainer.optim.schedules import lr_multiplier, peak_learning_rate
from trainer.saver.writer import AsyncSave
from trainer.schema import STOP_FILE
from trainer.train.evaluate import Evaluator
from trainer.train.run import Result, Run
from trainer.train.saves import DEFAULT, Saver
from trainer.train.step import StepWatcher, is_watched, train_step, watched
from trainer.train.values import NonFiniteError, PeakMemory, Reader


def train(
    run: Run,
    *,
    watchers: Callable[[Run], Sequence[StepWatcher]] = lambda run: (),
    on_stage: StageHook = ignore_stage,
    beside: AsyncSave = DEFAULT,
) -> Result:
    """Train from `run.start_step` to the last step, or until asked to stop; evaluate and save on the way.

    Raises NonFiniteError after `train.max_nonfinite_steps` skipped steps in a row, on every rank at the same step.
    `watchers` is called before the first step and returns the contexts around each step. `on_stage` is called at each
    stage of a save; `beside`: settings for saves in parallel with the training.
    """
    run.module.train()
    total = run.data.train.total_steps
    lr = learning_rate(run)
    memory = PeakMemory(run.dist.device)
    evaluator, saver = Evaluator(run), Saver(run, on_stage=on_stage, beside=beside, memory=memory)
    with stop_requests(run.run_dir) as is_stop_requested, long_lived() as set_aside:
        saver.prepare()
        if run.start_step == 0:
            run.dist.startup.enter("evaluation")
            evaluator.evaluate(0, is_stop_requested=is_stop_requested)
        steps = Reader(run, memory)
        run.dist.startup.enter("first step")
        step, stopping = run.start_step, False
        border = Border(run, steps, evaluator, saver, is_stop_requested)
        around = watchers(run)
        try:
            while step < total and not stopping and not evaluator.early_stop:
                with watched(around, step + 1) as seen:
                    values = train_step(run, step, lr=lr(step))
                    seen.append(values)
                step += 1
                saver.after_step()
                for note in run.data.train.take_notes():
                    run.log.note(note)
                steps.push(values)
                if step == run.start_step + 1:  # compiled code and the optimizer's state stay to the end
                    set_aside()
                    steps.restart_clock()
                if is_watched(run, step):
                    steps.drain()
                    steps.restart_clock()
                stopping = border.cross(step)
            steps.drain(at_end=True)
            run.dist.startup.end_watch()  # if no step was left to do
        except NonFiniteError:  # on every rank at the same step, so waiting for the save in progress is safe
            saver.finish()
            raise
        saver.finish()
        border.flags.read(keep=0)
    return Result(
        step,
        stopped=step < total and evaluator.early_stop is None,
        **evaluator.losses(),
        reason=evaluator.early_stop if step < total else None,
        unsaved=saver.unsaved,
    )


def learning_rate(run: Run) -> Callable[[int], float]:
    """A function that returns the learning rate after a number of steps."""
    multiplier = lr_multiplier(run.config.optim, run.data.train.total_steps)
    peak = peak_learning_rate(run.config.optim, run.data.train.global_batch_size)
    return lambda step: peak * multiplier(step)


@dataclass
class Border:
    """The work between two steps: the ranks agree whether to stop, then evaluate and save."""

    run: Run
    steps: Reader
    evaluator: Evaluator
    saver: Saver
    is_stop_requested: Callable[[], bool]

    def __post_init__(self) -> None:
        self.flags = FlagBoard(self.run.dist, width=1)

    def cross(self, step: int) -> bool:
        """Do the work that is due after `step` steps. Returns whether to stop; the same on every rank."""
        run, steps, evaluator, saver = self.run, self.steps, self.evaluator, self.saver
        total = run.data.train.total_steps
        self.flags.post([int(self.is_stop_requested())])
        (asked,) = self.flags.read()
        stopping = bool(asked) or step - run.start_step == run.config.train.stop_after_steps
        ends, evaluates, saves = stopping or step == total, evaluator.is_due(step), saver.is_due(step)
        # after a save, the next attempt would start after a step that ends the run
        must_judge_first = run.config.train.max_nonfinite_steps == 1
        if saves and not (ends or evaluates or must_judge_first) and saver.is_async():
            saver.save(step, must_succeed=False)  # without a drain: the device may still be busy with the step
        elif ends or evaluates or saves:
            steps.drain(at_end=ends)
            # a run that is asked to stop saves at once, without an evaluation
            if evaluates and (not stopping or step == total):
                evaluator.evaluate(step, is_stop_requested=self.is_stop_requested)
            ending = stopping or evaluator.early_stop is not None
            is_best = evaluates and evaluator.is_best and saver.keeps_best
            if saves or ending or is_best:
                exports = run.config.run.export and not stopping
                saver.save(step, must_succeed=ending or step == total, then_export=exports)
            steps.restart_clock()
        return stopping


# --- around the loop -------------------------------------------------------------------------------------------------


@contextmanager
def long_lived() -> Iterator[Callable[[], None]]:
    """Yield a function that excludes all present objects from Python's garbage collections until the end of the block.
    Call it once most long-lived objects exist.

    A full collection visits every object. With torch and its compiler's objects this takes some 250 ms, in which no
    kernel is launched (docs/records/speed.md); it occurs now and then, and on each rank at a different step.
    Excluded objects are still freed once nothing refers to them.
    """

    def set_aside() -> None:
        gc.collect()  # garbage cycles that exist already would stay
        gc.freeze()

    try:
        yield set_aside
    finally:
        gc.unfreeze()


@contextmanager
def stop_requests(run_dir: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether this rank was asked to stop: by SIGTERM, Ctrl-C or the stop file.

    A second Ctrl-C ends the process at once, except under torchrun, which sends the terminal's Ctrl-C a second time.
    """
    stop_file = run_dir / STOP_FILE
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if has_failed(run_dir):  # torchrun ends this rank because another one failed: a save would wait for that rank
            os._exit(1)
        if number == signal.SIGINT and asked and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked) or stop_file.exists()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
