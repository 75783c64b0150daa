"""Texts that a run's model generates during training: samples.jsonl, a console line, a text for the trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.console import shown
from trainer.metrics.log import MetricsLog, drop_records_after
from trainer.words import shortened

MOST_BYTES = 16 << 20
"""Limit of the file's size: it is pulled with the results, also after a long run."""
SHOWN_CHARS = 100


class SamplesLog:
    """Rank 0's log of samples. If the disk is full, samples are missing, and the run continues. `keep_through`: see
    MetricsLog."""

    def __init__(self, path: Path, log: MetricsLog, *, keep_through: int) -> None:
        self._path = path
        self._log = log
        self._warned = False
        drop_records_after(path, keep_through or -1)  # a run that starts over samples at step 0 again

    def write(self, step: int, said: Sequence[tuple[str, str]], *, seconds: float) -> None:
        """Write and print the model's texts after `step` steps: prompts with their texts, which took `seconds`."""
        records = [{"step": step, "prompt": prompt, "text": text} for prompt, text in said]
        self._append(records)
        self._log.note(f"{len(said)} sample{'s' if len(said) > 1 else ''} after step {step} in {seconds:.1f} s")
        for number, record in enumerate(records):
            prompt, text = (shortened(shown(record[key]), SHOWN_CHARS) for key in ("prompt", "text"))
            self._log.note(f"  {prompt} -> {text}")
            for tracker in self._log.trackers:
                tracker.text(step, f"samples/{number}", f"{record['prompt']}\n\n{record['text']}")

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(record) + "\n" for record in records).encode("ascii")
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > MOST_BYTES:
                self._warn(f"{self._path.name} has {MOST_BYTES >> 20} MiB: no more samples are kept")
                return
            with self._path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._warn(f"warning: {self._path} was not written: {error}; training goes on")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._log.note(text)
