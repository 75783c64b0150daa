"""Runs torchrun for `train.py` on several ranks, with distinct exit codes and without torchrun's stack traces.

Run it as a file, with torchrun's arguments. torchrun itself exits with 1 and prints thirty lines whatever a rank
returned, even after an orderly stop; the ranks have already reported the reason.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # not this folder: its modules would hide other packages
    sys.path[0] = str(next(folder.parent for folder in Path(__file__).absolute().parents if folder.name == "trainer"))

from trainer.console import write_error
from trainer.failures.diagnose import FAILURE_FILE
from trainer.schema import OUTCOME_FILE, RUN_DIR_ENV
from trainer.typed import InvalidData, read_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

STOP_GRACE_S = 120
"""Seconds that the ranks have to save after a stop; torch before 2.12 always gives them 30 s."""


def main(argv: Sequence[str]) -> int:
    """Run torchrun. Returns the first failing rank's exit code, 0 after an orderly stop, 128+N for signal N."""
    try:
        from torch.distributed import run as torchrun
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    logging.disable(logging.ERROR)  # torchrun's reports of failing ranks: the ranks have reported already
    args = torchrun.parse_args(list(argv))
    args.shutdown_timeout = STOP_GRACE_S
    if not args.standalone:
        from trainer.start.node import run_node

        return run_node(args)
    run_dir = Path(os.environ[RUN_DIR_ENV])
    with suppress(OSError):
        (run_dir / OUTCOME_FILE).unlink()  # of an earlier start
    return run(args, run_dir, lambda: read_state(run_dir))


def run(
    args: Namespace,
    run_dir: Path,
    state: Callable[[], str | None],
    tell: Callable[[int, str], None] = lambda rank, message: None,
) -> int:
    """Run torchrun with parsed arguments. `state`: gives the state in outcome.json after a signal. `tell`: called with
    a rank that a signal ended, and the message about it."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(args)
    except ChildFailedError as error:
        return report(error, run_dir, tell)
    except SignalException as error:
        return 0 if state() in ("stopped", "succeeded") else 128 + error.sigval
    except KeyboardInterrupt:  # before torchrun handles it
        return 128 + signal.SIGINT
    return 0


def read_state(run_dir: Path) -> str | None:
    """The state in outcome.json; None without one."""
    return _read(run_dir / OUTCOME_FILE).state


LIKELY = {
    int(signal.SIGKILL): "mostly the system's out-of-memory killer; dmesg tells",
    int(signal.SIGBUS): "mostly a file that a library has mapped became shorter, its disk failed, or /dev/shm is full; "
    "the rank's stack above names the library",
}


def report(
    error: ChildFailedError, run_dir: Path, tell: Callable[[int, str], None] = lambda rank, message: None
) -> int:
    """The exit code for failed ranks. Reports a rank that a signal ended, because that rank could not report it."""
    rank, failure = first_failure(error.failures, told_by=_read(run_dir / FAILURE_FILE).rank)
    if failure.exitcode >= 0:
        return failure.exitcode
    hint = LIKELY.get(-failure.exitcode)
    message = f"Error: rank {rank} was ended by {failure.signal_name()}" + (f"\nhint: {hint}" if hint else "")
    write_error(message)
    tell(rank, message)
    return 128 - failure.exitcode


def first_failure(failures: dict[int, ProcessFailure], *, told_by: int | None) -> tuple[int, ProcessFailure]:
    """The rank whose failure caused the others: one ended by a signal, else the one that reported its reason.

    torchrun itself ends the other ranks by SIGTERM, and 30 s later by SIGKILL. Its failure times are whole seconds.
    """
    began = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, bool, int]:
        rank, failure = item
        by_torchrun = failure.exitcode == -signal.SIGTERM or failure.timestamp > began + 20
        return failure.exitcode >= 0 or by_torchrun, rank != told_by, by_torchrun, failure.timestamp

    return min(failures.items(), key=order)


@dataclass(frozen=True)
class _Told:
    """The fields of outcome.json and of the failure file that are read here."""

    state: str | None = None
    rank: int | None = None


def _read(path: Path) -> _Told:
    try:
        return read_json(path, _Told)
    except (OSError, InvalidData):
        return _Told()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
