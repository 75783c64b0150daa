"""Which micro-batch is fastest on these devices: a few timed steps of each size, with the plan for memory that fits it.

The model has random weights and the rows are full, of one document each: neither weights nor data are read.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout

import click

from trainer.calibration.bench import Bench
from trainer.calibration.sizes import HEADER, Calibration, given_batch, search, sizes
from trainer.config.batch import BatchRules
from trainer.data.tokenize.tokenizer import load_tokenizer, quiet_transformers, vocab_size
from trainer.dist import Dist, on_rank0, start_dist, stop_dist
from trainer.failures.watchdog import leave
from trainer.models.attention import fastest_kernels
from trainer.models.build import check_length
from trainer.models.shapes import model_folder, shape_from_config
from trainer.schema import Config
from trainer.start.rank import FAILURES, comm_timeout_s, tell_failure, usable_device
from trainer.train.build import seed_everything
from trainer.train.precision import settle_anew


def calibrate_rank(config: Config, *, as_json: bool, debug: bool) -> int:
    """Time micro-batches with the other ranks and give the exit code; of several ranks a failing one does not return.

    The verdict is standard output; with `as_json` the table goes to standard error. A single rank raises
    KeyboardInterrupt.
    """
    dist = None
    try:
        dist = start_dist(usable_device(config), comm_timeout_s=comm_timeout_s(config.train.hang_timeout_s))
        is_main, table = dist.is_main, sys.stderr if as_json else sys.stdout

        def tell(line: str) -> None:
            if is_main:
                click.echo(line, file=table)

        with redirect_stdout(sys.stderr):  # what libraries print is no part of what was asked for
            found = calibrate(config, dist, tell=tell)
    except KeyboardInterrupt:
        if dist is not None and dist.world_size > 1:
            leave(130)
        raise
    except FAILURES as error:
        code = tell_failure(error, None, debug=debug)
        if dist is not None and dist.world_size > 1:
            leave(code)
        return code
    if is_main:
        click.echo(json.dumps(found.to_dict()) if as_json else "\n".join(found.render()))
    stop_dist()
    return 0 if found.timed else 1


def calibrate(config: Config, dist: Dist, *, tell: Callable[[str], None]) -> Calibration:
    """Time one size after another; every rank calls this. `tell` hears of each as it is done.

    Raises ConfigError and ModelError as a run would, and torch.OutOfMemoryError where one of several ranks has none
    left, for the others wait for it then.
    """
    quiet_transformers()
    precision = settle_anew(config, dist)
    config = precision.config
    tokenizer = load_tokenizer(config)
    folder = None if config.model.name is None else model_folder(config.model.name, dist, weights=False)
    shape = shape_from_config(config.model, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    seed_everything(config, dist)
    bench = Bench(config, shape, dist)
    began = time.monotonic()
    for line in [*precision.lines, HEADER]:
        tell(line)
    with fastest_kernels():
        timed, ended = search(
            sizes(config, dist.world_size, first=bench.first),
            bench,
            seconds=lambda: on_rank0(dist, lambda: time.monotonic() - began),  # rank 0's: all end at the same size
            tell=lambda one: tell(one.render()),
        )
    return Calibration(
        timed=tuple(timed),
        ended=ended,
        configured=BatchRules.of(config).rows,
        global_batch=given_batch(config, dist.world_size),
        by_accumulation=config.train.grad_accum_steps is not None,
        by_tokens=config.train.micro_batch_tokens is not None,
        seq_len=config.data.seq_len,
    )
