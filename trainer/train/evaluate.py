"""Evaluates on held-out data before the first step, at intervals, and after the last; usually computes the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from trainer.batch import add_terms
from trainer.dist import FlagBoard, sum_over_ranks
from trainer.train.run import Evaluated, Run


def never() -> bool:
    """For runs that cannot be asked to stop."""
    return False


@torch.no_grad()
def held_out_loss(run: Run, is_stop_requested: Callable[[], bool] = never) -> Evaluated | None:
    """The loss per target token of the held-out data over all ranks, and its terms; None without held-out data.

    Also None if any rank was asked to stop meanwhile: all ranks then return after the same batch.
    """
    batches = run.data.eval.batches()
    if not batches:
        return None
    run.module.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=run.dist.device)
    terms: dict[str, torch.Tensor] = {}
    flags, stopping = FlagBoard(run.dist, width=1), 0
    for batch in batches:
        run.dist.progress.enter("evaluation")
        loss = run.loss_fn(run.module, batch.to(run.dist.device))
        sums += torch.stack([loss.total.double(), loss.count.double()])
        add_terms(terms, loss.terms)
        flags.post([int(is_stop_requested())])
        (stopping,) = flags.read()
        if stopping:
            break
    flags.read(keep=0)
    run.module.train()
    if stopping:
        return None
    total, count, *rest = sum_over_ranks(torch.cat([sums, *(t[None] for t in terms.values())]), run.dist).tolist()
    named = {f"eval_{name}": value / max(count, 1.0) for name, value in zip(terms, rest, strict=True)}
    return Evaluated(total / max(count, 1.0), int(count), named)


class Evaluator:
    """Evaluates when due, and keeps the first, the last and the best loss, also across a resume."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._look = run.evaluate or held_out_loss
        self.first_loss: float | None = run.extra.get("eval_loss_first")
        """From before the first step."""
        self.last_loss: float | None = run.extra.get("eval_loss_last")
        """None until there is a later evaluation."""
        self.best_loss: float | None = run.extra.get("eval_loss_best")
        self.best_step: int | None = run.extra.get("eval_step_best")
        """The step after which `best_loss` was found; 0: before the first step. Also None after a resume from a
        checkpoint of an earlier version."""
        self.is_best = False
        """Whether the last evaluation's weights are trained and better than all earlier ones."""
        self._best_trained: float = run.extra.get("eval_loss_best_trained") or math.inf
        self._no_better: int = run.extra.get("evals_without_gain") or 0

    def is_due(self, step: int) -> bool:
        return self._run.is_due(step, every=self._run.config.train.eval_every)

    def losses(self) -> dict[str, Any]:
        """The fields of a Result about evaluations."""
        return {
            "eval_loss_first": self.first_loss,
            "eval_loss_last": self.last_loss,
            "eval_loss_best": self.best_loss,
            "eval_step_best": self.best_step,
        }

    @property
    def early_stop(self) -> str | None:
        """Why the run should end now; None if it should continue. The same on every rank, like the losses."""
        patience = self._run.config.train.early_stop_patience
        if patience is None or self._no_better < patience:
            return None
        if self.best_loss is None:
            return f"no finite loss in {self._no_better} evaluations"
        gain = self._run.config.train.early_stop_min_delta
        margin = f" by more than {gain:g}" if gain else ""
        return f"no held-out loss improved the best one, {self.best_loss:.4f},{margin} in {self._no_better} evaluations"

    def evaluate(self, step: int, *, is_stop_requested: Callable[[], bool] = never) -> None:
        """Evaluate after `step` steps, record the result, then generate samples. Every rank must call this. Without
        held-out data there are only the samples."""
        self._judge(step, is_stop_requested)
        if self._run.sample is not None:
            self._run.sample(step, is_stop_requested)

    def _judge(self, step: int, is_stop_requested: Callable[[], bool]) -> None:
        began = time.perf_counter()
        found = self._look(self._run, is_stop_requested)
        if found is None:
            return
        loss = found.loss
        if step == 0:
            self.first_loss = loss
        else:
            self.last_loss = loss
        self._compare(loss, step)
        self._run.extra.update(
            **self.losses(),
            eval_step=step,
            eval_loss_best_trained=self._best_trained if math.isfinite(self._best_trained) else None,
            evals_without_gain=self._no_better,
        )
        seconds = time.perf_counter() - began
        told = {"step": step, "eval_loss": loss, "eval_tokens": found.tokens, "eval_s": round(seconds, 3)}
        self._run.log.evaluation({**told, **found.metrics})

    def _compare(self, loss: float, step: int) -> None:
        """Record whether this is the best loss so far; NaN never is."""
        least_gain = self._run.config.train.early_stop_min_delta
        best = math.inf if self.best_loss is None else self.best_loss
        self._no_better = 0 if loss < best - least_gain else self._no_better + 1
        if loss < best:
            self.best_loss, self.best_step = loss, step
        self.is_best = step > 0 and loss < self._best_trained
        if self.is_best:
            self._best_trained = loss
