"""SIGTERM outside the training loop: a rank that cannot hear torch's store outlasts it, and says which node is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as torch_dist

from tests.support.ranks import run_ranks
from trainer.dist import Dist
from trainer.failures.termination import ANSWER_S, outlasting_sigterm
from trainer.failures.watchdog import Peers, Watchdog
from trainer.progress import Progress


def sent_sigterm(dist: Dist, folder: str, hears: bool) -> str:
    watchdog = Watchdog(torch_dist.HashStore(), Peers(0, 1, Path(folder), 600, 600, 0.1), Progress())
    if hears:
        watchdog.start()
    with outlasting_sigterm(watchdog, several=True):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * ANSWER_S)
    return "alive"


def test_rank_outlasts_sigterm_if_the_store_is_silent(tmp_path):
    assert run_ranks(sent_sigterm, 1, str(tmp_path), False) == ["alive"]


def test_rank_ends_by_sigterm_if_the_store_answers(tmp_path):
    with pytest.raises(RuntimeError, match="rank 0 ended without a result"):
        run_ranks(sent_sigterm, 1, str(tmp_path), True)
