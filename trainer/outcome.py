"""outcome.json, the last file of a run: how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.files import replace_text
from trainer.schema import OUTCOME_FILE


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Write outcome.json in one piece: whoever follows the run may read it at any time."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in outcome.items()]
    replace_text(run_dir / OUTCOME_FILE, "{\n " + ",\n ".join(lines) + "\n}\n")  # a list of token ids on one line
