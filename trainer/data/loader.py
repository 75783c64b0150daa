"""The batches of a step, and of an evaluation, for one rank.

The rows of all epochs form one endless sequence that depends only on (seed, epoch). Each step takes the next
global_batch_size rows; ranks and micro-batches only divide them. The last rows of an epoch that do not fill a step go
into the step that begins the next epoch. A run with a given number of epochs ends with a smaller step instead, so that
every row is used exactly that often.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from trainer.batch import Batch
from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import Ranks, build_batches, padding_share, rows_of_rank, rows_within
from trainer.data.batches.packing import Plan, plan_rows
from trainer.data.batches.steps import Ahead, DataPosition, Loader, global_batch_size
from trainer.data.dataset.cache import tokenize_in_memory, tokenize_in_run
from trainer.data.dataset.documents import (
    Documents,
    check_documents,
    divide,
    list_sources,
    overlap_note,
    read_stream_eval,
    trains_end_token,
)
from trainer.data.dataset.order import epoch_documents, plan_epoch
from trainer.data.dataset.report import DataReport, SplitReport
from trainer.data.dataset.store import Store
from trainer.data.rows.findings import Findings
from trainer.data.streams.loader import StreamLoader
from trainer.data.tokenize.chat import check_template
from trainer.data.tokenize.token_file import TokenFile, check_ids
from trainer.data.tokenize.tokenizer import vocab_size
from trainer.dist import Dist, gather
from trainer.errors import DataError
from trainer.schema import Config
from trainer.typed import from_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


STEPS_AHEAD = 3

NO_END_TOKEN = (
    "note: no end token is among the targets, so the model will not learn to stop; "
    "the chat template's assistant turn should end with one"
)


@dataclass(frozen=True)
class Data:
    """A run's data for training and evaluation."""

    train: Loader
    eval: EvalSet
    report: DataReport

    def close(self) -> None:
        """End the threads and processes that prepare further batches. No more batches can be taken."""
        self.train.close()


def build_data(
    config: Config,
    dist: Ranks,
    tokenizer: PreTrainedTokenizerFast,
    *,
    run_dir: Path | None = None,
    model_vocab: int | None = None,
) -> Data:
    """Reads, tokenizes and lays out all data, the same on every rank.

    With a run folder the tokens are stored there and shared by the ranks of a node (`dist` is then a `Dist`, and all
    ranks must call this); without it, each caller has its own in memory. `model_vocab`: rows of the model's embedding.
    Raises DataError if data cannot be read, has an ID that the model lacks, or if nothing is left to train on.
    """
    started = time.perf_counter()
    check_template(tokenizer)
    if config.data.streaming:
        check_tokenizer(tokenizer, model_vocab)
        return _build_stream(config, dist, tokenizer, started)
    if run_dir is None:
        store, table = tokenize_in_memory(config, tokenizer)
    else:
        store, table = tokenize_in_run(config, tokenizer, cast(Dist, dist), run_dir)
    check_store(store, model_vocab)
    documents, held_out = divide(store, table, config)
    check_documents(documents, where="data.train", seq_len=config.data.seq_len)
    if config.data.eval:
        check_documents(held_out, where="data.eval", seq_len=config.data.seq_len)
    pad_id = tokenizer.pad_token_id or 0  # never read: padding is recognized by position
    train = TrainLoader(documents, config=config, ranks=dist, pad_id=pad_id)
    notes = [] if trains_end_token(documents, tokenizer) else [NO_END_TOKEN]
    notes += overlap_note(documents, held_out)
    data = lay_out(
        train, documents.report, held_out, config=config, ranks=dist, pad_id=pad_id, started=started, notes=notes
    )
    data.report.findings.extend(table.findings)
    return data


def lay_out(
    train: Loader,
    report: SplitReport,
    held_out: Documents,
    *,
    config: Config,
    ranks: Ranks,
    pad_id: int,
    started: float,
    notes: list[str],
) -> Data:
    """The training data, the evaluation's batches, and a report on both. `started`: when reading began."""
    evaluation = EvalSet(held_out, config=config, ranks=ranks, pad_id=pad_id)
    held_out_report = held_out.report if len(held_out) else None
    account = DataReport(report, held_out_report, seconds=time.perf_counter() - started, notes=notes)
    return Data(train, evaluation, account)


def check_same_rows(data: Data, dist: Dist) -> None:
    """Raise DataError on every rank if nodes have read other rows: each reads its own copy of the data."""
    if dist.nodes is None:
        return
    prints = gather((data.train.fingerprint(), data.report.train.tokens), dist.control_group)
    other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
    if other is not None:
        names = f"{dist.nodes.name_of(0)} and {dist.nodes.name_of(other)}"
        hint = "give all nodes the same files, tokenizer and packages"
        raise DataError(f"{names} have read different rows", where="data.train", hint=hint)


def check_store(store: Store, model_vocab: int | None) -> None:
    """Raise DataError with the first row that has an ID not below `model_vocab`."""
    if model_vocab is None or (isinstance(store, TokenFile) and store.header.max_id < model_vocab):
        return
    for index in range(len(store)):
        check_ids(store[index], model_vocab)


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, model_vocab: int | None) -> None:
    """Raise DataError if the tokenizer has more IDs than the model: a stream is endless, so its IDs cannot be checked
    beforehand."""
    if model_vocab is not None and vocab_size(tokenizer) > model_vocab:
        raise DataError(
            f"the tokenizer has {vocab_size(tokenizer)} ids and the model {model_vocab}, and data.streaming is true",
            where="data.tokenizer",
            hint="name the model's own tokenizer, or set data.streaming=false, which looks at the ids that occur",
        )


def _build_stream(config: Config, dist: Ranks, tokenizer: PreTrainedTokenizerFast, started: float) -> Data:
    """The first window and the held-out rows. Each rank reads the stream separately."""
    held_out = read_stream_eval(config, tokenizer)
    if config.data.eval:
        check_documents(held_out, where="data.eval", seq_len=config.data.seq_len)
    pad_id = tokenizer.pad_token_id or 0
    sources = [source for source in list_sources(config) if not source.held_out]
    train = StreamLoader(sources, tokenizer, config=config, ranks=dist, pad_id=pad_id)
    notes = [] if trains_end_token(Documents.of(train.sample), tokenizer) else [NO_END_TOKEN]
    data = lay_out(
        train, train.report, held_out, config=config, ranks=dist, pad_id=pad_id, started=started, notes=notes
    )
    data.report.findings.extend(Findings([*train.findings, *held_out.findings]).list())
    return data


class TrainLoader:
    """`step_batches(step)`: this rank's micro-batches of an optimizer step; they depend only on the step.

    `total_steps`: optimizer steps of the run. `steps_per_epoch`: of the first epoch, not whole if rows are left over.
    `global_batch_size`: rows per step over all ranks.
    """

    def __init__(self, documents: Documents, *, config: Config, ranks: Ranks, pad_id: int) -> None:
        self._documents = documents
        self._lengths = documents.lengths
        self._config = config
        self._rules = BatchRules.of(config)
        self._ranks = ranks
        self._pad_id = pad_id
        self._sizes: list[int] = []  # rows of each epoch
        self._plans: dict[int, Plan] = {}  # the last two that were requested
        self._planning = Lock()  # the caller and the thread both request epochs
        self._first_step, self._first_row = 0, 0  # where the current division of rows into steps begins
        self._ahead = Ahead(self._build_step, ranks, depth=STEPS_AHEAD)
        self.global_batch_size = global_batch_size(config, ranks.world_size)
        first = self._epoch(0)
        documents.report.packed_rows = len(first)
        documents.report.padding_share = self._padding_share(first)

    @property
    def steps_per_epoch(self) -> float:
        return self._size(0) / self.global_batch_size

    @property
    def total_steps(self) -> int:
        if self._config.train.steps is not None:
            return self._config.train.steps
        left = self._end_row() - self._first_row
        return self._first_step + max(0, -(-left // self.global_batch_size))

    def epoch_at(self, step: int) -> float:
        """The number of passes over the data after `step` steps."""
        epoch, row = self._place(self._row_of(step))
        return epoch + row / self._size(epoch)

    def step_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step `step`, counted from 0; every rank gets the same number.

        Missing rows are filled with rows without targets (see `trainer.data.batches.micro_batches`).
        Meanwhile a thread prepares the next steps.
        """
        return self._ahead.take(step, total_steps=self.total_steps)

    def take_notes(self) -> list[str]:
        return []

    def close(self) -> None:
        self._ahead.close()

    def rank_documents(self, step: int, rank: int) -> list[str]:
        """The IDs of the conversations that one rank trains on in a step."""
        rows = self._rows_of(step)
        mine = rows_of_rank(self._row_lengths(rows), rank, world_size=self._ranks.world_size, rules=self._rules)
        return [self._documents.docs.name(index) for row in mine for index in rows[row]]

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position after `step` steps, the same on every rank."""
        return {"step": step, "row": self._row_of(step), "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position, also with another number of ranks or another global batch size.

        Raises DataError if documents, seed or layout differ from those of the position, InvalidData if `state` is
        not a position.
        """
        place = from_json(state, DataPosition)
        if place.fingerprint != self.fingerprint():
            raise DataError(
                "the checkpoint was made with other data: rows, tokenizer, template, data.seq_len, data.packing, "
                f"data.shuffle or train.seed have changed (order {place.fingerprint}, now {self.fingerprint()})",
                hint="restore them; where none has, remove the run's tokens/, which is made again from the rows; "
                "or start anew with train.resume=never",
            )
        self._first_step, self._first_row = place.step, place.row
        self._ahead.forget()

    def fingerprint(self) -> str:
        """Changes with the order or the content of the rows."""
        data = self._config.data
        order = (self._documents.fingerprint(), self._config.train.seed, data.seq_len, data.packing, data.shuffle)
        return hashlib.sha256(repr(order).encode()).hexdigest()[:16]

    def _padding_share(self, epoch: Plan) -> float:
        return padding_share(
            self._row_lengths(epoch),
            step_rows=self.global_batch_size,
            world_size=self._ranks.world_size,
            rules=self._rules,
        )

    def _build_step(self, step: int) -> list[Batch]:
        rows = self._rows_of(step)
        return build_batches(
            [(self._documents.docs[index] for index in row) for row in rows],
            lengths=self._row_lengths(rows),
            ranks=self._ranks,
            rules=self._rules,
            pad_id=self._pad_id,
        )

    def _row_lengths(self, rows: Plan) -> list[int]:
        return [sum(self._lengths[index] for index in row) for row in rows]

    def _rows_of(self, step: int) -> Plan:
        if step < self._first_step:
            raise ValueError(f"step {step} lies before step {self._first_step}, where this run began")
        begin = self._row_of(step)
        end = begin + self.global_batch_size
        if self._config.train.steps is None:
            end = min(end, self._end_row())
        places = [self._place(row) for row in range(begin, end)]
        return [self._epoch(epoch)[row] for epoch, row in places]

    def _row_of(self, step: int) -> int:
        row = self._first_row + (step - self._first_step) * self.global_batch_size
        return row if self._config.train.steps is not None else min(row, self._end_row())

    def _end_row(self) -> int:
        """Rows of a run that is given in epochs, at least one; a fraction of an epoch is rounded to whole rows."""
        epochs = self._config.train.epochs or 0.0
        whole = int(epochs)
        rows = sum(self._size(epoch) for epoch in range(whole))
        return max(1, rows + round((epochs - whole) * self._size(whole))) if epochs > whole else rows

    def _place(self, row: int) -> tuple[int, int]:
        """The epoch of a row of the endless sequence, and the row's index in it."""
        epoch = 0
        while row >= (size := self._size(epoch)):
            row -= size
            epoch += 1
        return epoch, row

    def _size(self, epoch: int) -> int:
        """The number of rows of one epoch."""
        while len(self._sizes) <= epoch:
            self._epoch(len(self._sizes))
        return self._sizes[epoch]

    def _epoch(self, epoch: int) -> Plan:
        with self._planning:
            if epoch not in self._plans:
                if len(self._plans) == 2:
                    del self._plans[min(self._plans)]
                mixture = self._documents.mixture
                plan = plan_epoch(self._lengths, epoch=epoch, config=self._config, mixture=mixture)
                self._plans[epoch] = plan
                if epoch == len(self._sizes):
                    self._sizes.append(len(plan))
            return self._plans[epoch]


class EvalSet:
    """The held-out rows. `batches()`: this rank's batches, the same number on every rank, built once."""

    def __init__(self, documents: Documents, *, config: Config, ranks: Ranks, pad_id: int) -> None:
        data, rules, world = config.data, BatchRules.of(config), ranks.world_size
        # with the requested repeats, in the order of reading
        order = epoch_documents(documents.mixture, epoch=0, seed=0, shuffle=False).tolist()
        tokens = documents.lengths
        plan = plan_rows(tokens, order, seq_len=data.seq_len, packing=data.packing)
        lengths = [sum(tokens[index] for index in row) for row in plan]
        documents.report.packed_rows = len(plan)
        documents.report.padding_share = padding_share(lengths, step_rows=len(plan), world_size=world, rules=rules)
        if config.train.eval_batches is not None:
            limit = config.train.eval_batches
            plan = plan[: rows_within(lengths, micro_batches=limit, world_size=world, rules=rules)]
        rows = [(documents.docs[index] for index in row) for row in plan]
        self._batches = build_batches(rows, lengths=lengths[: len(plan)], ranks=ranks, rules=rules, pad_id=pad_id)

    def __len__(self) -> int:
        return len(self._batches)

    def batches(self) -> list[Batch]:
        return self._batches
