"""The order of the documents and rows of an epoch: a function of seed and epoch alone, whatever ranks there are.

A mixture says how much of each source an epoch takes. With weights an epoch is as long as all sources together, and a
source gives its share of it, going through its own documents again and again, each time in another order. Without, a
source gives each document `repeat` times; for a fraction, always the same documents, chosen by content hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.data.batches.packing import BUFFER_DOCS, Plan, plan_rows
from trainer.schema import Config, SourceConfig


@dataclass(frozen=True)
class Mixture:
    """Documents by source. `of_source` [documents] is the source of each, `keys` [documents] a hash of its content."""

    settings: Sequence[SourceConfig]
    of_source: np.ndarray
    keys: np.ndarray

    @classmethod
    def of_one(cls, count: int) -> Mixture:
        """A mixture of one source that gives everything once."""
        return cls([SourceConfig("")], np.zeros(count, np.uint16), np.zeros(count, np.uint64))

    @property
    def weighted(self) -> bool:
        return any(source.weight is not None for source in self.settings)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The documents of each source, in the order of reading."""
        return [np.flatnonzero(self.of_source == index) for index in range(len(self.settings))]

    @cached_property
    def counts(self) -> np.ndarray:
        """[sources] how many documents of each an epoch has."""
        sizes = np.array([len(members) for members in self.members])
        if self.weighted:
            return shares([source.weight or 0.0 for source in self.settings], int(sizes.sum()), sizes)
        repeats = np.array([source.repeat for source in self.settings])
        counts: np.ndarray = np.floor(repeats).astype(int) * sizes + np.rint(repeats % 1 * sizes).astype(int)
        return counts

    def asked(self) -> list[float]:
        """[sources] each source's share of an epoch's documents, as the config asks for."""
        sizes = np.array([len(members) for members in self.members], dtype=float)
        given = [source.repeat if source.weight is None else source.weight for source in self.settings]
        parts = np.array(given) * (1.0 if self.weighted else sizes)
        asked: list[float] = (parts / max(parts.sum(), 1e-300)).tolist()
        return asked


def shares(weights: Sequence[float], total: int, sizes: np.ndarray) -> np.ndarray:
    """`total` divided in proportion to `weights`, by largest remainder; a source of size 0 gives nothing."""
    exact = np.where(sizes > 0, np.asarray(weights, dtype=np.float64), 0.0)
    exact = exact / max(exact.sum(), 1e-300) * total
    counts: np.ndarray = np.floor(exact).astype(int)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def interleave(counts: np.ndarray) -> np.ndarray:
    """[sum of counts] which source comes when: every beginning of it holds the sources in proportion to `counts`."""
    sources = np.repeat(np.arange(len(counts)), counts)
    # the middle of each document's own part of the epoch
    places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return sources[np.argsort(places, kind="stable")]


def epoch_documents(
    mixture: Mixture, *, epoch: int, seed: int, shuffle: bool, random: np.random.RandomState | None = None
) -> np.ndarray:
    """[documents of the epoch] int64, the documents in the order in which they are laid into rows.

    `random`: the generator for shuffling without weights; by default that of seed and epoch.
    """
    if mixture.weighted:
        order = interleave(mixture.counts)
        result = np.empty(len(order), dtype=np.int64)
        for source, count in enumerate(mixture.counts):
            result[order == source] = _cycled(mixture, source, int(count), epoch=epoch, seed=seed, shuffle=shuffle)
        return result
    chosen = np.concatenate([_repeated(mixture, source) for source in range(len(mixture.settings))])
    return chosen[(random or generator(seed, epoch)).permutation(len(chosen))] if shuffle else chosen


def _cycled(mixture: Mixture, source: int, count: int, *, epoch: int, seed: int, shuffle: bool) -> np.ndarray:
    """The `count` documents of a source in `epoch`, cut out of its endless sequence of permutations."""
    members, begin = mixture.members[source], epoch * count
    parts: list[np.ndarray] = [members[:0]]
    left = count
    while left > 0:
        again, start = divmod(begin, len(members))
        turn = members[generator(seed, again, source + 1).permutation(len(members))] if shuffle else members
        parts.append(turn[start : start + left])
        begin, left = begin + len(parts[-1]), left - len(parts[-1])
    return np.concatenate(parts)


def _repeated(mixture: Mixture, source: int) -> np.ndarray:
    members, repeat = mixture.members[source], mixture.settings[source].repeat
    whole, count = int(repeat), int(mixture.counts[source])
    extra = count - whole * len(members)
    by_content = np.lexsort([members, mixture.keys[members]])
    return np.concatenate([np.tile(members, whole), members[np.sort(by_content[:extra])]])


def generator(*numbers: int) -> np.random.RandomState:
    """A random generator that depends only on the numbers."""
    # RandomState: its stream is frozen (NEP 19), so a run can be resumed with another numpy
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(numbers)))


def plan_epoch(lengths: Sequence[int], *, epoch: int, config: Config, mixture: Mixture | None = None) -> Plan:
    """The rows of one epoch: documents shuffled, laid into rows, rows shuffled; or all as read."""
    data, seed = config.data, config.train.seed
    mixture = mixture or Mixture.of_one(len(lengths))
    random = generator(seed, epoch)
    order = epoch_documents(mixture, epoch=epoch, seed=seed, shuffle=data.shuffle, random=random).tolist()
    if mixture.weighted:
        return _plan_in_proportion(lengths, order, random, config)
    return lay_out(lengths, order, random, config)


def lay_out(lengths: Sequence[int], order: list[int], random: np.random.RandomState, config: Config) -> Plan:
    """The documents of `order` in rows, which `random` shuffles when the config wants it."""
    rows = plan_rows(lengths, order, seq_len=config.data.seq_len, packing=config.data.packing)
    return _shuffled(rows, random) if config.data.shuffle else sorted(rows, key=min)


def _plan_in_proportion(
    lengths: Sequence[int], order: list[int], random: np.random.RandomState, config: Config
) -> Plan:
    """Shuffles rows only among those that were packed together, so that the sources stay in proportion."""
    data = config.data
    if not data.packing:
        return [[index] for index in order]
    sizes = np.asarray(lengths)  # once: a list would be converted for every part
    parts = [order[begin : begin + BUFFER_DOCS] for begin in range(0, len(order), BUFFER_DOCS)]
    plans = [plan_rows(sizes, part, seq_len=data.seq_len, packing=True) for part in parts]
    return [row for plan in plans for row in (_shuffled(plan, random) if data.shuffle else plan)]


def _shuffled(rows: Plan, random: np.random.RandomState) -> Plan:
    """Packing puts rows of long documents first, so the rows are shuffled as well."""
    return [rows[index] for index in random.permutation(len(rows))]
