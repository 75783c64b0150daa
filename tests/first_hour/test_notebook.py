"""examples/notebook.ipynb, run from top to bottom by a real kernel: a real training on the CPU of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

NOTEBOOK = REPO / "examples" / "notebook.ipynb"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what it needs, a home of its own, and a kernel that is this interpreter."""
    project = tmp_path / "project"
    for name in ("examples/notebook.ipynb", "configs/01_debug_sft.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, project / name)
    kernel = [sys.executable, "-m", "ipykernel", "install", "--prefix", str(tmp_path / "kernel")]
    subprocess.run(kernel, check=True, capture_output=True)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "kernel" / "share" / "jupyter"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return project


def text_of(cell: Any) -> str:
    """What a cell has printed, and its value."""
    return "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)


def test_notebook_is_kept_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert [cell.outputs for cell in cells] == [[]] * len(cells) and {cell.execution_count for cell in cells} == {None}


def test_notebook_runs_from_top_to_bottom(project: Path) -> None:
    notebook = nbformat.read(project / "examples" / "notebook.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = parameters.source.replace("STEPS = 20", "STEPS = 4")
    NotebookClient(
        notebook,
        timeout=int(HANG_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(project / "examples")}},
    ).execute()
    said = {
        cell.source.partition("\n")[0].partition(" = ")[0]: text_of(cell)
        for cell in notebook.cells
        if "outputs" in cell
    }
    trained = said["import torchferry"]
    job_id = re.search(r"^(debug-sft-\S+) succeeded; results: ", trained, re.MULTILINE)
    assert job_id is not None and "state='succeeded'" in trained, trained
    assert re.findall(r"^ +(\d+) +\d+\.\d{3}$", said["rows"], re.MULTILINE)[-1] == "4", said["rows"]
    assert "checkpoints" in said["folder"].split() and "metrics.jsonl" in said["folder"].split()
    assert (project / "results" / job_id[1] / "checkpoints" / "step_000004" / "COMPLETE").exists()
    assert said["count"].split() == ["0", "1", "2", "3", "'stopped'"]
    assert said["broken"].splitlines()[-1] == "FileNotFoundError: [Errno 2] No such file or directory: 'rows.jsonl'"
    assert [line.split()[1] for line in said["for info in torchferry.jobs()[-3:]:"].splitlines()] == [
        "succeeded",
        "stopped",
        "failed",
    ]
