"""How a rank hears that it should stop: a signal, or a file in the run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainer.failures.diagnose import has_failed
from trainer.schema import STOP_FILE


@contextmanager
def stop_requests(run_dir: Path) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether this rank was asked to stop: by SIGTERM, by Ctrl-C, or by the stop file.

    A second Ctrl-C ends the process at once, except under torchrun, which passes the terminal's Ctrl-C on once more.
    """
    stop_file = run_dir / STOP_FILE
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if has_failed(run_dir):  # torchrun ends us because another rank failed: a checkpoint would wait for that rank
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
