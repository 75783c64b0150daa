"""Loads sources that are too large to tokenize before the first step: one window of documents at a time."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from trainer.batch import Batch
from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import Ranks, build_batches, padding_share, rows_of_rank
from trainer.data.batches.steps import Ahead, DataPosition, global_batch_size
from trainer.data.dataset.documents import Source
from trainer.data.dataset.report import SplitReport
from trainer.data.rows.findings import Finding, Findings, render_findings
from trainer.data.streams.windows import Window, WindowMaker, WindowStart, first_window
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.tokenizer import tokenizer_hash
from trainer.errors import DataError
from trainer.schema import Config
from trainer.typed import InvalidData, from_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class WindowPlace:
    """A stream's position in a checkpoint, in addition to its `DataPosition`."""

    window: WindowStart


class StreamLoader:
    """Like `TrainLoader`, but steps can only be taken in order, and an epoch's length is not known.

    Two windows are in memory: the one in use and the next, which a thread prepares.
    """

    def __init__(
        self,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerFast,
        *,
        config: Config,
        ranks: Ranks,
        pad_id: int,
        start: WindowStart | None = None,
    ) -> None:
        self._config, self._ranks, self._pad_id = config, ranks, pad_id
        self._rules = BatchRules.of(config)
        self._tokenizer_hash = tokenizer_hash(tokenizer)
        self._maker = WindowMaker(config, sources, tokenizer)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="windows")
        self._ahead = Ahead(self._build_step, ranks)  # one step: a window is deleted once the step after it is prepared
        self._notes: deque[str] = deque()  # filled by the thread that lays out the next step
        self._lock = Lock()  # the caller and the thread that lays out the next step both ask for rows
        self._first_step, self._first_row = 0, 0
        self.findings: list[Finding] = []
        """The parts of the rows read so far that are in no document."""
        self._begin(start or first_window(sources))
        self.global_batch_size = global_batch_size(config, ranks.world_size)
        self.report = self._report()

    @property
    def steps_per_epoch(self) -> float | None:
        return None

    @property
    def total_steps(self) -> int:
        assert self._config.train.steps is not None, "a rule of the config"
        return self._config.train.steps

    def epoch_at(self, step: int) -> float:
        """Whole passes over the data before the row that follows `step` steps, as far as is known; 0.0 with weights."""
        place = bisect_right(self._borders, (self._row_of(step), math.inf))
        return float(self._borders[max(0, place - 1)][1])

    def step_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step `step`; the next step is laid out in a thread meanwhile."""
        return self._ahead.take(step, total_steps=self.total_steps)

    def take_notes(self) -> list[str]:
        """A line for each reason for which rows of the windows begun since were dropped."""
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def close(self) -> None:
        self._ahead.close()
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._maker.close()

    def rank_documents(self, step: int, rank: int) -> list[str]:
        """The ids of the conversations that one rank trains on in a step; none once their window is given back."""
        try:
            rows = self._rows_of(step)
        except ValueError:
            return []
        lengths = [sum(len(doc.ids) for doc in row) for row in rows]
        mine = rows_of_rank(lengths, rank, world_size=self._ranks.world_size, rules=self._rules)
        return [doc.id for row in mine for doc in rows[row]]

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position after `step` steps: the window it lies in, and the row."""
        row = self._row_of(step)
        window = self._start_of(row).to_dict()
        return {"step": step, "row": row, "window": window, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position, also with other ranks or another global batch size; its window is tokenized again.

        Raises DataError if sources, seed or layout differ from those of the position, InvalidData if `state` is not a
        position.
        """
        place = from_json(state, DataPosition)
        if place.fingerprint != self.fingerprint():
            raise DataError(
                "the checkpoint was made with another stream: files, tokenizer, template, a key of data or train.seed "
                f"have changed (order {place.fingerprint}, now {self.fingerprint()})",
                hint="restore them, a file's time too (`touch -r`, `cp -p`), or start anew with train.resume=never",
            )
        window = from_json(state, WindowPlace).window
        position, sources = window.position, len(self._maker.identities)
        if not len(position.records) == len(position.taken) == sources or window.row > place.row:
            raise InvalidData(f"is not of {sources} sources and before row {place.row}", place="window")
        self._first_step, self._first_row = place.step, place.row
        self._begin(window)

    def fingerprint(self) -> str:
        """Changes with the order of the rows, or with size or time of a file."""
        data = self._config.data
        keys = ("schema", "system_prompt", "loss_on", "seq_len", "overlong", "eval_fraction", "packing", "shuffle")
        what = [self._maker.identities, self._tokenizer_hash, self._config.train.seed, data.stream_window, data.train]
        values = {key: getattr(data, key) for key in keys}
        if data.turns != "all":  # streams that began before there was the key have none
            values["turns"] = data.turns
        text = json.dumps([what, values, bool(data.eval)], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # --- windows ---

    def _begin(self, start: WindowStart) -> None:
        self._ahead.forget()
        self._windows: deque[Window] = deque()
        self._borders: list[tuple[int, float]] = [(start.row, start.position.epoch)]  # first row, epoch
        self._coming = self._reading.submit(self._maker.make, start)

    def _build_step(self, step: int) -> list[Batch]:
        return build_batches(self._rows_of(step), ranks=self._ranks, rules=self._rules, pad_id=self._pad_id)

    def _row_of(self, step: int) -> int:
        return self._first_row + (step - self._first_step) * self.global_batch_size

    def _rows_of(self, step: int) -> list[list[Encoded]]:
        begin = self._row_of(step)
        with self._lock:
            # the step before may still be asked for its position
            while self._windows and self._windows[0].end_row <= begin - self.global_batch_size:
                self._windows.popleft()
            return [self._row(row) for row in range(begin, begin + self.global_batch_size)]

    def _row(self, row: int) -> list[Encoded]:
        window = self._window_of(row)
        return [window.docs[index] for index in window.rows[row - window.start.row]]

    def _window_of(self, row: int) -> Window:
        while not self._windows or self._windows[-1].end_row <= row:
            self._take_next()
        found = next((window for window in self._windows if window.start.row <= row < window.end_row), None)
        if found is None:
            raise ValueError(f"row {row} lies before row {self._windows[0].start.row}, the first one still held")
        return found

    def _take_next(self) -> None:
        window = self._coming.result()
        self._coming = self._reading.submit(self._maker.make, window.next)
        self._windows.append(window)
        self._borders.append((window.end_row, window.next.position.epoch))
        if window.start.row > 0:  # the first one is in the report
            place = f"train: window {window.start.number + 1} of epoch {window.start.position.epoch}"
            self._notes.extend(f"{place}: {line}" for line in window.describe_losses())
            known = {(one.kind, one.what) for one in self.findings}
            new = [one for one in window.findings if (one.kind, one.what) not in known]
            self._notes.extend(f"{place}: {line}" for line in render_findings(new))
        self.findings = Findings([*self.findings, *window.findings]).list()

    def _start_of(self, row: int) -> WindowStart:
        with self._lock:
            return self._window_of(row).start

    def _report(self) -> SplitReport:
        with self._lock:
            window = self._window_of(self._first_row)
        lengths = [sum(len(window.docs[index].ids) for index in row) for row in window.rows]
        padding = padding_share(
            lengths, step_rows=self.global_batch_size, world_size=self._ranks.world_size, rules=self._rules
        )
        return SplitReport(
            "train, first window of a stream",
            rows_read=window.rows_read,
            rows_kept=len(window.docs),
            dropped=window.dropped,
            tokens=window.tokens,
            target_tokens=sum(doc.num_targets for doc in window.docs),
            packed_rows=len(window.rows),
            padding_share=padding,
        )

    @property
    def sample(self) -> list[Encoded]:
        """Documents of the first window."""
        with self._lock:
            return self._window_of(self._first_row).docs
