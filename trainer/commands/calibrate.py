"""`train.py CONFIG --calibrate` as one rank: time the sizes, and say which is best."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout

import click

from trainer.calibration.calibrate import calibrate
from trainer.dist import start_dist, stop_dist
from trainer.failures.watchdog import leave
from trainer.schema import Config
from trainer.start.rank import FAILURES, comm_timeout_s, tell_failure, usable_device


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
