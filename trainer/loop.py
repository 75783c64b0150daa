"""The training loop: steps, and between them evaluation, saving and stopping; once for every recipe and backend."""

from __future__ import annotations

from trainer.checkpoint.writer import Beside
from trainer.checkpoint.writing import AtPoint, nothing
from trainer.dist import FlagBoard
from trainer.evaluation import Evaluator
from trainer.garbage import long_lived
from trainer.optim.schedules import lr_multiplier, peak_learning_rate
from trainer.reading import NonFiniteError, Reader
from trainer.run import Result, Run
from trainer.saving import DEFAULT, Saver
from trainer.step import train_step
from trainer.stopping import stop_requests
from trainer.watch.profiling import is_watched, step_watchers, watched


def train(run: Run, *, at: AtPoint = nothing, beside: Beside = DEFAULT) -> Result:
    """Train from `run.start_step` to the last step, or until asked to stop; evaluated and saved on the way.

    Raises NonFiniteError after `train.max_nonfinite_steps` skipped steps in a row, on every rank at the same step.
    `at` hears of each point that a save passes; `beside` says how saves beside the training are made.
    """
    run.module.train()
    total = run.data.train.total_steps
    multiplier = lr_multiplier(run.config.optim, total)
    peak = peak_learning_rate(run.config.optim, run.data.train.global_batch_size)
    evaluator, saver = Evaluator(run), Saver(run, at=at, beside=beside)
    must_judge_first = run.config.train.nonfinite == "abort"  # a save would have the next attempt start behind the step
    with stop_requests(run.run_dir) as is_stop_requested, long_lived() as set_aside:
        saver.prepare()
        flags = FlagBoard(run.dist, width=1)
        if run.start_step == 0:
            run.dist.startup.enter("evaluation")
            evaluator.evaluate(0, is_stop_requested=is_stop_requested)
        steps = Reader(run)
        run.dist.startup.enter("first step")
        step, stopping = run.start_step, False
        watchers = step_watchers(run)
        try:
            while step < total and not stopping and not evaluator.early_stop:
                with watched(watchers, step + 1) as seen:
                    values = train_step(run, step, lr=peak * multiplier(step))
                    seen.append(values)
                step += 1
                saver.after_step()
                if saver.can_reserve():
                    with steps.memory.left_out():
                        saver.reserve()
                for note in run.data.train.take_notes():
                    run.log.note(note)
                steps.push(values)
                if step == run.start_step + 1:  # compiled code and the optimizer's state live to the end
                    set_aside()
                    steps.restart_clock()
                if is_watched(run, step):
                    steps.drain()
                    steps.restart_clock()
                flags.post([int(is_stop_requested())])
                (asked,) = flags.read()
                stopping = bool(asked) or step - run.start_step == run.config.train.stop_after_steps
                ends, evaluates, saves = stopping or step == total, evaluator.is_due(step), saver.is_due(step)
                if saves and not (ends or evaluates or must_judge_first) and saver.goes_beside():
                    with steps.memory.left_out():  # without a drain: the device may still be busy with the step
                        saver.save(step, must_succeed=False)
                elif ends or evaluates or saves:
                    steps.drain(at_end=ends)
                    # a run that is asked to stop saves at once and looks at nothing more
                    if evaluates and (not stopping or step == total):
                        evaluator.evaluate(step, is_stop_requested=is_stop_requested)
                    ending = stopping or evaluator.early_stop is not None
                    if saves or ending:
                        exports = run.config.run.export and not stopping
                        with steps.memory.left_out():  # a copy in memory that is free anyway
                            saver.save(step, must_succeed=ending or step == total, then_export=exports)
                    steps.restart_clock()
            steps.drain(at_end=True)
        except NonFiniteError:  # on every rank at the same step, so the save under way can be waited for
            saver.finish()
            raise
        saver.finish()
        flags.read(keep=0)
    return Result(
        step,
        stopped=step < total and evaluator.early_stop is None,
        eval_loss_first=evaluator.first_loss,
        eval_loss_last=evaluator.last_loss,
        eval_loss_best=evaluator.best_loss,
        reason=evaluator.early_stop if step < total else None,
        unsaved=saver.unsaved,
    )
