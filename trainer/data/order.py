"""The order of the rows of an epoch: a function of seed and epoch alone, whatever ranks and workers there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.packing import Plan, plan_rows
from trainer.schema import Config


def plan_epoch(lengths: Sequence[int], *, epoch: int, config: Config) -> Plan:
    """The rows of one epoch: documents shuffled, laid into rows, rows shuffled; or all as read."""
    data = config.data
    count = len(lengths)
    if not data.shuffle:
        return sorted(plan_rows(lengths, range(count), seq_len=data.seq_len, packing=data.packing), key=min)
    # RandomState: its stream is frozen (NEP 19), so a run can be resumed with another numpy
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([config.train.seed, epoch])))
    rows = plan_rows(lengths, random.permutation(count).tolist(), seq_len=data.seq_len, packing=data.packing)
    # packing puts rows of long documents first, so the rows are shuffled as well
    return [rows[index] for index in random.permutation(len(rows))]
