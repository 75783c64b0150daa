"""torchrun for `train.py` on several ranks, with exit codes that tell what happened and without its stack traces.

Run as a file, with torchrun's own arguments. torchrun itself leaves with 1 and thirty lines whatever a rank
returned, also after a stop that the ranks obeyed; the ranks have told the reason already.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # not this folder: its names would hide other packages
    sys.path[0] = str(next(folder.parent for folder in Path(__file__).absolute().parents if folder.name == "trainer"))

from trainer.console import write_error
from trainer.failures.diagnose import FAILURE_FILE
from trainer.schema import OUTCOME_FILE, RUN_DIR_ENV
from trainer.typed import InvalidData, read_json

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

STOP_GRACE_S = 120
"""How long the ranks may save after a stop; torch before 2.12 gives them 30 s whatever is asked."""


def main(argv: Sequence[str]) -> int:
    """Run torchrun to its end. Gives the first failing rank's exit code, 0 after an obeyed stop, 128+N for signal N."""
    run_dir = Path(os.environ[RUN_DIR_ENV])
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    logging.disable(logging.ERROR)  # what torchrun says about failing ranks, which have spoken for themselves
    with suppress(OSError):
        (run_dir / OUTCOME_FILE).unlink()  # an earlier start's
    args = torchrun.parse_args(list(argv))
    args.shutdown_timeout = STOP_GRACE_S
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        return report(error, run_dir)
    except SignalException as error:
        return 0 if _read(run_dir / OUTCOME_FILE).state in ("stopped", "succeeded") else 128 + error.sigval
    except KeyboardInterrupt:  # before torchrun listens for it
        return 128 + signal.SIGINT
    return 0


LIKELY = {
    int(signal.SIGKILL): "mostly the system's out-of-memory killer; dmesg tells",
    int(signal.SIGBUS): "mostly a file that a library has mapped became shorter, its disk failed, or /dev/shm is full; "
    "the rank's stack above names the library",
}


def report(error: ChildFailedError, run_dir: Path) -> int:
    """The exit code for failed ranks; one that a signal ended could not say so itself."""
    rank, failure = first_failure(error.failures, told_by=_read(run_dir / FAILURE_FILE).rank)
    if failure.exitcode >= 0:
        return failure.exitcode
    write_error(f"Error: rank {rank} was ended by {failure.signal_name()}")
    if -failure.exitcode in LIKELY:
        write_error(f"hint: {LIKELY[-failure.exitcode]}")
    return 128 - failure.exitcode


def first_failure(failures: dict[int, ProcessFailure], *, told_by: int | None) -> tuple[int, ProcessFailure]:
    """The rank that the others' failures follow from: one ended by a signal, else the one that told its reason.

    torchrun itself ends the others by SIGTERM, and by SIGKILL 30 s later; of a failure it knows the second only.
    """
    began = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, bool, int]:
        rank, failure = item
        by_torchrun = failure.exitcode == -signal.SIGTERM or failure.timestamp > began + 20
        return failure.exitcode >= 0 or by_torchrun, rank != told_by, by_torchrun, failure.timestamp

    return min(failures.items(), key=order)


@dataclass(frozen=True)
class _Told:
    """Of outcome.json and of a failure's record, what is read here."""

    state: str | None = None
    rank: int | None = None


def _read(path: Path) -> _Told:
    try:
        return read_json(path, _Told)
    except (OSError, InvalidData):
        return _Told()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
